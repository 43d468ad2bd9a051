# SPDX-License-Identifier: Apache-2.0
"""The routing-weight gather under expert parallelism, against one process in fp32."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.automodel import gather_ranks, impostors
from tests.contracts.automodel.gather_cases import cases_for, degrees
from tests.contracts.automodel.upstream import PRELOAD
from tests.contracts.outcomes import ContractNotApplicable, PreconditionError
from tests.support.world import run_world

DEGREES = degrees(2, 4, 8)
# fp32 rounding of sums over at most 31 tokens, relative norm.
TOLERANCE = 1e-6
# bf16 keeps 8 bits: a rounding is off by at most this much, relatively.
UNIT_ROUNDOFF = torch.finfo(torch.bfloat16).eps / 2

_worlds: dict[tuple[str | None, int], list[list[dict[str, Any]]]] = {}
Found = list[list[dict[str, Any]]]  # by case, by rank


def explore(size: int, directory: Path) -> Found:
    """What each case came to on each rank of a world; one world a degree serves all contracts of this file."""
    key = (os.environ.get(impostors.VARIABLE), size)
    if key not in _worlds:
        ranks = run_world(gather_ranks.compare, size, directory, (cases_for(size),), preload=PRELOAD)
        _worlds[key] = [list(case) for case in zip(*ranks, strict=True)]
    return _worlds[key]


@pytest.fixture(params=DEGREES, ids="ep{}".format)
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Found:
    """The fp32 cases of a world."""
    return in_fp32(explore(request.param, tmp_path))


def in_fp32(found: Found) -> Found:
    """Without the bf16 cases."""
    return [case for case in found if not case[0]["case"].startswith("bf16")]


def relative(parts: list[tuple[float, float]]) -> float:
    """Relative norm of the difference, over several parts together."""
    return (sum(difference for difference, _ in parts) / sum(right for _, right in parts)) ** 0.5


def gate_errors(found: Found) -> dict[str, float]:
    """Relative error of the router's gradient by case; fails where a rank has none."""
    for case in found:
        without = [rank for rank, here in enumerate(case) if here["replicated"]["gate.weight"] is None]
        assert not without, f"gate.weight.grad is None on ranks {without} of {len(case)} ({case[0]['case']})"
    return {
        f"{case[0]['case']}: {name}": max(relative([here["replicated"][name]]) for here in case)
        for case in found
        for name in case[0]["replicated"]
    }


def hidden_errors(found: Found) -> dict[str, float]:
    """Relative error of the hidden states' gradient by case, over all ranks."""
    return {case[0]["case"]: relative([here["hidden"] for here in case]) for case in found}


def expert_errors(found: Found) -> dict[str, float]:
    """Relative error of the outputs and of each expert parameter's gradient by case, over all ranks."""
    errors = {f"{case[0]['case']}: output": relative([here["output"] for here in case]) for case in found}
    for case in found:
        for name in case[0]["sharded"]:
            parts = [here["sharded"][name] for here in case]
            assert None not in parts, f"{case[0]['case']}: {name} has no gradient on some rank"
            errors[f"{case[0]['case']}: {name}"] = relative(parts)
    return errors


def hold(errors: dict[str, float], what: str, name: str, measure: Callable[[str, float], None], bound: float) -> None:
    """Record the largest error and hold it against a bound."""
    worst = max(errors, key=errors.__getitem__)
    measure(name, errors[worst])
    assert errors[worst] <= bound, f"{what} is {errors[worst]:.2%} off ({worst}; bound {bound:.1e})"


@pytest.mark.contract("gather.gate-gradient", meaning="the router trains under expert parallelism")
def test_gate_gradient_equals_one_process(found: Found, measure: Callable[[str, float], None]) -> None:
    hold(gate_errors(found), "gate gradient", "gate_relative_error", measure, TOLERANCE)


@pytest.mark.contract("gather.hidden-gradient", meaning="layers below a MoE layer get the whole gradient")
def test_hidden_gradient_equals_one_process(found: Found, measure: Callable[[str, float], None]) -> None:
    hold(hidden_errors(found), "hidden-state gradient", "hidden_relative_error", measure, TOLERANCE)


@pytest.mark.contract("gather.expert-gradient", meaning="the experts themselves compute and train right")
def test_expert_gradients_equal_one_process(found: Found, measure: Callable[[str, float], None]) -> None:
    busy = [case for case in found if not case[0]["case"].startswith(("empty-rank-gemm", "idle"))]
    hold(expert_errors(busy), "expert output or gradient", "expert_relative_error", measure, TOLERANCE)


@pytest.mark.contract("gather.one-rank", meaning="EP=1 is the layer without expert parallelism")
def test_one_rank_equals_one_process(tmp_path: Path, measure: Callable[[str, float], None]) -> None:
    alone = in_fp32(explore(1, tmp_path))
    for errors in (gate_errors, hidden_errors, expert_errors):
        hold(errors(alone), errors.__name__, errors.__name__, measure, TOLERANCE)


@pytest.mark.contract("gather.bf16", meaning="in bf16 the gradients are one process's in fp32, to bf16's rounding")
@pytest.mark.parametrize("size", DEGREES, ids="ep{}".format)
def test_bf16_gradients_are_within_the_formats_bound(
    size: int, tmp_path: Path, measure: Callable[[str, float], None]
) -> None:
    cases = [case for case in explore(size, tmp_path) if case[0]["case"].startswith("bf16")]
    # Roundings on the longest way: forward to the output router (3), up, activation, down, sum over top-k, cast; the
    # same number backward; then the sum over the EP ranks. n of them: at most n·u / (1 - n·u), if none cancel.
    count = 2 * (3 + 5) + (size - 1)
    bound = count * UNIT_ROUNDOFF / (1 - count * UNIT_ROUNDOFF)
    hold(gate_errors(cases), "bf16 gate gradient", "gate_relative_error", measure, bound)
    hold(hidden_errors(cases), "bf16 hidden-state gradient", "hidden_relative_error", measure, bound)


@pytest.mark.contract("gather.no-tokens-anywhere", meaning="a step in which no EP rank has a token does not fail")
@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_has_a_token(size: int, tmp_path: Path) -> None:
    found = run_world(gather_ranks.empty_everywhere, size, tmp_path, (["torch", "torch_mm"],), preload=PRELOAD)
    assert found == [[]] * size


@pytest.mark.contract("gather.expert-bias", meaning="expert biases train on ranks whose experts got no token")
@pytest.mark.parametrize("size", DEGREES)
def test_every_expert_parameter_has_a_gradient_on_every_rank(size: int, tmp_path: Path) -> None:
    found = run_world(gather_ranks.skewed_bias, size, tmp_path, (["torch", "torch_mm"],), preload=PRELOAD)
    for backend in found[0]:
        without = {
            name: [rank for rank, here in enumerate(found) if here[backend][name] is None] for name in found[0][backend]
        }
        without = {name: ranks for name, ranks in without.items() if ranks}
        assert not without, f"no gradient: {without} ({backend})"
        for name in found[0][backend]:
            error = relative([here[backend][name] for here in found])
            assert error <= TOLERANCE, f"{name} is {error:.1%} off ({backend})"


@pytest.mark.contract("gather.shared-gradient", meaning="the gather's backward changes nobody else's gradient")
@pytest.mark.parametrize("size", degrees(2, 4))
def test_backward_edits_no_gradient_in_place(size: int, tmp_path: Path) -> None:
    found = run_world(gather_ranks.shared_gradient, size, tmp_path, preload=PRELOAD)
    for name in found[0]:
        changed = [rank for rank, here in enumerate(found) if not here[name]["equal"]]
        worst = max(relative([here[name]["error"]]) for here in found)
        assert not changed, f"{name}: another node's gradient was summed in place on ranks {changed}, {worst:.0%} off"


@pytest.mark.contract("gather.frozen-router", meaning="a frozen router costs no graph node and no collective")
def test_frozen_router_costs_nothing(tmp_path: Path) -> None:
    for found in run_world(gather_ranks.collectives, several(2), tmp_path, preload=PRELOAD):
        frozen, trainable = found["frozen"], found["trainable"]
        if frozen["forward"] != trainable["forward"] or "allreduce" not in frozen["backward"]:
            raise PreconditionError(f"the collectives of the process group were not counted: {found}")
        assert frozen["node"] == "None"
        # That of the summed output, and that of the gathered hidden states.
        assert frozen["backward"] == ["allreduce", "allreduce"]


@pytest.mark.contract("gather.frozen-on-one-rank", meaning="a router frozen on one rank only does not hang the others")
def test_router_frozen_on_one_rank(tmp_path: Path) -> None:
    size = several(4)
    found = run_world(gather_ranks.frozen_on_one_rank, size, tmp_path, preload=PRELOAD, deadline=20, pg_timeout=8)
    assert len(set(found)) == 1, f"not the same on every rank: {found}"
    ranks = list(range(size - 1))
    assert (
        found[0] is None or f"routing weights require a gradient on expert-parallel ranks {ranks} of {size}" in found[0]
    )


@pytest.mark.contract("gather.skipped-collective", meaning="a rank that skips the layer fails the others, with a cause")
def test_rank_that_skips_the_layer(tmp_path: Path) -> None:
    outcomes = run_world(
        gather_ranks.skips_the_layer,
        several(4),
        tmp_path,
        preload=PRELOAD,
        deadline=10,
        pg_timeout=2,
        grace=2,
        check=False,
    )
    *waiting, gone = outcomes
    assert gone.kind == "ok"
    for outcome in waiting:
        assert outcome.kind == "raised"
        assert outcome.seconds < 8
        assert "all_gather" in outcome.traceback
        assert "experts.py" in outcome.traceback


def several(wanted: int) -> int:
    """A world size of at least two."""
    (size,) = degrees(wanted)
    if size < 2:
        raise ContractNotApplicable("needs several ranks; torchrun has launched one")
    return size

# SPDX-License-Identifier: Apache-2.0
"""The routing-weight gather under expert parallelism, against one process in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contracts.automodel import gather_ranks
from tests.contracts.automodel.upstream import PRELOAD
from tests.contracts.outcomes import PreconditionError
from tests.support.world import run_world

# Tokens a rank. Never even, so that a backward that averages or cuts the wrong slice shows.
LAYOUTS = {"ep2": [5, 3], "ep2-rank-without-tokens": [8, 0], "ep4": [7, 3, 1, 5]}
# fp32 rounding of sums over at most 16 tokens, relative to the largest entry.
TOLERANCE = 1e-6

_worlds: dict[str, list[dict]] = {}


@pytest.fixture(params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each rank found, by rank; one world a layout serves all contracts of this file."""
    layout = request.param
    if layout not in _worlds:
        counts = LAYOUTS[layout]
        directory = tmp_path_factory.mktemp(layout)
        found = run_world(gather_ranks.gradients, len(counts), directory, (counts, {}), preload=PRELOAD)
        if not all(rank["received"] > 0 for rank in found):
            raise PreconditionError(f"a rank's experts got no token: {[rank['received'] for rank in found]}")
        _worlds[layout] = found
    return _worlds[layout]


def error(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Relative norm of the difference, over all ranks' parts together."""
    difference = sum((got - want).square().sum() for got, want in pairs)
    return float((difference / sum(want.square().sum() for _, want in pairs)).sqrt())


@pytest.mark.contract("gather.gate-gradient", meaning="the router trains under expert parallelism")
def test_gate_gradient_equals_one_process(ranks: list[dict], measure: Callable[[str, float], None]) -> None:
    without = [rank for rank, found in enumerate(ranks) if found["gate"][0] is None]
    assert not without, f"gate.weight.grad is None on ranks {without} of {len(ranks)}"
    relative = max(error([found["gate"]]) for found in ranks)
    measure("gate_relative_error", relative)
    assert relative <= TOLERANCE, f"gate gradient is {relative:.1%} off"


@pytest.mark.contract("gather.hidden-gradient", meaning="layers below a MoE layer get the whole gradient")
def test_hidden_gradient_equals_one_process(ranks: list[dict], measure: Callable[[str, float], None]) -> None:
    relative = error([found["hidden"] for found in ranks])
    measure("hidden_relative_error", relative)
    assert relative <= TOLERANCE, f"hidden-state gradient is {relative:.1%} off"


@pytest.mark.contract("gather.expert-gradient", meaning="the experts themselves train right")
def test_expert_gradients_equal_one_process(ranks: list[dict], measure: Callable[[str, float], None]) -> None:
    for name in ranks[0]["experts"]:
        relative = error([found["experts"][name] for found in ranks])
        measure(f"{name}_relative_error", relative)
        assert relative <= TOLERANCE, f"{name} is {relative:.1%} off"


@pytest.mark.contract("gather.no-tokens-anywhere", meaning="a step in which no EP rank has a token does not fail")
def test_no_rank_has_a_token(tmp_path: Path) -> None:
    run_world(gather_ranks.empty_everywhere, 2, tmp_path, preload=PRELOAD)


@pytest.mark.contract("gather.expert-bias", meaning="expert biases train on ranks whose experts got no token")
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_expert_parameter_has_a_gradient_on_every_rank(world_size: int, tmp_path: Path) -> None:
    found = run_world(gather_ranks.skewed_bias, world_size, tmp_path, preload=PRELOAD)
    without = {name: [rank for rank, has in enumerate(found) if not has[name]] for name in found[0]}
    without = {name: ranks for name, ranks in without.items() if ranks}
    assert not without, f"no gradient: {without}"

# SPDX-License-Identifier: Apache-2.0
"""What the gather's gradients become in training: FSDP2, activation checkpointing, accumulation, clipping, a resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.automodel import gather_training_ranks, impostors
from tests.contracts.automodel.gather_cases import degrees
from tests.contracts.automodel.upstream import PRELOAD
from tests.contracts.outcomes import PreconditionError
from tests.support.world import run_world

SIZES = degrees(2, 4)
TOLERANCE = 1e-6
_worlds: dict[tuple[str | None, int], list[dict[str, Any]]] = {}


@pytest.fixture(params=SIZES, ids="ep{}".format)
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    """What each rank found; one world a size."""
    key = (os.environ.get(impostors.VARIABLE), request.param)
    if key not in _worlds:
        _worlds[key] = run_world(gather_training_ranks.training_steps, request.param, tmp_path, preload=PRELOAD)
    return _worlds[key]


def check_step(ranks: list[dict[str, Any]], checkpointing: str, measure: Callable[[str, float], None]) -> None:
    """Hold every gradient, and the norm that was clipped by, against one process."""
    here = [rank[checkpointing] for rank in ranks]
    gates = [name for name in here[0]["gradients"] if name.endswith("gate.weight")]
    for name in gates:
        without = [rank for rank, found in enumerate(here) if found["gradients"][name] is None]
        assert not without, f"{name}.grad is None on ranks {without} of {len(here)}"
    assert len({found["norm"][0] for found in here}) == 1, f"norms differ: {[found['norm'][0] for found in here]}"
    norm, right = here[0]["norm"]
    measure("norm_relative_error", abs(norm - right) / right)
    assert abs(norm - right) <= TOLERANCE * right, f"the norm is {norm}, not {right}"
    for name in here[0]["gradients"]:
        for rank, found in enumerate(here):
            assert found["gradients"][name] is not None, f"{name}.grad is None on rank {rank}"
            difference, total = found["gradients"][name]
            # Experts that got no token: exactly zero.
            error = (difference / total) ** 0.5 if total else difference
            assert error <= TOLERANCE, f"{name} is {error:.1%} off on rank {rank}"


@pytest.mark.contract("gather.training-step", meaning="FSDP2, accumulation and clipping give one process's gradients")
def test_accumulated_and_clipped_gradients_equal_one_process(
    ranks: list[dict[str, Any]], measure: Callable[[str, float], None]
) -> None:
    check_step(ranks, "none", measure)


@pytest.mark.contract("gather.activation-checkpointing", meaning="checkpointed blocks have one process's gradients")
@pytest.mark.parametrize("checkpointing", [name for name in gather_training_ranks.CHECKPOINTING if name != "none"])
def test_checkpointed_gradients_equal_one_process(
    checkpointing: str, ranks: list[dict[str, Any]], measure: Callable[[str, float], None]
) -> None:
    check_step(ranks, checkpointing, measure)


@pytest.mark.contract("gather.expert-bias-checkpoint", meaning="idle expert biases: saved, and resumed exactly")
@pytest.mark.parametrize("size", SIZES)
def test_idle_biases_save_and_resume(size: int, tmp_path: Path) -> None:
    found = run_world(gather_training_ranks.bias_checkpoint, size, tmp_path, preload=PRELOAD)
    for rank, different in enumerate(found):
        assert not different, f"on rank {rank} differ from the run that never stopped: {different[:3]}"


@pytest.mark.contract("gather.compiled", meaning="with the rest of the block compiled, gradients are one process's")
def test_compiled_block_has_one_process_gradients(tmp_path: Path) -> None:
    size = degrees(2)[0]
    found = run_world(gather_training_ranks.compiled_rest, size, tmp_path, preload=PRELOAD)
    if not all(rank["graphs"] > 1 for rank in found):
        raise PreconditionError(f"graphs that were compiled, by rank: {[rank['graphs'] for rank in found]}")
    without = [rank for rank, here in enumerate(found) if here["gate"] is None]
    assert not without, f"gate.weight.grad is None on ranks {without} of {size}"
    for rank, here in enumerate(found):
        for name in ("hidden", "gate"):
            difference, total = here[name]
            assert (difference / total) ** 0.5 <= TOLERANCE, f"{name} gradient differs on rank {rank}"

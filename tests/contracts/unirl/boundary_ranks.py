# SPDX-License-Identifier: Apache-2.0
"""Rank bodies: cells of the matrix on FSDP2 shards, and refusals that all ranks must hear of."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist

from tests.contracts.outcomes import PreconditionError
from tests.contracts.unirl.runs import USED, Cell, start, take_weights, try_cell
from tests.contracts.unirl.upstream import sharded_state
from tests.support.training import differences
from tests.support.world import RankContext


def everyone(mine: Any) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def try_cells(context: RankContext, cells: list[Cell], shard: bool = True) -> tuple[int, str | None]:
    """Return the number of cells that are exact, and the first that is not with what is wrong on which rank."""
    for number, cell in enumerate(cells):
        found = try_cell(cell, context.directory / f"cell-{number}", shard=shard)
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(everyone(found)) if text]
        if wrong:
            return number, f"{cell}: {wrong[0]}"
    return len(cells), None


def refused_by_rank_0_alone(context: RankContext) -> dict[str, Any]:
    """Rank 0 alone holds the gathered dict, and it is malformed."""
    run = start(shard=True)
    run.train(range(3), USED)
    state = sharded_state.gather_optimizer_state_dict(run.model, run.optimizer)
    if bool(state) != (context.rank == 0):
        raise PreconditionError("the gathered dict is not on rank 0 alone")
    if context.rank == 0:
        state = copy.deepcopy(state)
        state["state"]["used.weight"] = "not an entry"
    other = start(seed=2, shard=True)
    take_weights(run, other)
    before = other.snapshot()
    text = None
    try:
        sharded_state.load_optimizer_state_dict(other.model, other.optimizer, state)
    except Exception as failure:
        text = f"{type(failure).__name__}: {failure}"
    return {"text": text, "changed": differences(before, other.snapshot())}

# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of loads that succeed on some ranks only."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    OptimizerStateError,
    load_optimizer_state,
    optimizer_state_dict,
)
from tests.contracts.training import differences, snapshot, start_run
from tests.support.world import RankContext


def _saved(context: RankContext) -> str:
    path = str(context.directory / "optim")
    run = start_run()
    run.train(range(3), ["used"])
    dcp.save(
        {"optim": optimizer_state_dict(run.model, run.optimizer), "sched": run.scheduler.state_dict()},
        checkpoint_id=path,
    )
    dist.barrier()
    return path


def _attempt(run: Any, path: str) -> dict[str, Any]:
    before = snapshot(run.model, run.optimizer, run.scheduler)
    text = None
    try:
        load_optimizer_state([run.model], [run.optimizer], [run.scheduler], path)
    except OptimizerStateError as failure:
        text = str(failure)
    changed = differences(before, snapshot(run.model, run.optimizer, run.scheduler))
    # Training can go on after a refusal.
    run.train(range(3, 5), ["used", "late"])
    return {"text": text, "changed": changed}


def one_rank_cannot_look(context: RankContext) -> dict[str, Any]:
    """Rank 1 alone has a parameter that the checkpoint does not list."""
    path = _saved(context)
    names = ("used", "late", "never", "added") if context.rank == 1 else ("used", "late", "never")
    return _attempt(start_run(names), path)


def one_rank_cannot_act(context: RankContext) -> dict[str, Any]:
    """On rank 1 alone the scheduler refuses its state, after the optimizer has taken its own."""
    path = _saved(context)
    run = start_run()
    run.train(range(2), ["late"])
    if context.rank == 1:

        def refuse(state: dict[str, Any]) -> None:
            run.scheduler.last_epoch = 99
            raise ValueError("no such schedule")

        run.scheduler.load_state_dict = refuse
    return _attempt(run, path)


def everything_is_listed_somewhere(context: RankContext) -> list[str]:
    """Each rank holds one layer, as pipeline stages do; the report must not call the others' dropped."""
    path = _saved(context)
    run = start_run((["used", "late"][context.rank],))
    messages: list[str] = []
    import logging

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nemo_automodel_shim").addHandler(handler)
    load_optimizer_state([run.model], [run.optimizer], None, path)
    return messages

# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of resumes that must fail: readable, on every rank, with nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.contracts.automodel.upstream import plain_checkpointer
from tests.support.training import differences, start_run
from tests.support.world import RankContext


class UnpicklableError(OSError):
    """A storage error that cannot be sent to another rank."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle code objects")


def _save(context: RankContext, path: str, names: tuple[str, ...]) -> None:
    run = start_run(names)
    run.train(range(2), [names[0]])
    plain_checkpointer(path, context.rank).save_optimizer(run.optimizer, run.model, path, run.scheduler)
    dist.barrier()


def _attempt(context: RankContext, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    run = start_run(names)
    before = run.snapshot()
    text = None
    try:
        plain_checkpointer(path, context.rank).load_optimizer(run.optimizer, run.model, path, run.scheduler)
    except BaseException as failure:
        # CheckpointException of torch derives from BaseException.
        text = f"{type(failure).__name__}: {failure}"
    return {"text": text, "changed": differences(before, run.snapshot())}


def unlisted_parameters(context: RankContext) -> dict[str, Any]:
    """The live model has two layers that the checkpoint does not list."""
    path = str(context.directory / "checkpoint")
    _save(context, path, ("used", "late"))
    return _attempt(context, path, ("used", "late", "added", "another"))


def unpicklable_read(context: RankContext) -> dict[str, Any]:
    """On rank 1 alone, reading the data fails with an exception that cannot be pickled."""
    path = str(context.directory / "checkpoint")
    _save(context, path, ("used",))
    if context.rank == 1:
        open_stream = FileSystem.create_stream

        def failing(self: FileSystem, where: Any, mode: str) -> Any:
            if Path(where).suffix == ".distcp" and mode == "rb":
                raise UnpicklableError(5, "the disk went away", str(where))
            return open_stream(self, where, mode)

        FileSystem.create_stream = failing
    return _attempt(context, path, ("used",))

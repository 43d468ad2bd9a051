# SPDX-License-Identifier: Apache-2.0
"""Rank bodies in the processes that ``torchrun`` has launched: one pytest a rank, all running the same tests.

With ``pytest --torchrun=auto`` ``run_world`` starts nothing: this process is a rank already. Rank, world size and
backend are those of the launch. What each rank came to goes to all of them through the launch's own store, so that
every rank sees the same results and the same failure, and all go on to the next test together.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import rank as rank_module
from .outcomes import RankOutcome

_PATIENCE = 30.0  # seconds beyond a world's deadline, for a rank that is slow to say what became of it


class LaunchError(RuntimeError):
    """This process was not launched by ``torchrun``, or not for what was asked."""


class OtherWorldSize(LaunchError):
    """A world of another size than the launched one was asked for."""


class Launch:
    """The world that this process was launched into."""

    def __init__(self, backend: str) -> None:
        """Join the launch's store.

        Raises:
            LaunchError: The environment is not one that ``torchrun`` made, or NCCL lacks a GPU for each local rank.
        """
        try:
            self.rank, self.world_size, self.local_rank, local_size = (
                int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            )
        except KeyError as error:
            raise LaunchError(f"--torchrun needs torchrun around pytest: {error.args[0]} is not set") from None
        import torch
        from torch.distributed.rendezvous import rendezvous

        gpus = torch.cuda.device_count()
        if backend == "auto":
            backend = "nccl" if gpus >= local_size else "gloo"
        if backend == "nccl" and gpus < local_size:
            raise LaunchError(f"--torchrun=nccl: {local_size} ranks on this host, and {gpus} GPUs")
        self.backend = backend
        self._store, _, _ = next(rendezvous("env://", self.rank, self.world_size, timeout=timedelta(minutes=5)))
        self._worlds = 0

    def run(
        self,
        body: Callable[..., Any],
        world_size: int,
        directory: Path,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: float,
        pg_timeout: float,
    ) -> tuple[list[RankOutcome], Path, float]:
        """Run a body on this rank, while the others do the same.

        Returns:
            What became of each rank, the directory of rank 0 (all use that one), and the seconds it took.

        Raises:
            OtherWorldSize: The launch has another number of ranks.
            LaunchError: A rank did not say in time what became of it.
        """
        import torch.distributed as dist

        if world_size != self.world_size:
            raise OtherWorldSize(f"needs a world of {world_size} ranks; torchrun has launched {self.world_size}")
        self._worlds += 1
        began = time.monotonic()
        store = dist.PrefixStore(f"world-{self._worlds}", self._store)
        limit = timedelta(seconds=deadline + _PATIENCE)
        if self.rank == 0:
            store.set("directory", str(directory))
        store.wait(["directory"], limit)
        directory = Path(store.get("directory").decode())
        context = rank_module.make_context(self.rank, world_size, directory, self.backend, self.local_rank)
        mine = self._body(context, dist.PrefixStore("group", store), pg_timeout, (body, args, kwargs), store, limit)
        mine.seconds = time.monotonic() - began
        store.set(f"outcome-{self.rank}", pickle.dumps(mine))
        keys = [f"outcome-{rank}" for rank in range(world_size)]
        try:
            store.wait(keys, limit)
        except RuntimeError as error:
            silent = [key for key in keys if not store.check([key])]
            raise LaunchError(f"nothing heard in {limit.total_seconds():.0f} s: {', '.join(silent)}") from error
        return [pickle.loads(store.get(key)) for key in keys], directory, time.monotonic() - began

    def leave(self) -> None:
        """Wait until every rank has come to its end, or is gone.

        ``torchrun`` kills the others at the first rank that ends in failure: before rank 0 has printed what failed.
        """
        import torch.distributed as dist

        store = dist.PrefixStore("end", self._store)
        try:
            store.set(str(self.rank), "")
            store.wait([str(rank) for rank in range(self.world_size)], timedelta(seconds=_PATIENCE))
        except RuntimeError:
            pass  # dead ranks, or a store that went with rank 0: nothing is left to wait for

    def _body(
        self, context: Any, group_store: Any, pg_timeout: float, call: tuple[Any, ...], store: Any, limit: timedelta
    ) -> RankOutcome:
        import torch.distributed as dist

        body, args, kwargs = call
        outcome = RankOutcome(self.rank, "setup", pid=os.getpid())
        inside = rank_module.in_rank
        rank_module.in_rank = True
        try:
            with rank_module.process_group(context, group_store, pg_timeout):
                outcome.kind, outcome.entered = "raised", True
                try:
                    outcome.value = body(context, *args, **kwargs)
                    outcome.kind = "unpicklable"
                    pickle.dumps(outcome.value)
                    outcome.kind = "ok"
                finally:
                    rank_module.check_tree()
                    # Sockets stay open until every rank is through: see `tests/support/rank.py`.
                    store.set(f"through-{self.rank}", "")
                    store.wait([f"through-{rank}" for rank in range(context.world_size)], limit)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if not outcome.entered or isinstance(error, rank_module.SetupError):
                outcome.kind = "setup"
            outcome.value = None
            for name, value in rank_module.describe_exception(error).items():
                setattr(outcome, name, value)
        finally:
            rank_module.in_rank = inside
            if dist.is_initialized():
                dist.destroy_process_group()
        return outcome


current: Launch | None = None


def join(backend: str) -> Launch:
    """Make this process a rank of the launch for all worlds to come.  Raises ``LaunchError``."""
    global current
    current = Launch(backend)
    return current

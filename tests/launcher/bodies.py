# SPDX-License-Identifier: Apache-2.0
"""Rank bodies for the tests of the world launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.launcher.plain_bodies import sleep_forever
from tests.support.world import RankContext

_visits = 0


class UnpicklableError(Exception):
    """An exception that refuses to be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("this exception cannot be pickled")


class Private:
    """A value that unpickles only in the process that made it."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["pid"] != os.getpid():
            raise ValueError("made elsewhere")


def summed(context: RankContext, *addends: float, factor: float = 1.0) -> tuple[int, int, float]:
    """Return rank, world size and a sum over all ranks."""
    tensor = torch.tensor([(context.rank + 1.0 + sum(addends)) * factor])
    dist.all_reduce(tensor)
    return context.rank, context.world_size, tensor.item()


def facts(context: RankContext) -> dict[str, Any]:
    """Return what a rank sees of its process and its environment."""
    global _visits
    _visits += 1
    return {
        "pid": os.getpid(),
        "visits": _visits,
        "context": context,
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "env": dict(os.environ),
        "cwd": Path.cwd(),
    }


def speak(context: RankContext) -> None:
    """Write to the log in three ways; rank 1 fails afterwards."""
    print(f"printed by {context.rank}")
    os.write(2, f"written by {context.rank}\n".encode())
    subprocess.run(["echo", f"echoed by {context.rank}"], check=True)
    if context.rank == 1:
        raise LookupError("rank 1 has spoken")


def fail(context: RankContext, how: str, failing: int = 1) -> str:
    """Have one rank fail in the way named; the others return."""
    if context.rank != failing:
        return "fine"
    if how == "raise":
        raise ValueError("text of the failure")
    if how == "unpicklable exception":
        raise UnpicklableError("still reported")
    if how == "str fails":
        raise type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})("unseen")
    if how == "checkpoint":
        raise CheckpointException("failed", {failing: (ValueError("shard is short"), None)})
    if how == "keyboard":
        raise KeyboardInterrupt
    if how == "sys.exit":
        sys.exit(3)
    if how == "sys.exit 0":
        sys.exit()
    if how == "os._exit":
        os._exit(3)
    if how == "os._exit 0":
        os._exit(0)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)
    return "survived"


def segfault_in_c(context: RankContext) -> None:
    """Have rank 0 read address 0."""
    import ctypes

    if context.rank == 0:
        ctypes.string_at(0)


def collective_with_failure(context: RankContext, failing: int, how: str) -> None:
    """Have one rank fail while the others wait for it in a collective."""
    dist.all_reduce(torch.ones(1))
    if context.rank == failing:
        time.sleep(0.3)
        fail(context, how, failing)
    dist.all_reduce(torch.ones(1))


def fail_beside_sleepers(context: RankContext) -> None:
    """Have rank 0 fail and the others hang outside of any collective."""
    if context.rank == 0:
        raise ValueError("alone")
    sleep_forever(context, (context.rank,))


def late_failure(context: RankContext) -> None:
    """Have rank 0 fail at once and rank 1 a little later, by itself."""
    time.sleep(0.4 * context.rank)
    raise ValueError(f"failure of {context.rank}")


def wait_for_early_leaver(context: RankContext) -> str:
    """Have rank 0 return while the others wait for it."""
    if context.rank:
        dist.all_reduce(torch.ones(1))
    return "left"


def wait_in_mesh(context: RankContext) -> None:
    """Have rank 0 wait for rank 1 in a group that a mesh made, while rank 1 sleeps."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if context.rank == 0:
        dist.all_reduce(torch.ones(1), group=mesh.get_group("inner"))
    else:
        sleep_forever(context, (context.rank,))


def other_ranks_checkpoint_failure(context: RankContext) -> None:
    """Have all ranks raise what torch raises everywhere when rank 2 cannot save; rank 2 is the last to do so."""
    time.sleep(0.5 if context.rank == 2 else 0.0)
    raise CheckpointException("failed", {2: (OSError("disk full"), None)})


def return_lambda(context: RankContext) -> Any:
    """Return what cannot be pickled on rank 1."""
    return (lambda: None) if context.rank == 1 else "fine"


def return_private(context: RankContext) -> Any:
    """Return what cannot be unpickled on rank 1."""
    return Private() if context.rank == 1 else "fine"


def die_after_return(context: RankContext) -> str:
    """Return, but have a thread of rank 1 end the process before the world is over."""
    if context.rank == 1:
        threading.Timer(0.2, os._exit, (5,)).start()
    else:
        time.sleep(0.6)
    return "fine"

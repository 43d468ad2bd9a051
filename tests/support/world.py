# SPDX-License-Identifier: Apache-2.0
"""Run a function in a world of real ranks: one process each, joined in a process group.

``run_world`` starts fresh processes for each world, and none of them outlives the call.  They are forked from a
server that has already imported torch, so that a world of eight starts in a fraction of a second.  In a pytest that
torchrun launched (``--torchrun``), the launched processes are the ranks instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import launch
from . import rank as rank_module
from .forkserver import ForkServerError, get_server, stop_server
from .outcomes import RankOutcome, WorldFailure
from .rank import RankContext
from .supervisor import World

__all__ = [
    "ForkServerError",
    "RankContext",
    "RankOutcome",
    "WorldFailure",
    "one_world_at_a_time",
    "run_world",
    "stop_server",
]

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
)

# Set in the ranks unless the caller's environment says otherwise.  Dynamo: compiled functions do not finish in
# forked processes.  OpenMP: the ranks share few cores.
ENV_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def run_world(
    body: Callable[..., Any],
    world_size: int,
    directory: Path | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    deadline: float = 60.0,
    pg_timeout: float = 30.0,
    grace: float = 3.0,
    preload: Sequence[str] = (),
    check: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``body(context, *args, **kwargs)`` in ``world_size`` fresh processes and return the results by rank.

    Args:
        body: a function at module level, importable by its name in another process.
        world_size: number of ranks, at least 1.
        directory: of the world, made if missing: ``rank-N.log`` (stdout and stderr), ``rank-N.stacks``, and whatever
            the body writes.  Worlds may use it in turn; logs are those of the last one.
        args: positional arguments for the body after the context; they are pickled.
        kwargs: keyword arguments for the body; they are pickled.
        deadline: seconds for the whole world.  Neither waiting for another world nor the start of the fork server
            counts.  Stopping what still runs then takes up to a few seconds more.
        pg_timeout: seconds, timeout of the process group and of groups made by the body without their own.
        grace: seconds which the other ranks have after the first failure to fail by themselves.
        preload: modules to import in the fork server in addition to those of torch.
        check: whether to raise if a rank fails; otherwise the result is a list of ``RankOutcome``.
        backend: of the process group; ``nccl`` takes one GPU a rank.  Under torchrun the launch has chosen.

    Raises:
        WorldFailure: a rank failed, and ``check`` is true.
        ForkServerError: the fork server could not be started, or died.
        TypeError: the body is not an importable function, or the arguments cannot be pickled.
        ValueError: no ranks, or a timeout that is not positive or not below the deadline.
        OtherWorldSize: torchrun has launched another number of ranks.
        RuntimeError: called inside a rank.
    """
    if rank_module.in_rank:
        raise RuntimeError("run_world was called inside a rank")
    if world_size < 1:
        raise ValueError(f"a world has at least one rank, not {world_size}")
    if not 0 < pg_timeout < deadline:
        raise ValueError(f"pg_timeout ({pg_timeout} s) must be positive and less than the deadline ({deadline} s)")
    if grace < 0:
        raise ValueError(f"grace must not be negative: {grace}")
    _check_importable(body)
    try:
        call = pickle.dumps((body, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise TypeError(f"the arguments of {body.__qualname__} cannot be pickled: {error}") from error
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if launch.current is not None:
        outcomes, directory, elapsed = launch.current.run(
            body, world_size, directory, tuple(args), dict(kwargs or {}), deadline, pg_timeout
        )
        return _results(outcomes, directory, elapsed, check)
    modules = tuple(dict.fromkeys((*PRELOAD, *preload)))
    env = {**ENV_DEFAULTS, **os.environ}
    with one_world_at_a_time():
        server = get_server(modules, env)
        job = {"world_size": world_size, "directory": str(directory), "call": call, "pg_timeout": pg_timeout}
        job |= {"env": env, "cwd": os.getcwd(), "preload": modules, "backend": backend}
        world = World(server, job, directory, deadline, grace)
        try:
            world.run()
        except ForkServerError:
            stop_server()
            world.kill()
            raise
        except BaseException:
            # ^C perhaps, in the middle of a message.  The server kills and reaps all ranks before it ends.
            stop_server()
            raise
        finally:
            world.close()
    return _results(world.outcomes(), directory, world.elapsed, check)


def _results(outcomes: list[RankOutcome], directory: Path, elapsed: float, check: bool) -> list[Any]:
    if not check:
        return outcomes
    if any(outcome.kind != "ok" for outcome in outcomes):
        raise WorldFailure(outcomes, directory, elapsed)
    return [outcome.value for outcome in outcomes]


def _check_importable(body: Callable[..., Any]) -> None:
    if not isinstance(body, types.FunctionType):
        raise TypeError(f"a rank body must be a module-level function, not {type(body).__qualname__}")
    name = f"{body.__module__}.{body.__qualname__}"
    if "<" in body.__qualname__ or "." in body.__qualname__:
        raise TypeError(f"a rank body must be a module-level function; {name} is a lambda, a closure or a method")
    if body.__module__ == "__main__":
        raise TypeError(f"a rank body must be in a module that other processes can import, not __main__: {name}")
    if getattr(sys.modules.get(body.__module__), body.__qualname__, None) is not body:
        raise TypeError(f"a rank body must be importable by its name, but {name} is something else")


@contextlib.contextmanager
def one_world_at_a_time() -> Iterator[None]:
    """Hold the lock shared by the workers of one pytest-xdist run, or by all runs of a user without xdist."""
    run = re.sub(r"\W", "", os.environ.get("PYTEST_XDIST_TESTRUNUID", ""))
    path = Path(tempfile.gettempdir()) / f"rank-world-{os.getuid()}{'-' if run else ''}{run}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)  # releases the lock, as no child has the descriptor

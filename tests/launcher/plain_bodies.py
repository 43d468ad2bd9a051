# SPDX-License-Identifier: Apache-2.0
"""Rank bodies that do without torch, so that a script which starts a world with them begins quickly."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time

from tests.support.world import RankContext, run_world


def enter(context: RankContext) -> float:
    """Return the time at which the rank entered its body."""
    return time.monotonic()


def sleep_forever(context: RankContext, hanging: tuple[int, ...], deaf: bool = False) -> str:
    """Have some ranks hang, with SIGTERM ignored if ``deaf``; the others return."""
    if context.rank not in hanging:
        return "fine"
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def import_module(context: RankContext, name: str) -> str | None:
    """Import a module inside the body and return its file."""
    return importlib.import_module(name).__file__


def is_loaded(context: RankContext, name: str) -> bool:
    """Return whether a module was imported before the body."""
    return name in sys.modules


def nested(context: RankContext) -> None:
    """Try to start a world inside a rank."""
    run_world(enter, world_size=1, directory=context.directory / "inner")


def record_pids_and_hang(context: RankContext) -> None:
    """Write the pids of this rank, of a process it started and of its parent to a file; then hang."""
    pids = [os.getpid(), subprocess.Popen(["sleep", "600"]).pid, os.getppid()]
    part = context.directory / f"pids-{context.rank}.part"
    part.write_text(" ".join(map(str, pids)))
    part.rename(context.directory / f"pids-{context.rank}")
    sleep_forever(context, (context.rank,))


def leave_child_behind(context: RankContext) -> int:
    """Return the pid of a process that this rank started and did not end."""
    return subprocess.Popen(["sleep", "600"]).pid


def interval(context: RankContext, seconds: float) -> tuple[float, float]:
    """Stay for a while; return when the body began and when it ended."""
    begin = time.monotonic()
    time.sleep(seconds)
    return begin, time.monotonic()

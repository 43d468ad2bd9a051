# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: one measurement, statistics of several, ratios, and where results go."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ci.bench import BENCH


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of several measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise ``values``; at least one.

        Raises:
            ValueError: If there are none.
        """
        found = sorted(values)
        if not found:
            raise ValueError("no measurements")
        return cls(statistics.median(found), found[0], found[-1], len(found))

    def text(self, unit: float = 1.0, digits: int = 2) -> str:
        """``median (low-high)`` in multiples of ``unit``."""
        return f"{self.median / unit:.{digits}f} ({self.low / unit:.{digits}f}-{self.high / unit:.{digits}f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Quotients of measurements taken side by side, pair by pair.

    Raises:
        ValueError: If the two have not the same number of measurements, or none.
    """
    return Spread.of(mine / other for mine, other in zip(ours, theirs, strict=True))


def in_a_child(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a forked process, with everything imported that is imported here, and return what it returns.

    Args:
        work: What to run; its result must be JSON.

    Raises:
        RuntimeError: With the child's traceback, or with its wait status if it left no answer.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = {"found": work()}
        except BaseException:
            answer = {"failed": traceback.format_exc()}
        os.write(sending, json.dumps(answer).encode())
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    answer = json.loads(text) if text else {"failed": f"ended with status {status}"}
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return answer["found"]


def measure(action: Callable[[], Any]) -> dict[str, float]:
    """Run ``action`` once: ``seconds`` (wall), ``cpu`` (of this process), ``extra`` (bytes, the peak over before).

    Linux only. What the action itself keeps counts as extra too.
    """
    ctypes.CDLL(None).malloc_trim(0)  # pages that an earlier peak left in the heap would hide a new one
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = _status("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"seconds": wall, "cpu": cpu, "extra": max(0, _status("VmHWM") - before)}


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)[1]) * 1024


def machine() -> dict[str, Any]:
    """What a figure depends on, without naming the machine."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def write(name: str, results: dict[str, Any], table: str, directory: Path = BENCH) -> None:
    """Keep ``results`` as ``<name>.json`` and ``table`` as ``<name>.txt``."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), **results}, indent=1, default=_plain)
    (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (directory / f"{name}.txt").write_text(table.rstrip() + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(type(value).__name__)

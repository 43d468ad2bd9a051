# SPDX-License-Identifier: Apache-2.0
"""What became of each rank of a world, which failure came first, and how to say so."""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path
from typing import Any

LOG_TAIL = 4_000  # characters of the root cause's log in the text of a failure
STACKS_TAIL = 6_000  # characters of one rank's stack dump in the text of a failure
STACK_DUMPS = 4  # ranks whose stacks are printed; the files have those of all

# Failures that another rank's end causes.  Matched only against exceptions of the kinds below: a test's own
# AssertionError may well speak of a timeout.
_TRANSPORT_TYPES = {
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
    "torch.distributed.DistQueueEmptyError",
}
_TRANSPORT_TEXT = re.compile(
    r"connection (closed|reset|refused|aborted)|timed out|timeout|broken pipe|\bgloo\b|monitored ?barrier",
    re.IGNORECASE,
)
_CHECKPOINT_RANKS = re.compile(r"ranks:dict_keys\(\[([\d, ]*)\]\)")


@dataclasses.dataclass
class RankOutcome:
    """What became of one rank.

    ``kind`` is one of ``"ok"`` (``value`` is what the body returned), ``"raised"``, ``"exited"`` (an exit without a
    result, code 0 included), ``"signal"``, ``"hung"`` (it ran until the deadline, or until the grace after another
    rank's failure was over), ``"setup"`` (preload, source tree or process group, before or after the body) and
    ``"unpicklable"`` (the body returned what cannot be sent).
    """

    rank: int
    kind: str
    value: Any = dataclasses.field(default=None, repr=False)
    exc_type: str | None = None  # qualified name
    exc_mro: tuple[str, ...] = ()  # qualified names
    message: str = ""
    traceback: str = dataclasses.field(default="", repr=False)
    log_path: Path | None = None
    stack_dump: str = dataclasses.field(default="", repr=False)
    entered: bool = False  # whether it reached the body
    seconds: float = 0.0  # since the start of the world
    pid: int | None = None

    def describe(self) -> str:
        """Return one line, without the number of the rank: ``raised ValueError: text``."""
        if self.kind == "ok":
            return f"returned after {self.seconds:.1f} s"
        if self.kind == "raised":
            text = f"raised {(self.exc_type or '').removeprefix('builtins.')}: {self.message}"
        elif self.kind == "setup":
            text = f"failed in setup with {(self.exc_type or '').removeprefix('builtins.')}: {self.message}"
        elif self.kind == "hung":
            text = f"hung: {self.message}"
        else:
            text = self.message
        return text


class WorldFailure(RuntimeError):
    """At least one rank of a world failed.

    Attributes: ``outcomes`` (a ``RankOutcome`` for each rank, in rank order), ``root_cause`` (the outcome that most
    likely caused the others) and ``elapsed`` (seconds).
    """

    def __init__(self, outcomes: list[RankOutcome], directory: Path, elapsed: float) -> None:
        self.outcomes = outcomes
        self.directory = directory
        self.elapsed = elapsed
        self.root_cause = root_cause(outcomes)
        super().__init__(render(outcomes, self.root_cause, directory, elapsed))


def signal_name(signum: int) -> str:
    """Return ``SIGSEGV`` for 11, and ``signal 35`` for a number without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def order_stacks(dump: str) -> str:
    """Return a dump of ``faulthandler`` with the thread that the signal met, in general the main one, first."""
    return "\n\n".join(sorted(dump.strip().split("\n\n"), key=lambda stack: not stack.startswith("Current thread")))


def is_secondary(outcome: RankOutcome) -> bool:
    """Whether a failure reads like the consequence of another rank's failure."""
    if outcome.kind not in ("raised", "setup"):
        return False
    if any(name.endswith(".CheckpointException") for name in outcome.exc_mro):
        found = _CHECKPOINT_RANKS.search(outcome.message)
        ranks = [int(number) for number in found.group(1).split(",") if number.strip()] if found else []
        return bool(ranks) and outcome.rank not in ranks
    if _TRANSPORT_TYPES.intersection(outcome.exc_mro):
        return True
    return outcome.exc_type == "builtins.RuntimeError" and _TRANSPORT_TEXT.search(outcome.message) is not None


def root_cause(outcomes: list[RankOutcome]) -> RankOutcome:
    """Return the failure to name first: deaths by signal, failures of a rank's own, consequences, hangs.

    Within a class the earliest comes first.  Raises ``ValueError`` if no rank failed.
    """

    def order(outcome: RankOutcome) -> tuple[int, float, int]:
        if outcome.kind == "signal":
            group = 0
        elif outcome.kind == "hung":
            group = 3
        else:
            group = 2 if is_secondary(outcome) else 1
        return group, outcome.seconds, outcome.rank

    failures = [outcome for outcome in outcomes if outcome.kind != "ok"]
    if not failures:
        raise ValueError("no rank failed")
    return min(failures, key=order)


def render(outcomes: list[RankOutcome], root: RankOutcome, directory: Path, elapsed: float) -> str:
    """Return the text of a ``WorldFailure``: the root cause first, then the others, then stacks."""
    size = len(outcomes)
    parts = [f"rank {root.rank} of {size} {root.describe()}"]
    if root.traceback:
        parts.append(root.traceback.rstrip())
    tail = _tail(_read(root.log_path), LOG_TAIL)
    if tail:
        parts.append(f"--- end of the log of rank {root.rank}\n{tail}")
    lines = [f"--- the world of {size} ranks after {elapsed:.1f} s"]
    for outcome in outcomes:
        if outcome is not root:
            first_line = outcome.describe().split("\n", 1)[0]
            lines.append(f"rank {outcome.rank}: {first_line}")
    parts.append("\n".join(lines))
    logs = ", ".join(str(_relative(outcome.log_path, directory)) for outcome in outcomes if outcome.log_path)
    parts.append(f"--- logs, relative to {directory}: {logs}")
    hung = [outcome for outcome in outcomes if outcome.stack_dump]
    hung.sort(key=lambda outcome: (outcome is not root, outcome.rank))
    for outcome in hung[:STACK_DUMPS]:
        parts.append(f"--- stacks of rank {outcome.rank}\n{_head(outcome.stack_dump, STACKS_TAIL)}")
    if len(hung) > STACK_DUMPS:
        parts.append(f"--- stacks of {len(hung) - STACK_DUMPS} more ranks: see rank-N.stacks")
    return "\n".join(parts)


def _read(path: Path | None) -> str:
    return path.read_text(errors="replace") if path is not None and path.exists() else ""


def _tail(text: str, limit: int) -> str:
    text = text.rstrip()
    return text if len(text) <= limit else "[...] " + text[-limit:]


def _head(text: str, limit: int) -> str:
    text = text.rstrip()
    return text if len(text) <= limit else text[:limit] + " [...]"


def _relative(path: Path, directory: Path) -> Path:
    return path.relative_to(directory) if path.is_relative_to(directory) else path

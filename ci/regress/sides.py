# SPDX-License-Identifier: Apache-2.0
"""Run the contracts on one side, in a process group of its own, and see to it that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.regress import REPOSITORY
from ci.regress.errors import SideError
from ci.regress.plugin import NAME as PLUGIN
from ci.regress.plugin import SHIM_VARIABLE
from ci.regress.records import CollectedTest, CollectionError, ExceptionRecord, Outcome, SideRecord, TestRecord

RUN_VARIABLE = "AUTOMODEL_REGRESS_RUN"  # marks every process of a run, in whatever process group or session
_POLL_S = 0.1
_HEARTBEAT_S = 20.0
_GRACE_S = 2.0  # between SIGTERM and SIGKILL
_LOG_LINES = 25
_DIED = "ci.regress.SideDied"


@dataclass(frozen=True)
class Progress:
    """Called while a side runs."""

    collected: Callable[[list[CollectedTest], list[CollectionError], list[str]], None]
    contract_done: Callable[[str, list[TestRecord]], None]
    heartbeat: Callable[[str, float], None]


@dataclass(frozen=True)
class Side:
    """One side: which tree, and what runs on it.

    ``run_dir`` is thrown away by the caller; ``log`` and the returned record stay.
    """

    name: str
    tree: Path
    commit: str
    package: str
    contracts: Path
    run_dir: Path
    artifacts: Path
    log: Path
    timeout_s: float
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # contracts that do not apply
    ignored: tuple[Path, ...] = ()  # files of none but those: not even imported
    extra: tuple[Path, ...] = ()  # more packages for import, and what describes them
    shim: str | None = None


@dataclass
class _State:
    record: SideRecord
    collected: list[CollectedTest] = field(default_factory=list)
    running: str | None = None
    running_since: float = 0.0
    abort: str | None = None
    finished: bool = False
    ready: bool = False  # collection is over
    pending: dict[str, int] = field(default_factory=dict)


def run_side(side: Side, progress: Progress) -> SideRecord:
    """Run the contracts on a side and return what they did.

    A side that is killed or runs out of time still returns a record: the test that ran is an error, and so is each
    that was not reached.

    Raises:
        SideError: nothing can be said: pytest did not start, another package was imported, or nothing was collected.
    """
    home = side.run_dir / side.name
    temporary, imports, cwd = home / "t", home / "import", home / "cwd"
    for directory in (temporary, imports, cwd):
        directory.mkdir(parents=True)
    # Only the package: an upstream tree also has a top-level `tests`, which would stand in the way of ours.
    (imports / side.package).symlink_to(side.tree / side.package, target_is_directory=True)
    for entry in side.extra:
        (imports / entry.name).symlink_to(entry, target_is_directory=True)
    events = home / "events.jsonl"
    events.touch()
    token = uuid.uuid4().hex
    state = _State(SideRecord(side=side.name, tree=str(side.tree), commit=side.commit, log=str(side.log)))
    began = time.monotonic()
    reader, writer = os.pipe()
    try:
        with side.log.open("wb") as log:
            process = subprocess.Popen(
                _command(side, events, home / "pytest", reader),
                cwd=cwd,
                env=_environment(side, imports, temporary, token),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(reader,),
                start_new_session=True,
            )
        os.close(reader)
        reader = -1
        try:
            died = _follow(side, process, events, state, progress, began)
        finally:
            stop(process, token)
    finally:
        os.close(writer)
        if reader >= 0:
            os.close(reader)
    state.record.duration_s = time.monotonic() - began
    return _complete(side, process.returncode, died, state, progress)


def _command(side: Side, events: Path, base: Path, lifeline: int) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["-c", str(REPOSITORY / "pyproject.toml"), "--rootdir", str(_rootdir(side)), "--basetemp", str(base)]
    command += ["-v", "-ra", "--continue-on-collection-errors", "--color=no", str(side.contracts)]
    command += ["--regress-side", side.name, "--regress-tree", str(side.tree), "--regress-package", side.package]
    command += ["--regress-events", str(events), "--regress-artifacts", str(side.artifacts)]
    command += ["--regress-lifeline", str(lifeline)]
    command += [f"--ignore={file}" for file in side.ignored]
    for contract in side.only:
        command += ["--regress-only", contract]
    for contract in side.without:
        command += ["--regress-without", contract]
    if side.shim is not None:
        command += ["--regress-shim", side.shim]
    return command


def _rootdir(side: Side) -> Path:
    return REPOSITORY if side.contracts.is_relative_to(REPOSITORY) else side.contracts


def _environment(side: Side, imports: Path, temporary: Path, token: str) -> dict[str, str]:
    # What the user's shell says about pytest must not reach a verdict.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    path = [str(imports), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "CONTRACT_TREE": str(side.tree),
        "CONTRACT_PACKAGE": side.package,
        "CONTRACT_COMMIT": side.commit,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(temporary),
        RUN_VARIABLE: token,
    }
    environment.pop(SHIM_VARIABLE, None)
    if side.shim is not None:
        environment[SHIM_VARIABLE] = "1"
    return environment


def _follow(
    side: Side, process: subprocess.Popen[bytes], events: Path, state: _State, progress: Progress, began: float
) -> str | None:
    """Read reports until the side ends; return why it died, if it did not end by itself."""
    beat = began
    with events.open("rb") as stream:
        rest = b""
        while True:
            ended = process.poll() is not None
            rest += stream.read()
            *lines, rest = rest.split(b"\n")
            for line in lines:
                _take(json.loads(line), state, progress)
            if ended:
                break
            now = time.monotonic()
            if now - began > side.timeout_s:
                return f"timed out: the side had {side.timeout_s:g} s (--timeout)"
            beat = max(beat, state.running_since)
            if state.running is not None and now - beat >= _HEARTBEAT_S:
                beat = now
                progress.heartbeat(state.running, now - state.running_since)
            time.sleep(_POLL_S)
    if process.returncode < 0:
        name = _signal_name(-process.returncode)
        cause = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the side's process was killed by {name}{cause}"
    if not state.finished and state.abort is None:
        return f"the side's process ended with exit status {process.returncode} before pytest was done"
    return None


def _take(event: dict[str, Any], state: _State, progress: Progress) -> None:
    record = state.record
    kind = event.pop("event")
    if kind == "session":
        record.python, record.package_file = event["python"], event["package_file"]
        record.torch = event["torch"]
    elif kind == "collected":
        state.ready = True
        state.collected = [CollectedTest.model_validate(one) for one in event["tests"]]
        record.collection_errors = [CollectionError.model_validate(one) for one in event["errors"]]
        for one in state.collected:
            state.pending[one.contract] = state.pending.get(one.contract, 0) + 1
        progress.collected(state.collected, record.collection_errors, event["empty"])
    elif kind == "start":
        state.running, state.running_since = event["nodeid"], time.monotonic()
    elif kind == "test":
        test = TestRecord.model_validate(event)
        state.running = None
        _add(test, state, progress)
    elif kind == "finish":
        state.finished = True
        record.exit_status, record.package_file = event["exit_status"], event["package_file"]
        record.torch, record.torch_file = event["torch"], event["torch_file"]
    elif kind == "abort":
        state.abort = event["message"]


def _add(test: TestRecord, state: _State, progress: Progress) -> None:
    state.record.tests.append(test)
    state.pending[test.contract] -= 1
    if state.pending[test.contract] == 0:
        progress.contract_done(test.contract, [one for one in state.record.tests if one.contract == test.contract])


def _complete(side: Side, status: int, died: str | None, state: _State, progress: Progress) -> SideRecord:
    record = state.record
    if state.abort is not None:
        raise SideError(f"side {side.name}: {state.abort}", f"the log of the side: {side.log}")
    if not state.ready:
        why = died or f"pytest ended with exit status {status} before it had collected anything"
        raise SideError(f"side {side.name}: {why}; its last lines:\n{_tail(side.log)}", f"all of it: {side.log}")
    seen = {test.nodeid for test in record.tests}
    left = [one for one in state.collected if one.nodeid not in seen]
    if left and died is None:
        died = f"pytest ended with exit status {status} before every test had run"
    record.died = died
    record.exit_status = status if record.exit_status is None else record.exit_status
    for one in left:
        message = f"{died}, while {one.nodeid} ran" if one.nodeid == state.running else f"not reached: {died}"
        elapsed = time.monotonic() - state.running_since if one.nodeid == state.running else 0.0
        test = TestRecord(
            nodeid=one.nodeid,
            contract=one.contract,
            meaning=one.meaning,
            outcome=Outcome.ERROR,
            phase="call" if one.nodeid == state.running else "setup",
            exception=ExceptionRecord(type=_DIED, lineage=[_DIED], message=message),
            duration_s=elapsed,
            text=f"{message}\n{_tail(side.log)}",
        )
        _add(test, state, progress)
    return record


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_LOG_LINES:]
    return "\n".join(f"    {line}" for line in lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def stop(process: subprocess.Popen[bytes], token: str) -> None:
    """End what is left of a side: its process group, and (on Linux) whatever left the group.

    Processes that were started with a session of their own are known by the token in their environment.  Returns when
    all of them are gone.
    """
    known = set(_strays(token))  # before they die: a process that is on its way out shows no environment any more
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        strays = set(_strays(token))  # again: a process may have started another one meanwhile
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        known = {pid for pid in known | strays if _is_running(pid)}
        if not known:
            return
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")  # ended, whether or not its parent has taken notice


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _strays(token: str) -> list[int]:
    marker = f"{RUN_VARIABLE}={token}".encode()
    found = []
    processes = Path("/proc")
    if not processes.is_dir():
        return found
    for entry in processes.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone meanwhile, a zombie, or another user's
    return found

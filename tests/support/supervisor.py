# SPDX-License-Identifier: Apache-2.0
"""Supervision of one world: launch the ranks, follow what they report, stop what does not end by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import selectors
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from . import rank as rank_module
from .forkserver import ForkServer, ForkServerError
from .outcomes import RankOutcome, order_stacks, signal_name

_DUMP_TIME = 2.0  # seconds for ranks to write their stacks
_TERM_TIME = 0.5  # seconds between SIGTERM and SIGKILL
_KILL_TIME = 10.0  # seconds for the kernel to end a killed rank


@dataclasses.dataclass
class _Rank:
    number: int
    sock: socket.socket
    outcome: RankOutcome
    stacks: Path
    buffer: bytearray = dataclasses.field(default_factory=bytearray)
    pid: int | None = None
    code: int | None = None  # exit code, once it has exited
    joined: bool = False
    returned: bool = False
    failed: bool = False
    stopped: bool = False  # whether the launcher ends it

    @property
    def running(self) -> bool:
        return self.code is None and not self.returned and not self.failed


class World:
    """One world from its launch to the end of its last rank."""

    def __init__(self, server: ForkServer, job: dict[str, Any], directory: Path, deadline: float, grace: float) -> None:
        """Prepare a world; ``job`` is what each rank is sent, less what differs between ranks."""
        self.server = server
        self.directory = directory
        self.started = time.monotonic()
        self.deadline = self.started + deadline
        self.grace = grace
        self.elapsed = 0.0
        self.first_failure: float | None = None
        self.ranks: list[_Rank] = []
        self.job = job
        self.store = directory / f".store-{uuid.uuid4().hex}"
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Run the world to its end; no rank is left when it returns."""
        self._selector.register(self.server.sock, selectors.EVENT_READ, None)
        for number in range(self.job["world_size"]):
            self._launch(number)
        while self._any_running() and time.monotonic() < self._limit():
            self._wait(self._limit() - time.monotonic())
        if self.first_failure is None and not self._any_running():
            for member in self.ranks:
                self._send(member, rank_module.pack_frame("release"))
            while self._any_alive() and time.monotonic() < self._limit():
                self._wait(self._limit() - time.monotonic())
            for member in self.ranks:
                if member.code is None:
                    member.returned = False  # it did not get through the destruction of the process group
        self._stop_all()
        self.elapsed = time.monotonic() - self.started

    def kill(self) -> None:
        """Kill the ranks that a dead server left; they are no children of this process, and not to be reaped."""
        for member in self.ranks:
            if member.code is None and member.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(member.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the sockets and remove the store."""
        self._selector.close()
        for member in self.ranks:
            member.sock.close()
        self.store.unlink(missing_ok=True)

    def outcomes(self) -> list[RankOutcome]:
        """Return what became of each rank, in rank order."""
        return [member.outcome for member in self.ranks]

    def _launch(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        log, stacks = (self.directory / f"rank-{number}.{suffix}" for suffix in ("log", "stacks"))
        log.unlink(missing_ok=True)  # of an earlier world, in case this rank does not come to open its own
        stacks.unlink(missing_ok=True)
        member = _Rank(number, ours, RankOutcome(number, "hung", log_path=log), stacks)
        self.ranks.append(member)
        with theirs:
            self.server.spawn(theirs)
        while member.pid is None:
            self._handle_server()
        self._selector.register(ours, selectors.EVENT_READ, member)
        ours.setblocking(False)
        job = {**self.job, "rank": number, "log": str(log), "stacks": str(stacks), "store": str(self.store)}
        self._send(member, rank_module.pack_frame(job))

    def _send(self, member: _Rank, data: bytes) -> None:
        member.sock.settimeout(max(0.1, self.deadline - time.monotonic()))
        with contextlib.suppress(OSError):  # a rank that cannot take it has died or hangs: seen elsewhere
            member.sock.sendall(data)
        member.sock.setblocking(False)

    # --- events

    def _limit(self) -> float:
        if self.first_failure is None:
            return self.deadline
        return min(self.deadline, self.first_failure + self.grace)

    def _any_running(self) -> bool:
        return any(member.running for member in self.ranks)

    def _any_alive(self) -> bool:
        return any(member.code is None for member in self.ranks)

    def _wait(self, timeout: float) -> None:
        for key, _events in self._selector.select(max(0.0, timeout)):
            if key.data is None:
                self._handle_server()
            else:
                self._read(key.data)

    def _handle_server(self) -> None:
        for message in self.server.receive():
            if message["op"] == "spawned":
                member = next(member for member in self.ranks if member.pid is None)
                member.pid = member.outcome.pid = message["pid"]
            elif message["op"] == "exited":
                member = next(member for member in self.ranks if member.pid == message["pid"])
                self._read(member)  # what it reported last
                member.code = message["code"]
                self._exited(member)

    def _read(self, member: _Rank) -> None:
        while True:
            try:
                data = member.sock.recv(1 << 20)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it died with unread data; what it wrote has been read by now
                data = b""
            if not data:
                with contextlib.suppress(KeyError):  # read once more when its exit is announced
                    self._selector.unregister(member.sock)
                break
            member.buffer += data
        for message in rank_module.split_frames(member.buffer):
            self._reported(member, message)

    def _reported(self, member: _Rank, message: dict[str, Any]) -> None:
        outcome = member.outcome
        event = message.pop("event")
        moment = message.pop("time")
        if event == "joined":
            member.joined = True
            if all(other.joined for other in self.ranks) and len(self.ranks) == self.job["world_size"]:
                for other in self.ranks:
                    self._send(other, rank_module.pack_frame("go"))
        elif event == "entered":
            outcome.entered = True
        elif event == "failed":
            outcome.value = None
            for name, value in message.items():
                setattr(outcome, name, value)
            self._failed(member, moment)
        else:
            outcome.seconds = moment - self.started
            try:
                outcome.value = pickle.loads(message["value"])
            except Exception as error:
                outcome.kind = "unpicklable"
                outcome.message = f"returned a result that cannot be unpickled: {type(error).__qualname__}: {error}"
                self._failed(member, moment)
            else:
                outcome.kind = "ok"
                member.returned = True

    def _exited(self, member: _Rank) -> None:
        outcome = member.outcome
        if member.failed or member.stopped or (member.returned and member.code == 0):
            return
        if member.code is not None and member.code < 0:
            outcome.kind = "signal"
            outcome.message = f"killed by {signal_name(-member.code)}"
        else:
            outcome.kind = "exited"
            outcome.message = f"exited with code {member.code} without a result"
        if member.returned:
            outcome.message += " (after the body had returned)"
        outcome.value = None
        self._failed(member, time.monotonic())

    def _failed(self, member: _Rank, moment: float) -> None:
        member.failed = True
        member.outcome.seconds = moment - self.started
        if self.first_failure is None:
            self.first_failure = time.monotonic()

    # --- the end

    def _stop_all(self) -> None:
        """Dump the stacks of the ranks that still run, then end, reap and judge what is left."""
        now = time.monotonic()
        hung = [member for member in self.ranks if member.running]
        for member in hung:
            outcome = member.outcome
            outcome.kind = "hung"
            outcome.value = None
            outcome.seconds = now - self.started
            if self.first_failure is None:
                outcome.message = f"still running at the deadline, after {outcome.seconds:.1f} s"
            else:
                outcome.message = f"still running {now - self.first_failure:.1f} s after the first failure"
            if not outcome.entered:
                outcome.message += ", and had not reached the body"
            member.stopped = True
        self._dump_stacks(hung)
        for signum, patience in ((signal.SIGTERM, _TERM_TIME), (signal.SIGKILL, _KILL_TIME)):
            for member in self.ranks:
                if member.code is None:
                    member.stopped = True
                    # Ranks that have returned or failed have nothing to tell any more.
                    final = signal.SIGKILL if member not in hung else signum
                    self.server.signal(member.pid or 0, final, group=True)
            end = time.monotonic() + patience
            while self._any_alive() and time.monotonic() < end:
                self._wait(end - time.monotonic())
        if self._any_alive():
            pids = [member.pid for member in self.ranks if member.code is None]
            raise ForkServerError(f"ranks did not end within {_KILL_TIME:.0f} s of SIGKILL: pids {pids}")

    def _dump_stacks(self, hung: list[_Rank]) -> None:
        for member in hung:
            self.server.signal(member.pid or 0, signal.SIGUSR1)
        waiting = {member.number: 0 for member in hung}
        end = time.monotonic() + _DUMP_TIME
        while waiting and time.monotonic() < end:
            time.sleep(0.05)
            for member in hung:
                size = member.stacks.stat().st_size if member.stacks.exists() else 0
                # The end of a dump is not marked: take it as complete when it has stopped growing.
                if member.number in waiting and size and size == waiting[member.number]:
                    del waiting[member.number]
                elif member.number in waiting:
                    waiting[member.number] = size
        for member in hung:
            if member.stacks.exists():
                member.outcome.stack_dump = order_stacks(member.stacks.read_text(errors="replace"))

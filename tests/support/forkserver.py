# SPDX-License-Identifier: Apache-2.0
"""A fork server for ranks: one process that has imported the heavy modules and forks a fresh rank on request.

``multiprocessing``'s own fork server is not used: it swallows import errors of its preload list, ignores changes of
``sys.path`` and of the environment, imports the parent's ``__main__`` again in each child, and cannot be restarted
with other modules through a public API.

The client (test process) and the server share one socket pair.  Both directions carry one JSON object per line:

* client to server: ``{"op": "spawn"}`` (with the rank's socket as ancillary data) and
  ``{"op": "signal", "pid": .., "signum": .., "group": ..}``;
* server to client: ``{"op": "ready", "failed": {module: traceback}}``, ``{"op": "spawned", "pid": ..}`` and
  ``{"op": "exited", "pid": .., "code": ..}``, the code as ``os.waitstatus_to_exitcode`` gives it.

Signals go through the server because it is the parent of the ranks: it knows which of them it has not reaped yet, so
that a signal never meets a reused pid.  When the client's end of the socket closes (however the client ended), the
server kills every rank and exits.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from typing import Any, BinaryIO

START_TIMEOUT = 180.0  # seconds to import everything preloaded
STOP_TIMEOUT = 5.0  # seconds for the server to leave after its socket was closed

# The server reads these at import time, so that a change of one of them needs a new server.
_IMPORT_TIME_PREFIXES = (
    "CUDA_",
    "HF_",
    "KMP_",
    "MKL_",
    "NEMO_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH",
    "TORCH",
    "TRANSFORMERS_",
)


class ForkServerError(RuntimeError):
    """The fork server did not start, or went away while it was in use."""


class LineChannel:
    """Exchange JSON objects, one per line, over a stream socket; file descriptors travel as ancillary data."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = b""
        self.fds: list[int] = []

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Send one message, with a file descriptor if given.  Raises ``OSError`` if the other side is gone."""
        data = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self.sock, [data], [fd]) if fd is not None else 0
        self.sock.sendall(data[sent:])

    def receive(self) -> list[dict[str, Any]]:
        """Return the complete messages of one blocking read.  Raises ``EOFError`` if the other side is gone."""
        try:
            data, fds, _flags, _address = socket.recv_fds(self.sock, 65536, 16)
        except ConnectionResetError:
            data, fds = b"", []
        self.fds.extend(fds)
        if not data:
            raise EOFError("the other side of the control socket is gone")
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]


# ------------------------------------------------------------------------------------------------ server process


def serve(control_fd: int, preload: list[str]) -> None:
    """Import ``preload``, then fork ranks on request until the client's end of the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is the test process's to handle
    # Default action: death.  A stack dump may be asked for before the rank has registered its handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    failed: dict[str, str] = {}
    for module in preload:
        try:
            importlib.import_module(module)
        except BaseException:  # SystemExit of a module must not end the server either; the text reaches the ranks
            failed[module] = traceback.format_exc()
    from . import rank as _rank  # here, since the client has no need of it

    gc.collect()
    gc.freeze()  # the collector of a rank then leaves the pages it shares with the server alone
    channel = LineChannel(socket.socket(fileno=control_fd))
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler: it makes the wakeup descriptor work
    signal.set_wakeup_fd(wake_write)
    channel.send({"op": "ready", "failed": failed})
    children: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(channel.sock, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        try:
            while True:
                ready = {key.fileobj for key, _events in selector.select()}
                if wake_read in ready:
                    os.read(wake_read, 4096)
                    _reap(channel, children)
                for request in channel.receive() if channel.sock in ready else ():
                    if request["op"] == "signal":
                        _signal(children, request["pid"], request["signum"], request["group"])
                        continue
                    rank_fd = channel.fds.pop(0)
                    pid = os.fork()
                    if pid == 0:
                        # From here on nothing may return into the loop of the server.
                        try:
                            signal.set_wakeup_fd(-1)
                            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                            os.setsid()  # the rank and what it starts are one group, to be killed together
                            selector.close()
                            channel.sock.close()
                            os.close(wake_read)
                            os.close(wake_write)
                            _rank.main(rank_fd, failed)
                        except BaseException:
                            traceback.print_exc()
                        finally:
                            os._exit(70)  # main() does not return; EX_SOFTWARE if it could not even report
                    os.close(rank_fd)
                    children.add(pid)
                    channel.send({"op": "spawned", "pid": pid})
        except (EOFError, BrokenPipeError):
            for pid in children:
                _signal(children, pid, signal.SIGKILL, True)
            for pid in children:
                os.waitpid(pid, 0)


def _reap(channel: LineChannel, children: set[int]) -> None:
    for pid in sorted(children):
        if hasattr(os, "waitid"):
            # Kill what the rank left behind while its pid, the id of the group, is still taken.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _signal(children, pid, signal.SIGKILL, True)
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            children.discard(pid)
            channel.send({"op": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _signal(children: set[int], pid: int, signum: int, group: bool) -> None:
    if pid not in children:
        return
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no group yet: the rank is before setsid()
            os.killpg(pid, signum)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


# ------------------------------------------------------------------------------------------------ client


class ForkServer:
    """The client's handle of a running fork server."""

    def __init__(self, preload: tuple[str, ...], env: dict[str, str]) -> None:
        """Start the server and wait until it has imported ``preload``.  Raises ``ForkServerError`` if it ends early."""
        self.key = server_key(preload, env)
        self.owner = os.getpid()
        self.failed: dict[str, str] = {}
        self._log: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        ours, theirs = socket.socketpair()
        self._channel = LineChannel(ours)
        self.sock = ours
        paths = [os.path.abspath(entry) for entry in sys.path]
        code = (
            f"import sys; sys.path[:] = {paths!r}; "
            f"from {__name__} import serve; serve({theirs.fileno()}, {list(preload)!r})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**env, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # ^C in the terminal must not reach it
            )
        try:
            ours.settimeout(START_TIMEOUT)
            messages: list[dict[str, Any]] = []
            while not messages:
                messages = self.receive()
            ours.settimeout(None)
            self.failed = messages[0]["failed"]
        except TimeoutError:
            self.stop()
            raise ForkServerError(f"the fork server did not import {preload} within {START_TIMEOUT:.0f} s") from None
        except BaseException:
            self.stop()
            raise

    def spawn(self, rank_socket: socket.socket) -> None:
        """Ask for one rank, which gets ``rank_socket``; a ``spawned`` message with its pid follows."""
        self._send({"op": "spawn"}, rank_socket.fileno())

    def signal(self, pid: int, signum: int, group: bool = False) -> None:
        """Send a signal to a rank (and its process group); nothing happens if the rank has been reaped."""
        self._send({"op": "signal", "pid": pid, "signum": int(signum), "group": group})

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that came in.  Raises ``ForkServerError`` if the server is gone."""
        try:
            return self._channel.receive()
        except EOFError:
            raise self._gone() from None

    def stop(self) -> None:
        """Close the control socket, upon which the server kills its ranks and exits; kill it if it does not."""
        self.sock.close()
        if self.owner != os.getpid():
            return  # a forked copy of the test process: the server is not its child
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def usable(self, key: tuple[Any, ...]) -> bool:
        """Whether the server runs, belongs to this process and has exactly what ``key`` asks for."""
        return self.owner == os.getpid() and self.key == key and not self.failed and self._process.poll() is None

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        try:
            self._channel.send(message, fd)
        except OSError:
            raise self._gone() from None

    def _gone(self) -> ForkServerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT)
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace")[-4000:]
        return ForkServerError(f"the fork server is gone (exit code {self._process.returncode}); its output:\n{tail}")


_current: ForkServer | None = None


def server_key(preload: tuple[str, ...], env: dict[str, str]) -> tuple[Any, ...]:
    """Return what a running server must have in common with the request to be used for it."""
    relevant = tuple(sorted((name, value) for name, value in env.items() if name.startswith(_IMPORT_TIME_PREFIXES)))
    return preload, relevant, tuple(os.path.abspath(entry) for entry in sys.path)


def get_server(preload: tuple[str, ...], env: dict[str, str]) -> ForkServer:
    """Return the running fork server, after a restart if it lacks a module or was started in another environment."""
    global _current
    if _current is not None and not _current.usable(server_key(preload, env)):
        stop_server()
    if _current is None:
        _current = ForkServer(preload, env)
    return _current


def stop_server() -> None:
    """Stop the running fork server, if any; the next world starts a new one."""
    global _current
    if _current is not None:
        server, _current = _current, None
        server.stop()


atexit.register(stop_server)
# A forked copy of the test process must not keep the server alive, nor speak to it.
os.register_at_fork(after_in_child=stop_server)

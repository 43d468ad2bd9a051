# SPDX-License-Identifier: Apache-2.0
"""What runs inside a rank: its set-up, the body, and the reports to the test process.

A rank and the test process share a socket pair.  The test process sends a frame with the job, then ``"go"`` when all
ranks have joined the process group and ``"release"`` when all have returned from the body; the end of the stream
tells the rank that the test process is gone.  The rank sends frames with dictionaries of plain text, numbers and
bytes; no exception object crosses the border.

The test process imports this module too, for the frames and the context, and may do without torch: the functions that
run in ranks import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_LENGTH = struct.Struct("!Q")
in_rank = False  # whether this process is a rank


@dataclasses.dataclass(frozen=True)
class RankContext:
    """What a rank body is told about its place in the world."""

    rank: int
    world_size: int
    directory: Path  # of the world: logs, checkpoints
    device: torch.device
    backend: str


class SetupError(RuntimeError):
    """A rank was not given what the test asked for: a preloaded module, or the right source tree."""


# ------------------------------------------------------------------------------------------------ frames


def pack_frame(message: Any) -> bytes:
    """Return a message as it goes over a rank's socket."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def split_frames(buffer: bytearray) -> list[Any]:
    """Take the complete messages out of ``buffer`` and return them."""
    messages = []
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            break
        messages.append(pickle.loads(memoryview(buffer)[_LENGTH.size : end].tobytes()))
        del buffer[:end]
    return messages


def _read_frame(sock: socket.socket) -> Any:
    """Return the next message.  Raises ``EOFError`` at the end of the stream."""
    buffer = bytearray()
    size = _LENGTH.size
    while len(buffer) < size:
        data = sock.recv(size - len(buffer))
        if not data:
            raise EOFError("the test process is gone")
        buffer += data
        if len(buffer) == _LENGTH.size == size:
            size += _LENGTH.unpack(buffer)[0]
    return split_frames(buffer)[0]


# ------------------------------------------------------------------------------------------------ the body's world


def make_context(
    rank: int, world_size: int, directory: Path, backend: str = "gloo", local_rank: int | None = None
) -> RankContext:
    """Return the context of one rank, however the rank was started; with NCCL, on the GPU of its local rank."""
    import torch

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank if local_rank is None else local_rank)
        torch.cuda.set_device(device)
    return RankContext(rank, world_size, directory, device, backend)


@contextlib.contextmanager
def process_group(context: RankContext, store: dist.Store | None, timeout: float) -> Iterator[None]:
    """Have the default process group while the block runs; it is destroyed only if the block succeeds.

    With ``store=None`` the rendezvous comes from the environment, as under ``torchrun``.  ``timeout`` (seconds) also
    becomes the default of the groups that the body makes, for instance those of a ``DeviceMesh``: torch's own default
    is 30 minutes, whatever the timeout of the default group.
    """
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=timeout)
    dist.distributed_c10d.default_pg_timeout = limit
    dist.init_process_group(
        context.backend, store=store, rank=context.rank, world_size=context.world_size, timeout=limit
    )
    yield
    if dist.is_initialized():  # the body may have destroyed it
        dist.destroy_process_group()


def check_tree() -> None:
    """Raise ``SetupError`` if the package under test was imported from outside ``$CONTRACT_TREE``."""
    tree = os.environ.get("CONTRACT_TREE")
    package = os.environ.get("CONTRACT_PACKAGE", "nemo_automodel")
    module = sys.modules.get(package)
    if not tree or module is None:
        return
    wanted = os.path.realpath(tree)
    files = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", []))
    for found in map(os.path.realpath, files):
        if os.path.commonpath([found, wanted]) != wanted:
            raise SetupError(f"{package} comes from {found}, which is not under CONTRACT_TREE={wanted}")


# ------------------------------------------------------------------------------------------------ reports


def describe_exception(exc: BaseException) -> dict[str, Any]:
    """Return an exception as text."""
    try:
        message = str(exc)
    except Exception as error:
        message = f"<str() of the exception raised {type(error).__qualname__}>"
    try:
        text = "".join(traceback.format_exception(exc))
    except Exception:  # of a __str__ or __notes__ in the chain
        text = "".join(traceback.format_tb(exc.__traceback__))
    mro = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(exc).__mro__)
    return {"exc_type": mro[0], "exc_mro": mro, "message": message, "traceback": text}


class _Reporter:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.go = threading.Event()
        self.released = threading.Event()

    def watch(self) -> None:
        """Take the signals of the test process; when it is gone, end this rank and what it started."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                {"go": self.go, "release": self.released}[_read_frame(self.sock)].set()
        os.killpg(0, signal.SIGKILL)

    def send(self, event: str, **fields: Any) -> None:
        self.sock.sendall(pack_frame({"event": event, "time": time.monotonic(), **fields}))

    def fail(self, kind: str, exc: BaseException) -> NoReturn:
        """Report a failure and exit at once, so that the other ranks learn of it from their sockets."""
        self.send("failed", **{"kind": kind, **describe_exception(exc)})
        _leave(1)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


# ------------------------------------------------------------------------------------------------ main


def main(fd: int, failed_preloads: dict[str, str]) -> NoReturn:
    """Run one rank in a process that the fork server has just forked."""
    global in_rank
    in_rank = True
    os.set_inheritable(fd, False)  # it came as ancillary data, without the flag
    sock = socket.socket(fileno=fd)
    reporter = _Reporter(sock)
    job = _read_frame(sock)
    threading.Thread(target=reporter.watch, name="parent-watch", daemon=True).start()
    try:
        context, store = _set_up(job, failed_preloads)
        call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickle.loads(job["call"])
        body, args, kwargs = call
        check_tree()
    except BaseException as exc:
        reporter.fail("setup", exc)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(process_group(context, store, job["pg_timeout"]))
        except BaseException as exc:
            reporter.fail("setup", exc)
        # Nobody runs the body while others still connect: they would take its failure for one of their set-up.
        reporter.send("joined")
        reporter.go.wait()
        reporter.send("entered")
        try:
            try:
                value = body(context, *args, **kwargs)
            finally:
                check_tree()  # also after a failure, which a wrong tree would explain
        except SetupError as exc:
            reporter.fail("setup", exc)
        except SystemExit as exc:
            _report_exit(reporter, exc)
        except BaseException as exc:  # torch's CheckpointException is not an Exception
            reporter.fail("raised", exc)
        try:
            data = pickle.dumps(value)
        except BaseException as exc:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            report = describe_exception(exc)
            report["message"] = f"returned a result of type {kind}, which cannot be pickled: {report['message']}"
            reporter.send("failed", **{"kind": "unpicklable", **report})
            _leave(1)
        reporter.send("returned", value=data)
        # Sockets stay open until every rank has returned: one that left early could reset connections which slower
        # ranks still read from.
        reporter.released.wait()
        try:
            stack.close()
        except BaseException as exc:
            reporter.fail("setup", exc)
    _leave(0)


def _report_exit(reporter: _Reporter, exc: SystemExit) -> NoReturn:
    code = 0 if exc.code is None else exc.code if isinstance(exc.code, int) else 1
    report = describe_exception(exc)
    text = f" ({exc.code})" if isinstance(exc.code, str) else ""
    report["message"] = f"exited with code {code & 0xFF}{text}, by SystemExit and without a result"
    reporter.send("failed", **{"kind": "exited", **report})
    _leave(code & 0xFF)


def _set_up(job: dict[str, Any], failed_preloads: dict[str, str]) -> tuple[RankContext, dist.Store]:
    import torch
    import torch.distributed as dist

    rank, world_size = job["rank"], job["world_size"]
    directory = Path(job["directory"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable(all_threads=True)  # a crash leaves its stacks in the log
    stacks = open(job["stacks"], "w")  # noqa: SIM115 - stays open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    os.environ.clear()
    os.environ.update(job["env"])
    # The names that torchrun sets, for code that asks the environment.  One host: every rank is a local one.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.chdir(job["cwd"])
    for module in job["preload"]:
        if module in failed_preloads:
            raise SetupError(f"the fork server could not preload {module}:\n{failed_preloads[module]}")
        if module not in sys.modules:
            raise SetupError(f"{module} is not preloaded: it is not in sys.modules at the start of the rank")
    torch.set_num_threads(1)
    context = make_context(rank, world_size, directory, job["backend"])
    store = dist.FileStore(job["store"], world_size)
    store.set_timeout(datetime.timedelta(seconds=job["pg_timeout"]))
    return context, store

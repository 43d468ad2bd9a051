# SPDX-License-Identifier: Apache-2.0
"""A release's own process: it answers requests, one line of JSON each, until its input ends.

The driver's end is ``Sides``; ``python -m ci.peers.side`` is the other. Measurements are forked from a process that has
everything imported, and the driver asks the sides in turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest

RELEASES = {"stock": None, "newest": "automodel/v0.7.0", "ours": None}  # targets of patches/series.toml


class SideError(RuntimeError):
    """A side failed at a request."""


class Sides:
    """The processes of all sides, by name."""

    def __init__(self, processes: dict[str, subprocess.Popen[str]]) -> None:
        self._processes = processes

    def ask(self, side: str, **request: Any) -> Any:
        """Send a request, and wait for its answer.

        Raises:
            SideError: The side failed at it, or is gone.
        """
        process = self._processes[side]
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        answer = json.loads(line) if line else {"failed": f"ended with {process.wait()}"}
        if "failed" in answer:
            raise SideError(f"{side}, {request}: {answer['failed']}")
        return answer["found"]


@contextlib.contextmanager
def running(interpreters: dict[str, str], names: tuple[str, ...], log: Path) -> Iterator[Sides]:
    """Start the sides; ``interpreters`` for those that have another one than this."""
    loaded, processes = manifest.load(PATCHES), {}
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary, log.open("w", encoding="utf-8") as errors:
        try:
            for name in names:
                target = loaded.select(RELEASES[name])[1]
                release = Path(temporary) / target.wheel.version
                if not release.is_dir():
                    fetch.unpack_wheel(fetch.fetch_wheel(target.wheel, WHEEL_CACHE, lambda line: None), release)
                environment = {"PYTHONPATH": f"{release}{os.pathsep}{REPOSITORY}", "HF_HUB_OFFLINE": "1"}
                environment |= {"TORCHDYNAMO_DISABLE": "1", "TMPDIR": temporary}
                environment |= {"AUTOMODEL_SHIM_INSTALL": "1"} if name == "ours" else {}
                processes[name] = subprocess.Popen(
                    [interpreters.get(name, sys.executable), "-m", "ci.peers.side"],
                    cwd=REPOSITORY,
                    env=os.environ | environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            yield Sides(processes)
        finally:
            for process in processes.values():
                process.stdin.close()
                process.wait()


def _rows(request: dict[str, Any]) -> Any:
    from ci.peers import loaders, outcome, rows
    from tests.contracts.automodel.upstream import plain_checkpointer

    peer = loaders.BY_NAME[request["peer"]]
    return {name: outcome.of(rows.BY_NAME[name], peer, plain_checkpointer) for name in request["names"]}


def _drift(request: dict[str, Any]) -> Any:
    from ci.peers import loaders, outcome, rows
    from tests.contracts.automodel.upstream import plain_checkpointer

    peer = loaders.BY_NAME[request["peer"]]
    return outcome.drifts(rows.DRIFT_ROW, peer, plain_checkpointer, request["steps"])


def _gradient(request: dict[str, Any]) -> Any:
    """The worst relative error over the cases of the gather contracts, at one EP degree."""
    from tests.contracts.automodel import gather_ranks, impostors
    from tests.contracts.automodel.gather_cases import cases_for
    from tests.contracts.automodel.upstream import PRELOAD
    from tests.support.world import run_world

    size, wrong = request["size"], request.get("impostor")
    cases = [case for case in cases_for(size) if not case.name.startswith("bf16")][:: request.get("every", 1)]
    if wrong:
        os.environ[impostors.VARIABLE] = wrong
    try:
        with tempfile.TemporaryDirectory() as place:
            ranks = run_world(gather_ranks.compare, size, place, (cases,), preload=PRELOAD, deadline=180.0)
    finally:
        os.environ.pop(impostors.VARIABLE, None)

    def relative(parts: list[Any]) -> float:
        return (sum(part[0] for part in parts) / sum(part[1] for part in parts)) ** 0.5

    found: dict[str, float | None] = {"router": 0.0, "hidden": 0.0}
    for case in zip(*ranks, strict=True):
        found["hidden"] = max(found["hidden"], relative([here["hidden"] for here in case]))
        router = [here["replicated"]["gate.weight"] for here in case]
        if found["router"] is not None:
            lost = None in router
            found["router"] = None if lost else max(found["router"], *(relative([part]) for part in router))
    return found


def _cost(request: dict[str, Any]) -> Any:
    from ci.bench.loader import Case, build
    from ci.bench.timing import measure
    from ci.peers import loaders
    from tests.contracts.automodel.upstream import plain_checkpointer

    peer, path = loaders.BY_NAME[request["peer"]], request["path"]
    case = Case("", request["count"], tuple(request["shape"]), request["cold"])
    if request["operation"] == "save":
        shutil.rmtree(path, ignore_errors=True)
    Path(path).mkdir(parents=True, exist_ok=True)
    owner = plain_checkpointer(path)
    with tempfile.TemporaryDirectory() as warm:  # what is imported late is no part of the measurement
        model, optimizer = build(Case("", 2, (4, 4)), 1)
        peer.save(owner, optimizer, model, warm, None)
        peer.load(owner, optimizer, model, warm, None)
    model, optimizer = build(case, int(request["operation"] == "save"))
    action = getattr(peer, request["operation"])
    os.sync()  # what others wrote is not to be written now
    try:
        found = measure(lambda: action(owner, optimizer, model, path, None))
    except BaseException as failure:
        if request["operation"] == "save" or isinstance(failure, KeyboardInterrupt):
            raise
        return None  # it does not load
    found["bytes"] = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    return found


def _forked(request: dict[str, Any]) -> Any:
    from ci.bench.timing import in_a_child

    return in_a_child(lambda: _cost(request))


REQUESTS = {"rows": _rows, "drift": _drift, "gradient": _gradient, "cost": _forked}


def main() -> int:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    import tests.contracts.automodel.upstream
    from tests.support.world import stop_server

    _ = tests.contracts.automodel.upstream
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"found": REQUESTS[request.pop("do")](request)}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    stop_server()
    return 0


if __name__ == "__main__":
    sys.exit(main())

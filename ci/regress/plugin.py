# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin of a side: it checks which tree is imported, and reports what each test of a contract does.

``ci.regress.sides`` loads it with ``-p``.  Reports go out as one JSON object per line while the side runs, so that a
side that is killed has still told what it was doing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest

NAME = "ci.regress.plugin"
TEXT_LIMIT = 8_000  # characters kept of a traceback and of a message
SHIM_VARIABLE = "AUTOMODEL_SHIM_INSTALL"  # rank processes look at it

pytest.register_assert_rewrite("tests.contracts", "tests.support")
_PHASES = pytest.StashKey[dict[str, tuple[Any, Any]]]()
_MEASURED = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that ``ci.regress.sides`` gives."""
    group = parser.getgroup("regress", "contracts of NeMo Automodel (given by `python -m ci.regress`)")
    group.addoption("--regress-side", choices=["stock", "patched", "installed", "as-is"])
    group.addoption("--regress-tree", type=Path, help="the work tree that must be imported")
    group.addoption("--regress-package", default="nemo_automodel")
    group.addoption("--regress-events", type=Path, help="file to which reports are appended")
    group.addoption("--regress-artifacts", type=Path, help="directory that all sides of a run share")
    group.addoption("--regress-only", action="append", default=[], metavar="CONTRACT")
    group.addoption("--regress-without", action="append", default=[], metavar="CONTRACT", help="does not apply")
    group.addoption("--regress-shim", help="module whose install() is called before collection")
    group.addoption("--regress-lifeline", type=int, help="descriptor that closes when the runner is gone")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and start the reporter."""
    config.addinivalue_line("markers", "contract(id, meaning): the contract that a test belongs to")
    missing = [
        option for option in ("side", "tree", "events", "artifacts") if config.getoption(f"--regress-{option}") is None
    ]
    if missing:
        raise pytest.UsageError(f"{NAME} is for `python -m ci.regress`; missing: --regress-{missing[0]}")
    lifeline = config.getoption("--regress-lifeline")
    if lifeline is not None:
        threading.Thread(target=_die_with_runner, args=(lifeline,), daemon=True).start()
    config.pluginmanager.register(Reporter(config), "regress-reporter")


@pytest.fixture(scope="session")
def contract_side(pytestconfig: pytest.Config) -> str:
    """Which side runs: ``stock``, ``patched``, ``installed`` (stock with the shim) or ``as-is`` (a fork's own tree)."""
    return pytestconfig.getoption("--regress-side")


@pytest.fixture(scope="session")
def artifacts(pytestconfig: pytest.Config) -> Path:
    """A directory that all sides of a run share: what stock leaves there, patched finds."""
    return pytestconfig.getoption("--regress-artifacts")


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Record a number under a name; it is reported whether the test passes or fails."""
    numbers = request.node.stash.setdefault(_MEASURED, {})

    def record(name: str, value: float) -> None:
        numbers[name] = float(value)

    return record


class Reporter:
    """Turn what pytest says into reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tree = config.getoption("--regress-tree").resolve()
        self.package = config.getoption("--regress-package")
        self.stream = config.getoption("--regress-events").open("a", encoding="utf-8")
        self.errors: list[dict[str, Any]] = []
        self.empty: set[str] = set()

    def emit(self, event: str, **fields: Any) -> None:
        """Write one report."""
        self.stream.write(json.dumps({"event": event, **fields}) + "\n")
        self.stream.flush()

    def abort(self, message: str) -> NoReturn:
        """Say why the side cannot run, and end it."""
        self.emit("abort", message=message)
        raise pytest.UsageError(message)

    def pytest_sessionstart(self) -> None:
        """Check which tree would be imported, and install the shim."""
        origin = self._origin()
        if origin is None:
            self.abort(f"{self.package} cannot be found for import")
        self._check_origin(origin)
        shim = self.config.getoption("--regress-shim")
        if shim is not None:
            try:
                importlib.import_module(shim).install()
            except Exception as exc:
                self.abort(f"{shim}.install() failed: {type(exc).__name__}: {exc}")
        self.emit("session", python=platform.python_version(), package_file=_real(origin), torch=_version("torch"))

    def pytest_report_header(self) -> str:
        """Show which tree and which torch this side is about."""
        commit = os.environ.get("CONTRACT_COMMIT", "")
        side = self.config.getoption("--regress-side")
        return f"{side}: {self.package} from {self.tree} ({commit}), torch {_version('torch') or 'absent'}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note the files that cannot be imported, and those without a single test."""
        file = report.nodeid.split("::")[0]
        if report.failed:
            excinfo = getattr(report, "regress_excinfo", None)
            self.errors.append({"file": file, "exception": _describe(excinfo), "text": _trim(str(report.longrepr))})
        elif file.endswith(".py") and "::" not in report.nodeid and not report.result:
            self.empty.add(file)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, None]:
        """Keep the exception itself: pytest's report of a failed collection holds only text."""
        outcome = yield
        report = outcome.get_result()
        call = getattr(report, "call", None)
        if call is not None and call.excinfo is not None:
            value = call.excinfo.value
            report.regress_excinfo = value.__cause__ if isinstance(value, collector.CollectError) else value

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Refuse tests without a contract, and select what was asked for."""
        collected = []
        for item in items:
            marker = item.get_closest_marker("contract")
            identity = marker.args[0] if marker is not None and marker.args else None
            meaning = marker.kwargs.get("meaning") if marker is not None else None
            if not isinstance(identity, str) or not isinstance(meaning, str) or not meaning.strip():
                self.abort(f'{item.nodeid}: needs @pytest.mark.contract("area.name", meaning="one line")')
            collected.append({"nodeid": item.nodeid, "contract": identity, "meaning": meaning})
        only = set(self.config.getoption("--regress-only"))
        without = set(self.config.getoption("--regress-without"))
        chosen = [one for one in collected if (not only or one["contract"] in only) and one["contract"] not in without]
        names = {one["nodeid"] for one in chosen}
        dropped = [item for item in items if item.nodeid not in names]
        if dropped:
            self.config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item.nodeid in names]
        self.emit("collected", tests=chosen, errors=self.errors, empty=sorted(self.empty))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report that a test begins."""
        self.emit("start", nodeid=nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
        """Keep the report and exception of each phase, and report the test after the last phase."""
        outcome = yield
        phases = item.stash.setdefault(_PHASES, {})
        exception = call.excinfo.value if call.excinfo is not None else None
        phases[call.when] = (outcome.get_result(), exception)
        if call.when == "teardown":
            self.emit("test", **_test_record(item, phases))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Report the end, and once more which package and which torch were imported."""
        module = sys.modules.get(self.package)
        origin = getattr(module, "__file__", None) or self._origin()
        torch = sys.modules.get("torch")
        self.emit(
            "finish",
            exit_status=int(exitstatus),
            package_file=_real(origin),
            torch=getattr(torch, "__version__", None) and str(torch.__version__),
            torch_file=getattr(torch, "__file__", None),
        )
        if module is not None:
            self._check_origin(origin)

    def _origin(self) -> str | None:
        spec = importlib.util.find_spec(self.package)
        if spec is None:
            return None
        return spec.origin or (list(spec.submodule_search_locations or []) or [None])[0]

    def _check_origin(self, origin: str | None) -> None:
        if origin is None or not Path(origin).resolve().is_relative_to(self.tree):
            self.abort(f"{self.package} comes from {origin}, not from the tree under test {self.tree}")


def _test_record(item: pytest.Item, phases: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    marker = item.get_closest_marker("contract")
    outcome, phase, text, exception = "passed", "call", "", None
    for when in ("setup", "call", "teardown"):
        report, raised = phases.get(when, (None, None))
        if report is None or outcome != "passed":
            continue
        if when != "teardown" and "ContractNotApplicable" in _bare_names(raised):
            outcome = "not-run"
        elif report.skipped or hasattr(report, "wasxfail"):
            outcome = "skipped"
        elif report.failed:
            outcome = "failed" if when == "call" else "error"
        if outcome != "passed":
            phase, exception, text = when, raised, _trim(report.longreprtext or str(getattr(report, "wasxfail", "")))
    measured = item.stash.get(_MEASURED, {})
    return {
        "nodeid": item.nodeid,
        "contract": marker.args[0],
        "meaning": marker.kwargs["meaning"],
        "outcome": outcome,
        "phase": phase,
        "exception": _describe(exception),
        # JSON has no words for these; they are read back as numbers
        "measured": {name: value if math.isfinite(value) else str(value) for name, value in measured.items()},
        "duration_s": sum(report.duration for report, _ in phases.values()),
        "text": text,
    }


def _describe(exception: BaseException | None) -> dict[str, Any] | None:
    if exception is None:
        return None
    described: dict[str, Any] = {
        "type": _qualified(type(exception)),
        "mro": [_qualified(kind) for kind in type(exception).__mro__],
        "message": _trim(str(exception)),
    }
    cause = _root_cause(exception)
    if cause is not None:
        described["root_cause"] = {
            "type": cause.exc_type,
            "mro": list(cause.exc_mro),
            "message": _trim(str(cause.message)),
        }
    return described


def _root_cause(exception: BaseException | None) -> Any:
    # A failure of several processes says which exception of which process came first.
    cause = getattr(exception, "root_cause", None)
    return cause if getattr(cause, "exc_type", None) and getattr(cause, "exc_mro", None) else None


def _bare_names(exception: BaseException | None) -> set[str]:
    if exception is None:
        return set()
    names = {kind.__name__ for kind in type(exception).__mro__}
    cause = _root_cause(exception)
    if cause is not None:
        names |= {name.rpartition(".")[2] for name in cause.exc_mro}
    return names


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _trim(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - TEXT_LIMIT} characters ...]\n{text[-half:]}"


def _real(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _die_with_runner(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)

# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for a run under torchrun: what the pipeline's plugin gives to contracts, without the pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from . import launch

_LAUNCHER_TESTS = Path(__file__).resolve().parents[1] / "launcher"


class LaunchedRun:
    """Fixtures and marker of the pipeline's plugin, and the count of what did not run."""

    def __init__(self, joined: launch.Launch) -> None:
        self.launch = joined
        self.not_run: list[str] = []

    def pytest_report_header(self) -> str:
        """Show the launch."""
        return f"torchrun: rank {self.launch.rank} of {self.launch.world_size}, {self.launch.backend}"

    @pytest.fixture(scope="session")
    def contract_side(self) -> str:
        """The tree as it is."""
        return "as-is"

    @pytest.fixture(scope="session")
    def artifacts(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """An empty directory."""
        return tmp_path_factory.mktemp("artifacts")

    @pytest.fixture
    def measure(self, record_property: Callable[[str, Any], None]) -> Callable[[str, float], None]:
        """Record a number under a name."""
        return record_property

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the tests of the launcher out: they kill their ranks."""
        for item in items:
            if item.path.is_relative_to(_LAUNCHER_TESTS):
                item.add_marker(pytest.mark.skip(reason="not run: it tests the launcher that torchrun stands in for"))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
        """Tell what cannot apply here from what failed."""
        outcome = yield
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, launch.OtherWorldSize) or type(error).__name__ == "ContractNotApplicable":
            report = outcome.get_result()
            self.not_run.append(item.nodeid)
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"not run: {error}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run in which nothing could run is no success."""
        ran = session.testscollected - len(self.not_run)
        if session.exitstatus == pytest.ExitCode.OK and not ran:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Count what did not run."""
        if self.not_run:
            terminalreporter.write_line(f"not run, and not passed: {len(self.not_run)} tests (see -rs)")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Let every rank print its summary before the first one leaves."""
        sys.stdout.flush()
        self.launch.leave()

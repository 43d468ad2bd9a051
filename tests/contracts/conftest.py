# SPDX-License-Identifier: Apache-2.0
"""Keep the contracts out of an ordinary ``pytest`` run: they need a side, which only the pipeline prepares."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
collect_ignore_glob: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Let the pipeline pass; refuse a run that names the contracts; keep them out of any other run."""
    if config.pluginmanager.has_plugin("regress-reporter") or config.getoption("--regress-side", default=None):
        return
    if config.getoption("--torchrun", default=None):
        return  # on the tree that is importable, as it is
    for argument in config.args:
        path = (config.invocation_params.dir / argument.split("::")[0]).resolve()
        if path.is_relative_to(_HERE):
            raise pytest.UsageError(
                "tests/contracts cannot run by itself: its tests compare a stock tree with a patched one; "
                "use `nox -s regress` (or `python -m ci.regress --only CONTRACT`)"
            )
    collect_ignore_glob.append("*")

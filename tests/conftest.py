# SPDX-License-Identifier: Apache-2.0
"""``--torchrun``: rank bodies run in the processes that torchrun launched, on the tree that is importable."""

from __future__ import annotations

import os

import pytest

# Imports of `tests.support` stay inside: the pipeline's plugin wants to rewrite its assertions first.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one option."""
    parser.addoption(
        "--torchrun",
        choices=["auto", "gloo", "nccl"],
        help="this pytest is one rank of a torchrun launch: rank bodies run in it, unchanged; the value is the backend",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Join the launch."""
    backend = config.getoption("--torchrun")
    if backend is None:
        return
    from tests.support import launch
    from tests.support.launched_run import LaunchedRun
    from tests.support.world import ENV_DEFAULTS

    for name, value in ENV_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        joined = launch.join(backend)
    except launch.LaunchError as error:
        raise pytest.UsageError(str(error)) from None
    config.addinivalue_line("markers", "contract(id, meaning): the contract that a test belongs to")
    config.pluginmanager.register(LaunchedRun(joined), "launched-run")

# SPDX-License-Identifier: Apache-2.0
"""``nox -s regress``: the contracts on the pinned release and on the patched one.  ``nox -s tests``: everything else.

With ``nox --no-venv`` nothing is installed, and the interpreter that runs nox runs the sessions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["regress", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
PATIENCE_S = 20.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# What runs the sessions: the environment's interpreter, once that session has run.
_interpreter = sys.executable


@nox.session(default=False)
def environment(session: nox.Session) -> None:
    """Make the environment of the other sessions; one for all of them, since torch is large."""
    if session.virtualenv.venv_backend == "none":
        return
    global _interpreter
    _interpreter = str(Path(session.bin) / "python")
    targets = nox.project.load_toml("patches/series.toml")["targets"].values()
    first, *others = next(target["requirements"] for target in targets if target.get("default"))
    own = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "tests")
    digest = hashlib.sha256(json.dumps([first, others, list(own), sys.version]).encode()).hexdigest()
    stamp = Path(session.virtualenv.location) / "regress-requirements.sha256"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        session.log("requirements unchanged, nothing to install")
        return
    stamp.unlink(missing_ok=True)
    # torch alone and first, so that nothing else chooses its version or build; named again, so that it stays.
    session.install(first)
    session.install(first, *others, *own)
    stamp.write_text(digest, encoding="utf-8")


@nox.session(venv_backend="none", requires=["environment"])
def regress(session: nox.Session) -> None:
    """Run the contracts; arguments after `--` go to `python -m ci.regress`."""
    _python(session, "-m", "ci.regress", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """Run the tests of the pipeline, the shim and the helpers; arguments after `--` go to pytest."""
    _python(session, "-m", "pytest", "tests", "--ignore=tests/browser", *(session.posargs or ["-q", "-n", "2"]))


@nox.session(default=False)
def page(session: nox.Session) -> None:
    """Look at the report's page in headless Chromium; arguments after `--` go to pytest.

    It needs Chromium or Chrome, which no Python package brings: on PATH, or named by the variable CHROMIUM.
    """
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        session.error(f"needs a browser: none of {', '.join(BROWSERS)} is on PATH, and CHROMIUM names none")
    if session.virtualenv.venv_backend != "none":
        session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "page"))
    arguments = session.posargs or ["-q"]
    session.run("python", "-m", "pytest", "tests/browser", *arguments, env=ENVIRONMENT | {"CHROMIUM": found})


@nox.session(name="bench-gather", venv_backend="none", requires=["environment"], default=False)
def bench_gather(session: nox.Session) -> None:
    """Time the gather of stock and patched beside another version; arguments after `--` go to the module."""
    _python(session, "-m", "ci.bench.gather", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def impostors(session: nox.Session) -> None:
    """Say which contract catches which almost-right gather."""
    _python(session, "-m", "ci.impostors", *session.posargs)


def _python(session: nox.Session, *arguments: str) -> None:
    session.run(
        _interpreter,
        *arguments,
        external=True,
        env=ENVIRONMENT,
        # After ^C the pipeline stops its sides and removes its trees; nox would kill it half a second later.
        interrupt_timeout=PATIENCE_S,
        terminate_timeout=PATIENCE_S,
    )

# SPDX-License-Identifier: Apache-2.0
"""``nox -s regress``: the contracts on the pinned release and on the patched one.  ``nox -s tests``: everything else.

With ``nox --no-venv`` nothing is installed, and the interpreter that runs nox runs the sessions.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["regress", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
PATIENCE_S = 20.0

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
    _python(session, "-m", "pytest", "tests", *(session.posargs or ["-q", "-n", "2"]))


# What follows is run by hand: it takes long, or wants a quiet machine.


@nox.session(name="bench-gather", venv_backend="none", requires=["environment"], default=False)
def bench_gather(session: nox.Session) -> None:
    """Time the gather of stock and patched beside another version; arguments after `--` go to the module."""
    _python(session, "-m", "ci.bench.gather", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def impostors(session: nox.Session) -> None:
    """Say which contract catches which almost-right gather."""
    _python(session, "-m", "ci.impostors", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def grid(session: nox.Session) -> None:
    """Run optimizers × cases on both sides and write `docs/grid.md`; names of rows after `--` print these alone."""
    _python(session, "-m", "ci.grid", *session.posargs)


@nox.session(name="bench-loader", venv_backend="none", requires=["environment"], default=False)
def bench_loader(session: nox.Session) -> None:
    """Time saves and loads of optimizer state beside the release; arguments after `--` go to `ci.bench.loader`."""
    _python(session, "-m", "ci.bench.loader", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def mutants(session: nox.Session) -> None:
    """Put one fault at a time into a copy of the loader: each must turn the test that is named for it red."""
    _python(session, "-m", "ci.mutants", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def search(session: nox.Session) -> None:
    """Draw new runs and layouts, 20 times as many as `tests` does; another number may follow `--`."""
    factor, *arguments = session.posargs or ["20"]
    searches = ("tests/shim/test_search.py", "tests/shim/test_layouts.py")
    _python(session, "-m", "pytest", "-q", *searches, *arguments, SEARCH_FACTOR=factor)


@nox.session(name="torch-range", reuse_venv=True, default=False)
@nox.parametrize("torch", ["2.9.1", "2.13.0", "2.14.1"])
def torch_range(session: nox.Session, torch: str) -> None:
    """Run the loader's tests under other releases of torch; each may be several gigabytes to install."""
    own = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "tests")
    session.install(f"torch=={torch}", "numpy>=2.1", *own)
    loaders = [f"tests/shim/test_{name}.py" for name in ("sparse_optimizer_state", "search", "layouts", "messages")]
    session.run("python", "-m", "pytest", "-q", *loaders, *session.posargs, env=ENVIRONMENT)


def _python(session: nox.Session, *arguments: str, **environment: str) -> None:
    session.run(
        _interpreter,
        *arguments,
        external=True,
        env=ENVIRONMENT | environment,
        # After ^C the pipeline stops its sides and removes its trees; nox would kill it half a second later.
        interrupt_timeout=PATIENCE_S,
        terminate_timeout=PATIENCE_S,
    )

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

# Both sessions run in one environment: torch is large, and what they need differs by nox alone.
ENVIRONMENT_DIRECTORY = ".nox/environment"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
PATIENCE_S = 20.0


@nox.session(venv_location=ENVIRONMENT_DIRECTORY)
def regress(session: nox.Session) -> None:
    """Run the contracts; arguments after `--` go to `python -m ci.regress`."""
    _install(session)
    _python(session, "-m", "ci.regress", *session.posargs)


@nox.session(venv_location=ENVIRONMENT_DIRECTORY)
def tests(session: nox.Session) -> None:
    """Run the tests of the pipeline, the shim and the helpers; arguments after `--` go to pytest."""
    _install(session)
    _python(session, "-m", "pytest", "tests", *(session.posargs or ["-q"]))


def _has_no_venv(session: nox.Session) -> bool:
    return session.virtualenv.venv_backend == "none"


def _python(session: nox.Session, *arguments: str) -> None:
    external = _has_no_venv(session)
    session.run(
        sys.executable if external else "python",
        *arguments,
        external=external,
        env=ENVIRONMENT,
        # After ^C the pipeline stops its sides and removes its trees; nox would kill it half a second later.
        interrupt_timeout=PATIENCE_S,
        terminate_timeout=PATIENCE_S,
    )


def _install(session: nox.Session) -> None:
    """Install what the default target pins and what this project needs, unless the environment has just that."""
    if _has_no_venv(session):
        return
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

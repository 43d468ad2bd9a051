# SPDX-License-Identifier: Apache-2.0
"""``nox -s regress``: the contracts on the pinned release and on the patched one.  ``nox -s tests``: everything else.

``nox -s regress -- --target NAME`` takes another target of ``patches/series.toml``, in an environment of that target's
requirements.  With ``nox --no-venv`` nothing is installed, and the interpreter that runs nox runs the sessions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nox
from packaging.specifiers import SpecifierSet

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["regress", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
NEWEST = "automodel/v0.7.0"  # the release that `peers` sets beside the default one
PATIENCE_S = 20.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Tried from the newest down where a target asks for another Python than the one that runs nox.
MINORS = range(14, 10, -1)
# Where version managers keep theirs: the variable that names the root, the root without it, the interpreters below it.
MANAGERS = (
    ("PYENV_ROOT", "~/.pyenv", "versions/*/bin/python"),
    ("UV_PYTHON_INSTALL_DIR", "~/.local/share/uv/python", "*/bin/python"),
)

# What runs the sessions: the environment's interpreter, once that session has run.
_interpreter = sys.executable
_installs = False
_made: dict[str, str] = {}  # interpreters of the environments that this run has made sure of, by digest


@nox.session(default=False)
def environment(session: nox.Session) -> None:
    """Make the environment of the other sessions; one for all of them, since torch is large."""
    if session.virtualenv.venv_backend == "none":
        return
    global _installs, _interpreter
    _installs = True
    _interpreter = str(Path(session.bin) / "python")
    targets = nox.project.load_toml("patches/series.toml")["targets"]
    name = _chosen(session.posargs)
    default = _default(targets)
    if name in targets and name != default and _needs(targets, name) != _needs(targets, default):
        session.log(f"not needed: {name} has an environment of its own")
        return
    _install(session, _interpreter, Path(session.virtualenv.location), targets, default)


@nox.session(venv_backend="none", requires=["environment"])
def regress(session: nox.Session) -> None:
    """Run the contracts; arguments after `--` go to `python -m ci.regress`."""
    targets = nox.project.load_toml("patches/series.toml")["targets"]
    name = _chosen(session.posargs)
    if not _installs or name not in targets:  # an unknown name is refused by the command itself
        _python(session, _interpreter, "-m", "ci.regress", *session.posargs)
        return
    interpreter, ran = _environment_of(session, targets, name)
    arguments = list(session.posargs)
    if ran != name:
        arguments = [argument.replace(name, ran) for argument in arguments]
    _python(session, interpreter, "-m", "ci.regress", *arguments)
    if ran != name:
        session.warn(f"ran the fallback {ran}, not {name}: there is no Python {_key(targets, name, 'python')} here")


@nox.session(venv_backend="none", requires=["environment"], default=False)
def targets(session: nox.Session) -> None:
    """Run the contracts on every release of Automodel but the default; with `-- --git CLONE`, on the commits too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--git")
    given, others = parser.parse_known_args(session.posargs)
    table = nox.project.load_toml("patches/series.toml")["targets"]
    default = _default(table)
    for name, target in table.items():
        pinned = any(key in target for key in ("commit", "tag"))
        if name == default or not pinned or _key(table, name, "project") != _key(table, default, "project"):
            continue
        arguments = ["--target", name, *others]
        if "wheel" not in target:
            if given.git is None:
                session.log(f"{name}: in git only, not run (give a clone after `-- --git`)")
                continue
            arguments += ["--git", given.git, *([] if others else ["--record"])]
        interpreter = _environment_of(session, table, name)[0] if _installs else _interpreter
        _python(session, interpreter, "-m", "ci.regress", *arguments)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def rebase(session: nox.Session) -> None:
    """Try the series on another commit; `-- --git PATH --commit SHA`."""
    _python(session, _interpreter, "-m", "ci.rebase", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def upstream(session: nox.Session) -> None:
    """Run upstream's own unit tests before and after the series; `-- --git PATH`."""
    _python(session, _interpreter, "-m", "ci.upstream", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """Run the tests of the pipeline, the shim and the helpers; arguments after `--` go to pytest."""
    arguments = session.posargs or ["-q", "-n", "2"]
    _python(session, _interpreter, "-m", "pytest", "tests", "--ignore=tests/browser", *arguments)


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


# What follows is run by hand: it takes long, or wants a quiet machine.


@nox.session(name="bench-gather", venv_backend="none", requires=["environment"], default=False)
def bench_gather(session: nox.Session) -> None:
    """Time the gather of stock and patched beside another version; arguments after `--` go to the module."""
    _python(session, _interpreter, "-m", "ci.bench.gather", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def impostors(session: nox.Session) -> None:
    """Say which contract catches which almost-right gather."""
    _python(session, _interpreter, "-m", "ci.impostors", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def grid(session: nox.Session) -> None:
    """Run optimizers × cases on both sides and write `docs/grid.md`; names of rows after `--` print these alone."""
    _python(session, _interpreter, "-m", "ci.grid", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def peers(session: nox.Session) -> None:
    """Set the ways to resume an optimizer side by side and write `docs/peers.md`; `-- --fast` for a short run."""
    table = nox.project.load_toml("patches/series.toml")["targets"]
    newest = _environment_of(session, table, NEWEST)[0] if _installs else _interpreter
    _python(session, _interpreter, "-m", "ci.peers", "--newest-python", newest, *session.posargs)


@nox.session(name="bench-loader", venv_backend="none", requires=["environment"], default=False)
def bench_loader(session: nox.Session) -> None:
    """Time saves and loads of optimizer state beside the release; arguments after `--` go to `ci.bench.loader`."""
    _python(session, _interpreter, "-m", "ci.bench.loader", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def mutants(session: nox.Session) -> None:
    """Put one fault at a time into a copy of the loader: each must turn the test that is named for it red."""
    _python(session, _interpreter, "-m", "ci.mutants", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def search(session: nox.Session) -> None:
    """Draw new runs and layouts, 20 times as many as `tests` does; another number may follow `--`."""
    factor, *arguments = session.posargs or ["20"]
    searches = ("tests/shim/test_search.py", "tests/shim/test_layouts.py")
    _python(session, _interpreter, "-m", "pytest", "-q", *searches, *arguments, SEARCH_FACTOR=factor)


@nox.session(name="torch-range", reuse_venv=True, default=False)
@nox.parametrize("torch", ["2.9.1", "2.13.0", "2.14.1"])
def torch_range(session: nox.Session, torch: str) -> None:
    """Run the loader's tests under other releases of torch; each may be several gigabytes to install."""
    own = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "tests")
    session.install(f"torch=={torch}", "numpy>=2.1", *own)
    loaders = [f"tests/shim/test_{name}.py" for name in ("sparse_optimizer_state", "search", "layouts", "messages")]
    session.run("python", "-m", "pytest", "-q", *loaders, *session.posargs, env=ENVIRONMENT)


def _chosen(arguments: list[str]) -> str | None:
    """Return what `--target` names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--target")
    return parser.parse_known_args(arguments)[0].target


def _default(targets: dict[str, Any]) -> str:
    return next(name for name, target in targets.items() if target.get("default"))


def _key(targets: dict[str, Any], name: str, key: str) -> Any:
    """Return a target's key, or that of the target which it is like (see ``ci/regress/inherit.py``)."""
    while name is not None:
        if key in targets[name]:
            return targets[name][key]
        name = targets[name].get("like")
    return None


def _needs(targets: dict[str, Any], name: str) -> tuple[list[str], str]:
    """Return the requirements and the range of Pythons: targets with the same ones share an environment."""
    return list(_key(targets, name, "requirements") or ()), _key(targets, name, "python") or ""


def _environment_of(session: nox.Session, targets: dict[str, Any], name: str) -> tuple[str, str]:
    """Make a target's environment, and return its interpreter and the target that it is for: the fallback, if any."""
    requirements, python = _needs(targets, name)
    if (requirements, python) == _needs(targets, _default(targets)):
        return _interpreter, name
    digest = hashlib.sha256(json.dumps([requirements, python]).encode()).hexdigest()[:12]
    if digest not in _made:
        found = _find_python(python)
        if found is None:
            fallback = targets[name].get("fallback")
            lack = f"{name} needs Python {python}, none is on PATH as python3.N, nor with pyenv or uv: install one"
            if fallback is None:
                session.error(lack)
            session.warn(f"{lack}. Running the fallback {fallback}")
            return _environment_of(session, targets, fallback)
        place = session.cache_dir / "environments" / digest
        interpreter = place / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        if not _runs(str(interpreter)):
            session.run(found, "-m", "venv", "--clear", str(place), external=True)
        _install(session, str(interpreter), place, targets, name)
        _made[digest] = str(interpreter)
    return _made[digest], name


def _find_python(python: str) -> str | None:
    """Return an interpreter within a range: the one that runs nox, one on PATH, or one that a version manager keeps."""
    wanted = SpecifierSet(python)
    on_path = [shutil.which(f"python3.{minor}") for minor in MINORS]
    for candidate in (sys.executable, *on_path, *_managed()):
        version = _runs(candidate) if candidate else None
        if version is not None and wanted.contains(version, prereleases=True):
            return candidate
    return None


def _managed() -> Iterator[str]:
    """The interpreters of pyenv and uv, newest first: those that are not switched on are not on PATH."""
    for variable, default, pattern in MANAGERS:
        root = Path(os.environ.get(variable) or default).expanduser()
        found = {path: re.search(r"3\.(\d+)\.(\d+)", path.parent.parent.name) for path in root.glob(pattern)}
        known = {path: (int(version[1]), int(version[2])) for path, version in found.items() if version}
        yield from (str(path) for path in sorted(known, key=known.__getitem__, reverse=True))


def _runs(interpreter: str) -> str | None:
    """Return the version of an interpreter, or None if it does not start: a version manager may leave empty shims."""
    try:
        done = subprocess.run([interpreter, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.fullmatch(r"Python (\d+\.\d+\.\d+)\S*", done.stdout.strip())
    return found[1] if found and done.returncode == 0 else None


def _install(session: nox.Session, interpreter: str, place: Path, targets: dict[str, Any], name: str) -> None:
    """Install a target's requirements and the project's own, unless that has been done."""
    first, *others = _needs(targets, name)[0]
    own = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "tests")
    digest = hashlib.sha256(json.dumps([first, others, list(own), sys.version]).encode()).hexdigest()
    stamp = place / "regress-requirements.sha256"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        session.log("requirements unchanged, nothing to install")
        return
    stamp.unlink(missing_ok=True)
    # torch alone and first, so that nothing else chooses its version or build; named again, so that it stays.
    _pip(session, interpreter, first)
    _pip(session, interpreter, first, *others, *own)
    stamp.write_text(digest, encoding="utf-8")


def _pip(session: nox.Session, interpreter: str, *requirements: str) -> None:
    session.run(interpreter, "-m", "pip", "install", *requirements, external=True, silent=True)


def _python(session: nox.Session, interpreter: str, *arguments: str, **environment: str) -> None:
    session.run(
        interpreter,
        *arguments,
        external=True,
        env=ENVIRONMENT | environment,
        # After ^C the pipeline stops its sides and removes its trees; nox would kill it half a second later.
        interrupt_timeout=PATIENCE_S,
        terminate_timeout=PATIENCE_S,
    )

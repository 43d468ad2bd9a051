# SPDX-License-Identifier: Apache-2.0
"""This repository's own series and noxfile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email import message_from_string
from pathlib import Path

import pytest

from ci.regress import PATCHES, REPOSITORY, manifest, worktree
from tests.pipeline.project import Project, write_files

LOADED = manifest.load(PATCHES)
TARGETS = sorted(LOADED.targets)


def test_one_default_target() -> None:
    name, target = LOADED.select(None)
    assert name in TARGETS
    # noxfile.py installs the first one alone, before anything that depends on it
    assert target.requirements[0].startswith("torch==")


@pytest.mark.parametrize("name", TARGETS)
def test_blobs_are_the_existing_files_that_the_series_touches(name: str) -> None:
    target = LOADED.targets[name]
    existing: set[str] = set()
    created: set[str] = set()
    for patch in target.patches:
        for file, new in worktree.touched_files(PATCHES / target.series / patch.file).items():
            if new:
                created.add(file)
            elif file not in created:
                existing.add(file)
    assert set(target.blobs) == existing
    added = {file for patch in target.patches for file in patch.adds}
    assert added <= created


@pytest.mark.parametrize("name", TARGETS)
def test_patches_bear_the_identity_and_say_why(name: str) -> None:
    target = LOADED.targets[name]
    for patch in target.patches:
        mail = message_from_string((PATCHES / target.series / patch.file).read_text(encoding="utf-8"))
        author = f"{LOADED.identity.name} <{LOADED.identity.email}>"
        assert (patch.file, " ".join(mail["From"].split())) == (patch.file, author)
        assert mail["Subject"].startswith("[PATCH")
        for ours, theirs in patch.adds.items():
            assert (REPOSITORY / theirs).is_file(), f"{patch.file} adds {ours}; {theirs} is not there"


@pytest.mark.parametrize("name", TARGETS)
def test_contracts_marked_and_declared_are_the_same(name: str) -> None:
    marked = set()
    for file in sorted((REPOSITORY / LOADED.targets[name].suite).glob("test_*.py")):
        marked |= set(re.findall(r"""\.contract\(\s*["']([^"']+)["']""", file.read_text(encoding="utf-8")))
    assert marked == set(LOADED.targets[name].contracts)


def run_nox(directory: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run nox on a noxfile's directory."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("NOX", "PIP_", "PYTEST_"))}
    command = [sys.executable, "-m", "nox", "--noxfile", str(directory / "noxfile.py"), *arguments]
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=directory, env=clean | more, **merged, text=True, timeout=120)


def test_nox_without_an_environment_installs_nothing() -> None:
    done = run_nox(REPOSITORY, "--no-venv", "-s", "regress", "--", "--list")
    assert done.returncode == 0, done.stdout
    assert TARGETS[0] in done.stdout
    assert "pip install" not in done.stdout
    assert sys.executable in done.stdout


def test_nox_hands_the_exit_status_on() -> None:
    done = run_nox(REPOSITORY, "--no-venv", "-s", "regress", "--", "--target", "no/such")
    assert done.returncode != 0
    assert "exit code 2" in done.stdout
    assert "--target no/such: not in series.toml" in done.stdout


def test_nox_installs_once(project: Project) -> None:
    project.write()
    directory = project.root / "checkout"
    files = {
        "noxfile.py": (REPOSITORY / "noxfile.py").read_text(),
        "pyproject.toml": "[dependency-groups]\ntests = []\n",
        "patches/series.toml": '[targets.x]\ndefault = true\nrequirements = ["nemo-automodel==9.9.9"]\n',
        "ci/regress/__main__.py": "import nemo_automodel, sys\nprint('ran with', sys.argv[1:])\n",
    }
    write_files(directory, files)
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project.wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    first = run_nox(directory, "-s", "regress", "--", "--only", "a.b", **pip)
    assert first.returncode == 0, first.stdout
    said = first.stdout
    assert said.count("pip install nemo-automodel==9.9.9") == 2
    assert said.index("pip install") < said.index("ran with ['--only', 'a.b']")
    second = run_nox(directory, "-s", "regress", **pip)
    assert second.returncode == 0, second.stdout
    assert "pip install" not in second.stdout
    assert "requirements unchanged" in second.stdout
    write_files(directory, {"pyproject.toml": '[dependency-groups]\ntests = ["nemo-automodel>=9"]\n'})
    third = run_nox(directory, "-s", "regress", **pip)
    assert "pip install nemo-automodel==9.9.9 'nemo-automodel>=9'" in third.stdout


TARGETS_OF_NOX = """\
[targets.x]
default = true
requirements = ["no-such-distribution==0"]
[targets.y]
requirements = ["nemo-automodel==9.9.9"]
[targets.z]
like = "y"
[targets.future]
like = "y"
python = ">=4"
fallback = "z"
[targets.stuck]
like = "y"
python = ">=4"
"""


def test_nox_makes_an_environment_for_a_target(project: Project) -> None:
    project.write()
    directory = project.root / "checkout"
    files = {
        "noxfile.py": (REPOSITORY / "noxfile.py").read_text(),
        "pyproject.toml": "[dependency-groups]\ntests = []\n",
        "patches/series.toml": TARGETS_OF_NOX,
        "ci/regress/__main__.py": "import nemo_automodel, sys\nprint('ran with', sys.argv[1:])\n",
    }
    write_files(directory, files)
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project.wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    first = run_nox(directory, "-s", "regress", "--", "--target", "y", **pip)
    assert first.returncode == 0, first.stdout
    assert "not needed: y has an environment of its own" in first.stdout
    assert "no-such-distribution" not in first.stdout
    assert "ran with ['--target', 'y']" in first.stdout
    shared = run_nox(directory, "-s", "regress", "--", "--target=z", **pip)
    assert shared.returncode == 0, shared.stdout
    assert "requirements unchanged" in shared.stdout
    assert "pip install" not in shared.stdout
    fallback = run_nox(directory, "-s", "regress", "--", "--target", "future", "--quiet", **pip)
    assert fallback.returncode == 0, fallback.stdout
    assert "future needs Python >=4, none is on PATH" in fallback.stdout
    assert "ran with ['--target', 'z', '--quiet']" in fallback.stdout
    assert "ran the fallback z, not future" in fallback.stdout
    stuck = run_nox(directory, "-s", "regress", "--", "--target", "stuck", **pip)
    assert stuck.returncode == 1
    assert "nor with pyenv or uv: install one" in stuck.stdout


def test_nox_finds_an_interpreter_that_pyenv_keeps(project: Project) -> None:
    project.write()
    directory, pyenv = project.root / "checkout", project.root / "pyenv"
    files = {
        "noxfile.py": (REPOSITORY / "noxfile.py").read_text(),
        "pyproject.toml": "[dependency-groups]\ntests = []\n",
        "patches/series.toml": TARGETS_OF_NOX,
        "ci/regress/__main__.py": "print('ran')\n",
    }
    write_files(directory, files)
    # Says that it is a newer Python than any on PATH, and is this one for the rest.
    for name, version in (("3.0.9", "3.0.9"), ("4.3.1-dev", "4.3.1"), ("3.999.1", "4.0.0")):
        python = pyenv / "versions" / name / "bin" / "python"
        says = f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version} && exit\nexec {sys.executable} "$@"\n'
        write_files(python.parent, {"python": says})
        python.chmod(0o755)
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project.wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    done = run_nox(directory, "-s", "regress", "--", "--target", "stuck", PYENV_ROOT=str(pyenv), **pip)
    assert done.returncode == 0, done.stdout
    assert "3.999.1/bin/python -m venv" in done.stdout
    assert "ran" in done.stdout


SEVERAL = """\
[targets.first]
default = true
project = "p"
requirements = ["a"]
commit = "1"
wheel = {}
[targets.second]
like = "first"
tag = "2"
wheel = {}
[targets.in-git]
like = "first"
commit = "3"
[targets.same-release]
like = "first"
[targets.elsewhere]
project = "q"
requirements = ["a"]
tag = "1"
wheel = {}
"""


@pytest.mark.parametrize(
    ("given", "ran"),
    [
        ([], [["second"]]),
        (["--git", "../x"], [["second"], ["in-git", "--git", "../x", "--record"]]),
        (["--git=../x", "--only", "a.b"], [["second", "--only", "a.b"], ["in-git", "--only", "a.b", "--git", "../x"]]),
    ],
)
def test_nox_runs_the_other_releases(tmp_path: Path, given: list[str], ran: list[list[str]]) -> None:
    files = {
        "noxfile.py": (REPOSITORY / "noxfile.py").read_text(),
        "patches/series.toml": SEVERAL,
        "ci/regress/__main__.py": "import sys\nprint('ran', *sys.argv[2:])\n",
    }
    write_files(tmp_path, files)
    done = run_nox(tmp_path, "--no-venv", "-s", "targets", "--", *given)
    assert done.returncode == 0, done.stdout
    assert [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran ")] == ran
    assert ("in-git: in git only, not run" in done.stdout) is (not given)

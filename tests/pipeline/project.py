# SPDX-License-Identifier: Apache-2.0
"""A tiny project to run the pipeline on: a package of a few lines, its wheel, a series, contracts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.regress import REPOSITORY
from ci.regress.fetch import blob_id
from ci.regress.report import Report

MODULE = "nemo_automodel/components/moe/experts.py"
STOCK = '''\
"""Experts."""


def first():
    return 1


def gradient():
    return 0.5


def second():
    return 2


def third():
    return 3


def fourth():
    return 4


def fine():
    return True
'''
PACKAGE = {
    "nemo_automodel/__init__.py": "",
    "nemo_automodel/components/__init__.py": "",
    "nemo_automodel/components/moe/__init__.py": "",
    MODULE: STOCK,
}
HALF = '{ raises = "AssertionError", match = "gradient is 0\\\\.5" }'
CONTRACT = """
import pytest
from nemo_automodel.components.moe import experts

@pytest.mark.contract("gather.gradient", meaning="the gradient is whole")
def test_gradient():
    assert experts.gradient() == 1.0, f"gradient is {experts.gradient()}"
"""
GUARD = """
import pytest
from nemo_automodel.components.moe import experts

@pytest.mark.contract("guard.fine", meaning="what works goes on working")
def test_fine():
    assert experts.fine()
"""


def toml(value: Any) -> str:
    """Write strings, lists of strings and tables of strings as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)


@dataclass
class Result:
    """What a run of the command left."""

    status: int
    out: str
    err: str
    reports: Path

    @property
    def report(self) -> Report:
        """Return report.json, checked against its model."""
        return Report.model_validate_json((self.reports / "report.json").read_text())

    def verdict(self, contract: str) -> str:
        """Return the verdict of a contract."""
        return next(row.verdict.value for row in self.report.contracts if row.id == contract)

    def notes(self, contract: str) -> str:
        """Return the notes on a contract."""
        return "\n".join(next(row.notes for row in self.report.contracts if row.id == contract))

    def junit(self) -> ET.Element:
        """Return the only suite of junit.xml."""
        suite = ET.parse(self.reports / "junit.xml").getroot().find("testsuite")
        assert suite is not None
        return suite


@dataclass
class Project:
    """The files of the tiny project; ``run`` runs the real command on them."""

    root: Path
    files: dict[str, str] = field(default_factory=lambda: dict(PACKAGE))
    patches: list[dict[str, Any]] = field(default_factory=list)
    contracts: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    extra: str = ""  # more keys of the target
    blobs: dict[str, str] | None = None
    sha256: str | None = None
    commit: str = "1" * 40

    @property
    def wheel(self) -> Path:
        """Where the wheel lies."""
        return self.root / "wheels" / "nemo_automodel-9.9.9-py3-none-any.whl"

    @property
    def series(self) -> Path:
        """Where the patches lie."""
        return self.root / "patches" / "fake" / "v9"

    def add_patch(self, old: str, new: str, cures: list[str], name: str = "cure", path: str = MODULE) -> Path:
        """Add a patch that replaces text, made by git on top of the patches so far."""
        number = len(self.patches) + 1
        made = self.root / "made"
        if not made.exists():
            write_files(made, self.files)
            git(made, "init", "-q")
            git(made, "add", "-A")
            git(made, "commit", "-q", "-m", "base")
        target = made / path
        before = target.read_text()
        assert old in before
        target.write_text(before.replace(old, new))
        git(made, "commit", "-q", "-a", "-m", f"{name} {number}")
        self.series.mkdir(parents=True, exist_ok=True)
        file = f"{number:04d}-{name}.patch"
        (self.series / file).write_text(git(made, "format-patch", "--stdout", "-1"))
        self.patches.append({"file": file, "status": "proposed", "reason": "it is wrong", "cures": cures})
        return self.series / file

    def cure(self) -> Path:
        """Add the patch that cures ``gather.gradient``."""
        return self.add_patch("return 0.5", "return 1.0", ["gather.gradient"])

    def declare(self, contract: str, stock: str, test: str | None = None) -> None:
        """Declare a contract, and write its test file."""
        self.contracts[contract] = stock
        if test is not None:
            self.tests[f"test_{contract.replace('.', '_').replace('-', '_')}.py"] = test

    def write(self) -> None:
        """Write everything: the wheel, series.toml and the contracts."""
        self.wheel.parent.mkdir(parents=True, exist_ok=True)
        info = "nemo_automodel-9.9.9.dist-info"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for name, text in self.files.items():
                archive.writestr(name, text)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nemo-automodel\nVersion: 9.9.9\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        write_files(self.root / "contracts", {name: textwrap.dedent(text) for name, text in self.tests.items()})
        (self.root / "patches").mkdir(exist_ok=True)
        (self.root / "patches" / "series.toml").write_text(self.series_toml())

    def series_toml(self) -> str:
        """Return the text of series.toml."""
        digest = self.sha256 or hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        blobs = {MODULE: blob_id(self.files[MODULE].encode())} if self.blobs is None else self.blobs
        lines = [
            "schema = 1",
            'identity = { name = "A Tester", email = "tester@example.invalid" }',
            '[targets."fake/v9"]',
            "default = true",
            'project = "fake"',
            'repository = "https://example.invalid/fake"',
            f'commit = "{self.commit}"',
            'tag = "v9"',
            'package = "nemo_automodel"',
            f'landmark = "{MODULE}"',
            'series = "fake/v9"',
            'suite = "contracts"',
            self.extra,
            '[targets."fake/v9".wheel]',
            'distribution = "nemo-automodel"',
            'version = "9.9.9"',
            f'filename = "{self.wheel.name}"',
            f'sha256 = "{digest}"',
            f'[targets."fake/v9".blobs]\n{_table(blobs)}',
        ]
        for patch in self.patches:
            lines += ['[[targets."fake/v9".patches]]', _table(patch)]
        for contract, stock in self.contracts.items():
            lines += [f'[targets."fake/v9".contracts."{contract}"]', f"stock = {stock}"]
        return "\n".join(lines) + "\n"

    def command(self, *arguments: str) -> list[str]:
        """Return the command line."""
        command = [sys.executable, "-m", "ci.regress", "--patches", str(self.root / "patches")]
        command += ["--contracts", str(self.root / "contracts"), "--wheel-cache", str(self.root / "cache")]
        return [*command, "--report-dir", str(self.root / "reports"), *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment in which pip knows only the project's own wheel."""
        temporary = self.root / "tmp"
        temporary.mkdir(exist_ok=True)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTEST_"))}
        return (
            clean
            | {
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(self.wheel.parent),
                "PIP_CONFIG_FILE": os.devnull,
                "TMPDIR": str(temporary),
            }
            | more
        )

    def fill_cache(self) -> None:
        """Put the wheel into the cache, which saves a start of pip."""
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        place = self.root / "cache" / digest / self.wheel.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(self.wheel.read_bytes())

    def run(self, *arguments: str, written: bool = False, cached: bool = True, **environment: str) -> Result:
        """Run the command to its end, and check that it left nothing in the temporary directory."""
        if not written:
            self.write()
        if cached:
            self.fill_cache()
        done = subprocess.run(
            self.command(*arguments),
            cwd=REPOSITORY,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if "--keep" not in arguments:
            assert os.listdir(self.root / "tmp") == [], done.stdout + done.stderr
        return Result(done.returncode, done.stdout, done.stderr, self.root / "reports")


def _table(values: dict[str, Any]) -> str:
    return "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in values.items())


def write_files(root: Path, files: dict[str, str]) -> None:
    """Write files below a directory."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root.mkdir(parents=True, exist_ok=True)


def git(cwd: Path, *arguments: str) -> str:
    """Run git as a tester, without anybody's configuration."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment = clean | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.invalid"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout

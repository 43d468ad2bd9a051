# SPDX-License-Identifier: Apache-2.0
"""Upstream's own tests before and after a series: what counts as broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import upstream
from tests.pipeline.project import PACKAGE, Project, git, write_files

IMPORT = "import pytest\nfrom nemo_automodel.components.moe import experts\n\n\n"
TESTS = IMPORT + (
    "def test_fine():\n    assert experts.fine()\n\n\n"
    "def test_half():\n    assert experts.gradient() == 0.5\n\n\n"
    "def test_red():\n    assert experts.first() == 9\n\n\n"
    "@pytest.mark.skip\ndef test_skipped():\n    pass\n"
)


@pytest.fixture
def clone(cured: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the tiny project and unit tests, pinned in series.toml."""
    tree = cured.root / "clone"
    write_files(tree, {**PACKAGE, "tests/unit_tests/moe/test_experts.py": TESTS})
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "upstream")
    cured.commit = git(tree, "rev-parse", "HEAD").strip()
    monkeypatch.setattr(upstream, "PATCHES", cured.root / "patches")
    monkeypatch.setattr(upstream, "OUTPUT", cured.root / "reports")
    return tree


def run(clone: Path) -> int:
    return upstream.main(["--git", str(clone), "--workers", "1", "tests/unit_tests"])


def test_what_the_series_breaks_is_named(cured: Project, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cured.write()
    assert run(clone) == 1
    out = capsys.readouterr().out
    assert "before: 2 passed, 1 skipped, 1 failed" in out
    assert "after: 1 passed, 1 skipped, 2 failed" in out
    assert "test_half: passed before, failed after" in out
    assert "test_red" not in out


def test_same_set_before_and_after(cured: Project, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cured.series / cured.patches.pop()["file"]).unlink()
    git(cured.root / "made", "reset", "-q", "--hard", "HEAD~1")
    cured.contracts.pop("gather.gradient")
    cured.add_patch("return 4", "return 44", [])
    cured.write()
    assert run(clone) == 0, capsys.readouterr().out
    assert "after: 2 passed, 1 skipped, 1 failed" in capsys.readouterr().out


def test_no_tests_is_an_error(cured: Project, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cured.write()
    assert upstream.main(["--git", str(clone), "--workers", "1", "tests/unit_tests/nothing"]) == 2
    assert "pytest ended with exit status" in capsys.readouterr().err

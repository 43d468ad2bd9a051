# SPDX-License-Identifier: Apache-2.0
"""A series on another commit: what merges, what must be adapted, what is taken, and what is said of the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci import porting, series
from ci.regress import PATCHES, REPOSITORY, manifest, worktree
from ci.regress.manifest import Identity
from tests.pipeline.project import MODULE, PACKAGE, STOCK, Project, git, write_files

LOADED = manifest.load(PATCHES)


@pytest.fixture
def port(cured: Project) -> porting.Port:
    """A second release beside the one that the series ``cure 1`` was made for."""
    cured.add_patch("return 4", "return 44", [], name="last")
    return cured


def put(project: Project, text: str | None, adaptations: Path | None = None) -> tuple[list[porting.Ported], Path]:
    """Put the project's series on a release with other text in its module (None: without it)."""
    work = project.root / "work"
    runner = worktree.Git(work / "home", Identity(name="A Tester", email="tester@example.invalid"))
    write_files(work / "source", PACKAGE)
    worktree.commit_all(runner, work / "source", "one")
    files = sorted(project.series.glob("*.patch"))
    commits = porting.series_commits(runner, work / "source", files)
    write_files(work / "tree", {**PACKAGE, MODULE: text or "", "other.py": ""})
    if text is None:
        (work / "tree" / MODULE).unlink()
    worktree.commit_all(runner, work / "tree", "two")
    made = porting.Port(runner, work / "tree", work / "source", adaptations)
    return porting.port_series(made, commits, files, set(), lambda result: None), work / "tree"


@pytest.mark.parametrize(
    ("text", "outcomes"),
    [
        (STOCK, ["applies", "applies"]),
        ("# moved\n" * 9 + STOCK, ["applies with offset", "applies with offset"]),
        (STOCK.replace("def second()", "def second(x=0)"), ["merges", "applies"]),
        (STOCK.replace("return 0.5", "return 1.0"), ["taken", "applies"]),
        (STOCK.replace("return 0.5", "return 0.25"), ["conflict", "applies"]),
        (None, ["conflict", "conflict"]),
    ],
)
def test_outcomes(port: Project, text: str | None, outcomes: list[str]) -> None:
    results, tree = put(port, text)
    assert [result.outcome for result in results] == outcomes
    made = [line for line in git(tree, "log", "--format=%s", "--reverse").splitlines() if line != "two"]
    kept = [name for name, outcome in zip(("cure 1", "last 2"), outcomes, strict=True) if outcome[0] in "am"]
    assert made == kept
    assert git(tree, "status", "--porcelain") == ""


def test_conflict_shows_both_sides(port: Project) -> None:
    (first, _), _ = put(port, STOCK.replace("return 0.5", "return 0.25"))
    assert first.conflicts == {MODULE: [("    return 0.25\n", "    return 1.0\n")]}


def test_adaptation(port: Project) -> None:
    adaptations = port.root / "adaptations"
    adaptations.mkdir()
    (adaptations / "cure.diff").write_text(f"""\
another subject

Another reason.

diff --git a/{MODULE} b/{MODULE}
--- a/{MODULE}
+++ b/{MODULE}
@@ -6,9 +6,5 @@
 
 
 def gradient():
-<<<<<<< this tree
-    return 0.25
-=======
-    return 1.0
->>>>>>> the patch
+    return 0.75
 
""")
    results, tree = put(port, STOCK.replace("return 0.5", "return 0.25"), adaptations)
    assert [result.outcome for result in results] == ["adapted", "applies"]
    assert "return 0.75" in (tree / MODULE).read_text()
    assert git(tree, "log", "-1", "--format=%B", "HEAD~1").strip() == "another subject\n\nAnother reason."


def test_adaptation_that_the_series_has_left_behind(port: Project) -> None:
    adaptations = port.root / "adaptations"
    adaptations.mkdir()
    (adaptations / "cure.diff").write_text(
        f"diff --git a/{MODULE} b/{MODULE}\n--- a/{MODULE}\n+++ b/{MODULE}\n@@ -1,1 +1,1 @@\n-gone\n+here\n"
    )
    results, tree = put(port, STOCK.replace("return 0.5", "return 0.25"), adaptations)
    assert [result.outcome for result in results] == ["stale", "applies"]
    for word in (f"{MODULE}  @@ -1,1 +1,1 @@", "-gone", "the tree has there:", "Experts."):
        assert word in results[0].stale
    assert git(tree, "status", "--porcelain", "--ignored") == ""


def test_file_that_the_other_release_does_not_have(port: Project) -> None:
    adaptations = port.root / "adaptations"
    adaptations.mkdir()
    for name in ("cure", "last"):
        (adaptations / f"{name}.diff").write_text(
            f"left out: {MODULE}\ndiff --git a/other.py b/other.py\n--- a/other.py\n+++ b/other.py\n"
            + ("@@ -0,0 +1 @@\n+CURED = True\n" if name == "cure" else "@@ -1 +1,2 @@\n CURED = True\n+LAST = True\n")
        )
    results, tree = put(port, None, adaptations)
    assert [result.outcome for result in results] == ["adapted", "adapted"]
    assert (tree / "other.py").read_text() == "CURED = True\nLAST = True\n"


def test_blob_ids_are_read_from_the_series(port: Project) -> None:
    expected = git(port.root / "made", "rev-parse", f"HEAD~2:{MODULE}").strip()
    file = port.root / "full.patch"
    file.write_text(git(port.root / "made", "format-patch", "--full-index", "--stdout", "HEAD~2"))
    assert series.blobs_before(file)[MODULE] in (
        expected,
        git(port.root / "made", "rev-parse", f"HEAD~1:{MODULE}").strip(),
    )


DERIVED = [
    name
    for name, target in LOADED.targets.items()
    if target.like is not None and target.wheel is not None and target.series != LOADED.targets[target.like].series
]


def test_there_are_derived_series() -> None:
    assert {"automodel/v0.4.0", "automodel/v0.6.0", "automodel/v0.7.0"} <= set(DERIVED)


@pytest.mark.parametrize("name", DERIVED)
def test_series_is_what_the_other_one_and_its_adaptations_give(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ci.series", "check", "--target", name], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr

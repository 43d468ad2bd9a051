# SPDX-License-Identifier: Apache-2.0
"""series.toml: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.regress import manifest
from ci.regress.errors import ManifestError, UsageError
from ci.regress.manifest import Expectation
from tests.pipeline.project import CONTRACT, GUARD, HALF, Project

WHERE = 'targets."fake/v9"'


def refused(project: Project, old: str = "", new: str = "") -> str:
    """Return what is said about the file after a replacement."""
    project.write()
    path = project.root / "patches" / "series.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ManifestError) as caught:
        manifest.load(path.parent)
    return str(caught.value)


def test_expectations_are_derived(cured: Project) -> None:
    cured.declare("left.open", HALF)
    cured.write()
    name, target = manifest.load(cured.root / "patches").select(None)
    assert name == "fake/v9"
    assert target.expectation("gather.gradient") is Expectation.FIXED
    assert target.expectation("guard.fine") is Expectation.GUARD
    assert target.expectation("left.open") is Expectation.OPEN


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 2", "schema: Input should be 1 (it is 2)"),
        ("schema = 1", "", "schema: missing"),
        ("schema = 1", "schema = 1\nextra = 1", "extra: unknown key"),
        ('tag = "v9"', 'tag = "v9"\ntags = "v9"', f"{WHERE}.tags: unknown key"),
        ('version = "9.9.9"', 'version = "9.9.9"\nhash = "x"', f"{WHERE}.wheel.hash: unknown key"),
        ('"status" = "proposed"', '"status" = "sent"', f"{WHERE}.patches[0].status: Input should be 'proposed'"),
        ('"reason" = "it is wrong"', '"reason" = " "', f"{WHERE}.patches[0].reason: String should have at least"),
        ('"reason" = ', '"raison" = ', f"{WHERE}.patches[0].raison: unknown key"),
        ("commit = ", "commit = 1 #", f"{WHERE}.commit: Input should be a valid string (it is 1)"),
        ('"cures" = ["gather.gradient"]', '"cures" = ["gather.other"]', "contract 'gather.other' is not declared"),
        ('"cures" = ["gather.gradient"]', '"cures" = ["guard.fine"]', "0001-cure.patch claims to cure it"),
        (
            '"cures" = ["gather.gradient"]',
            '"cures" = ["gather.gradient", "gather.gradient"]',
            "a contract is named twice",
        ),
        (f"stock = {HALF}", 'stock = "red"', """contracts."gather.gradient".stock: Input should be 'green'"""),
        (f"stock = {HALF}", 'stock = { raises = "A" }', "stock: `raises` needs `match` or `measured`"),
        (f"stock = {HALF}", "stock = {}", "stock: needs `raises` or `measured`"),
        (f"stock = {HALF}", 'stock = { measured = "x" }', "stock: `measured` needs `min` or `max`"),
        (f"stock = {HALF}", 'stock = { measured = "x", min = 2, max = 1 }', "stock: `min` is greater than `max`"),
        (f"stock = {HALF}", 'stock = { raises = "A", match = "(" }', "stock.match: is not a regular expression"),
        (f"stock = {HALF}", 'stock = { raises = "A", match = "x", max = 1 }', "`min` and `max` need `measured`"),
        (f"stock = {HALF}", 'stock = { match = "x", measured = "x", max = 1 }', "`match` needs `raises`"),
        (f"stock = {HALF}", 'stock = { raise = "A" }', 'contracts."gather.gradient".stock.raise: unknown key'),
        ('series = "fake/v9"', 'series = "../v9"', f"{WHERE}.series: must be a relative path"),
        ("schema = 1", "schema = ", "patches/series.toml: not TOML"),
    ],
)
def test_refused(cured: Project, old: str, new: str, said: str) -> None:
    assert said in refused(cured, old, new)


def test_two_defaults(cured: Project) -> None:
    cured.write()
    path = cured.root / "patches" / "series.toml"
    text = path.read_text()
    second = text[text.index("[targets.") :].replace("fake/v9", "fake/v10")
    second = second.replace('series = "fake/v10"', 'series = "fake/v9"')
    path.write_text(text + second)
    with pytest.raises(ManifestError, match="more than one default target: fake/v9, fake/v10"):
        manifest.load(path.parent)


@pytest.mark.parametrize(
    "files", [["0002-a.patch"], ["0001-a.patch", "0003-b.patch"], ["0002-a.patch", "0001-b.patch"]], ids="_".join
)
def test_numbers_have_no_gap_and_are_in_order(project: Project, files: list[str]) -> None:
    project.patches = [{"file": file, "status": "proposed", "reason": "r", "cures": []} for file in files]
    assert "patches are numbered from 0001 without gaps" in refused(project)


def test_absent_patch_is_not_refused(cured: Project) -> None:
    (cured.series / "0001-cure.patch").unlink()
    cured.write()
    _, target = manifest.load(cured.root / "patches").select(None)
    assert [patch.file for patch in manifest.absent_patches(target, cured.root / "patches")] == ["0001-cure.patch"]


@pytest.mark.parametrize("place", ["fake/v9/0002-more.patch", "fake/0001-cure.patch", "fake/v8/0001-cure.patch"])
def test_unlisted_patch(cured: Project, place: str) -> None:
    path = cured.root / "patches" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a patch")
    assert f"{place} lies there but no target lists it" in refused(cured)


def test_every_problem_is_named_at_once(project: Project) -> None:
    project.extra = 'one = 1\ntwo = "2"'
    said = refused(project)
    assert f"{WHERE}.one: unknown key" in said
    assert f"{WHERE}.two: unknown key" in said


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"series\.toml: cannot be read: No such file"):
        manifest.load(tmp_path)


def test_select(project: Project) -> None:
    project.tests = {"test_a.py": CONTRACT, "test_b.py": GUARD}
    project.write()
    path = project.root / "patches" / "series.toml"
    with pytest.raises(UsageError, match=r"--target fake/v8: not in series\.toml; known: fake/v9"):
        manifest.load(path.parent).select("fake/v8")
    path.write_text(path.read_text().replace("default = true", "default = false"))
    with pytest.raises(UsageError, match="no target has `default = true`"):
        manifest.load(path.parent).select(None)

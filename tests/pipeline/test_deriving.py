# SPDX-License-Identifier: Apache-2.0
"""Series that are made from another one: written by one command, and what it cannot make told all at once."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ci import deriving, porting, series
from ci.regress import manifest
from ci.regress.errors import ManifestError
from ci.regress.fetch import blob_id
from tests.pipeline.project import MODULE, STOCK, Project, git, write_files

SECOND = STOCK.replace("return 0.5", "return 0.25")
ADAPTATION = f"""\
diff --git a/{MODULE} b/{MODULE}
--- a/{MODULE}
+++ b/{MODULE}
@@ -6,11 +6,7 @@ def first():
 
 
 def gradient():
-<<<<<<< this tree
-    return 0.25
-=======
-    return 1.0
->>>>>>> the patch
+    return 0.75
 
 
 def second():
"""
TARGETS = """
[targets."fake/v10"]
like = "fake/v9"
tag = "v10"
commit = "{commit}"
series = "fake/v10"
[targets."fake/v10".blobs]
[targets."fake/v11"]
like = "fake/v10"
tag = "v11"
commit = "{commit}"
series = "fake/v11"
[targets."fake/v11".blobs]
"""


CURE = ("return 0.5", "return 1.0", "cure")
LAST = ("return 4", "return 44", "last")


@pytest.fixture
def project(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The tiny project without contracts, whose patch directory the command works on."""
    project.contracts.clear()
    project.tests.clear()
    monkeypatch.setattr(series, "PATCHES", project.root / "patches")
    monkeypatch.setattr(series, "REPOSITORY", project.root)
    monkeypatch.setattr(porting, "WHEEL_CACHE", project.root / "cache")
    return project


def write(project: Project, *patches: tuple[str, str, str]) -> None:
    """Write three releases: the first with a series, the others, in git only, with other text in its place."""
    shutil.rmtree(project.root / "made", ignore_errors=True)
    shutil.rmtree(project.series, ignore_errors=True)
    project.patches.clear()
    for number, (old, new, name) in enumerate(patches, start=1):
        file = project.add_patch(old, new, [], name=name)
        project.patches[-1]["file"] = f"{number:04d}-{name}-{number}.patch"  # as git names it after its subject
        file.rename(project.series / project.patches[-1]["file"])
    project.write()
    project.fill_cache()
    clone = project.root / "clone"
    if not clone.exists():
        write_files(clone, {MODULE: SECOND})
        git(clone, "init", "-q")
        git(clone, "add", "-A")
        git(clone, "commit", "-q", "-m", "second release")
    file = project.root / "patches" / "series.toml"
    file.write_text(file.read_text() + TARGETS.format(commit=git(clone, "rev-parse", "HEAD").strip()))


def adapt(project: Project, text: str, name: str = "cure-1") -> Path:
    """Write an adaptation for the second release."""
    place = project.root / "patches" / "fake" / "v10" / "adaptations"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.diff").write_text(text)
    return place / f"{name}.diff"


def files(project: Project, release: str) -> dict[str, str]:
    """Patch files of a release."""
    place = project.root / "patches" / "fake" / release
    return {file.name: file.read_text() for file in sorted(place.glob("*.patch"))}


def run(project: Project, *arguments: str) -> int:
    """Run the command with a clone."""
    return series.main([*arguments, "--git", str(project.root / "clone")])


def test_one_command_makes_all(project: Project) -> None:
    write(project, CURE, LAST)
    adaptation = adapt(project, ADAPTATION)
    assert run(project, "check") == 1
    assert run(project, "derive") == 0
    made = files(project, "v10")
    assert list(made) == ["0001-cure-1.patch", "0002-last-2.patch"]
    assert "+    return 0.75" in made["0001-cure-1.patch"]
    assert files(project, "v11") == made
    assert run(project, "check") == 0
    loaded = manifest.load(project.root / "patches")
    assert deriving.derived(loaded) == ["fake/v10", "fake/v11"]
    assert loaded.targets["fake/v11"].blobs == loaded.targets["fake/v10"].blobs == {MODULE: blob_id(SECOND.encode())}

    # The first series loses a patch: numbers move, and files that no target lists any more go.
    write(project, LAST)
    adaptation.unlink()
    with pytest.raises(ManifestError, match=r"v10/0001-cure-1\.patch lies there but no target lists it"):
        manifest.load(project.root / "patches")
    assert run(project, "derive") == 0
    assert list(files(project, "v10")) == list(files(project, "v11")) == ["0001-last-1.patch"]
    assert run(project, "check") == 0


def test_all_that_cannot_be_made_is_told_at_once(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, CURE, LAST)
    adapt(project, ADAPTATION)
    assert run(project, "derive") == 0
    before = files(project, "v10"), files(project, "v11")

    write(project, ("return 0.5", "return 2.0", "cure"), ("return 1", "return 11", "first"), LAST)
    adapt(project, "left out: nowhere\n", name="gone-9")
    (project.root / "clone" / MODULE).write_text(SECOND.replace("return 1", "return 9"))
    git(project.root / "clone", "commit", "-q", "-a", "-m", "moved")
    file = project.root / "patches" / "series.toml"
    head, table, rest = file.read_text().partition('[targets."fake/v10"]')
    commit = git(project.root / "clone", "rev-parse", "HEAD").strip()
    file.write_text(head + table + re.sub('commit = "[0-9a-f]+"', f'commit = "{commit}"', rest))
    capsys.readouterr()
    assert run(project, "derive") == 1
    said = capsys.readouterr().err
    for words in (
        "fake/v10 is left as it is:\n",
        "  cure-1: its adaptation no longer applies\n",
        f"  {MODULE}  @@ -6,11 +6,7 @@ def first():\n  the rejected hunk:\n",
        "    -    return 1.0\n",
        "       12      return 2.0\n",
        f"  first-2: cannot be merged\n    {MODULE}\n      -    return 9\n      +    return 11\n",
        "  adaptations/gone-9.diff: fake/v9 has no patch of this name for fake/v10\n",
        "`python -m ci.series adapt --target fake/v10 --patch NAME --work DIR` makes an adaptation, or",
        "fake/v11: not tried, since fake/v10 failed\n",
    ):
        assert words in said
    assert "last-3" not in said
    assert (files(project, "v10"), files(project, "v11")) == before


def test_adapting(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, CURE, LAST)
    file = adapt(project, f"fix: another subject\n\nAnother reason.\n\n{ADAPTATION.replace('0.25', '0.125')}")
    work = project.root / "work"
    command = ("adapt", "--target", "fake/v10", "--patch", "cure-1", "--work", str(work))
    assert run(project, *command) == 0
    assert f"{work}/tree/{MODULE}: 1 place with conflict marks" in capsys.readouterr().out
    assert (work / "tree" / f"{MODULE}.rej").is_file()
    assert run(project, *command) == 2
    assert f"conflict marks are left in {MODULE}" in capsys.readouterr().err
    (work / "tree" / MODULE).write_text(SECOND.replace("return 0.25", "return 0.75"))
    assert run(project, *command) == 0
    assert file.read_text() == f"fix: another subject\n\nAnother reason.\n\n{ADAPTATION}"
    project.patches[0]["file"] = "0001-fix-another-subject.patch"
    table = '[targets."fake/v10".revised]\n"cure-1" = { name = "fix-another-subject" }\n'
    toml = project.root / "patches" / "series.toml"
    toml.write_text(toml.read_text().replace('[targets."fake/v11"]', f'{table}[targets."fake/v11"]'))
    assert run(project, "derive") == 0
    assert list(files(project, "v10")) == ["0001-fix-another-subject.patch", "0002-last-2.patch"]
    assert run(project, "check", "--target", "fake/v10") == 0


@pytest.mark.parametrize(
    ("target", "patch", "said"),
    [
        ("fake/v9", "cure-1", "fake/v9 is not derived from another target"),
        ("fake/v10", "no", "--patch no: fake/v9 has no such patch for fake/v10"),
        ("fake/v8", "cure-1", "--target fake/v8: not in series.toml"),
    ],
)
def test_nothing_to_adapt(
    project: Project, target: str, patch: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, CURE)
    work = project.root / "work"
    assert run(project, "adapt", "--target", target, "--patch", patch, "--work", str(work)) == 2
    assert said in capsys.readouterr().err

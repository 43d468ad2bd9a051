# SPDX-License-Identifier: Apache-2.0
"""The series on a tree: what does not apply, and what is shown of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.regress import worktree
from ci.regress.manifest import Identity
from tests.pipeline.project import MODULE, STOCK, Project, git, write_files


def test_patch_that_does_not_apply(cured: Project) -> None:
    cured.files[MODULE] = STOCK.replace("return 0.5", "return 0.5 * scale")
    result = cured.run()
    assert result.status == 2
    assert "0001-cure.patch does not apply with `git am`:" in result.err
    assert f"error: patch failed: {MODULE}:6" in result.err
    assert f"{MODULE}  @@ -6,7 +6,7 @@" in result.err
    for line in ("-    return 0.5", "+    return 1.0", "   9      return 0.5 * scale", "the tree has there:"):
        assert line in result.err
    assert "make the patch for this tree anew" in result.err
    assert not (cured.root / "reports" / "report.json").exists()


def test_only_the_hunks_that_fail_are_shown_where_the_code_moved(cured: Project) -> None:
    text = cured.series / "0001-cure.patch"
    made = cured.root / "made"
    git(made, "reset", "-q", "--hard", "HEAD~1")
    padding = "".join(f"\n\ndef pad_{number}():\n    return {number}\n" for number in range(10))
    base = STOCK + padding
    (made / MODULE).write_text(base)
    git(made, "commit", "-q", "-a", "-m", "longer")
    (made / MODULE).write_text(base.replace("return 0.5", "return 1.0").replace("return 8\n", "return 88\n"))
    git(made, "commit", "-q", "-a", "-m", "two hunks")
    text.write_text(git(made, "format-patch", "--stdout", "-1"))
    cured.files[MODULE] = base.replace("Experts.", "Experts.\n\nMoved down.").replace("return 8\n", "return eight\n")
    result = cured.run()
    assert result.status == 2
    assert "+    return 88" in result.err
    assert "+    return 1.0" not in result.err
    assert "return eight" in result.err
    number = cured.files[MODULE].splitlines().index("    return eight") + 1
    assert f"{number}      return eight" in result.err


def test_patch_for_a_file_that_is_not_there(cured: Project) -> None:
    patch = cured.series / "0001-cure.patch"
    patch.write_text(patch.read_text().replace("experts.py", "gone.py"))
    result = cured.run()
    assert result.status == 2
    assert "0001-cure.patch does not apply" in result.err
    assert "gone.py: does not exist in index" in result.err


def test_patch_that_is_no_patch(cured: Project) -> None:
    (cured.series / "0001-cure.patch").write_text("hello\n")
    result = cured.run()
    assert result.status == 2
    assert "0001-cure.patch does not apply" in result.err
    assert "Patch format detection failed" in result.err


def test_pinned_release_that_holds_the_patch_already(cured: Project) -> None:
    cured.files[MODULE] = STOCK.replace("return 0.5", "return 1.0")
    result = cured.run()
    assert result.status == 2
    assert "the tree already holds all of what this patch does" in result.err
    assert "set its status to `taken`" in result.err


def test_second_patch_builds_on_the_first(cured: Project) -> None:
    cured.add_patch("return 1.0", "return 2.0 / 2", [], "again")
    result = cured.run()
    assert result.status == 0, result.out + result.err
    assert "patched: 2 of 2 patches applied" in result.out
    again = cured.run(written=True)
    assert again.report.sides[1].commit == result.report.sides[1].commit


def test_absent_patch_fails_the_run(cured: Project) -> None:
    (cured.series / "0001-cure.patch").unlink()
    result = cured.run()
    assert result.status == 1
    warning = "listed in patches/series.toml but not there: patches/fake/v9/0001-cure.patch"
    assert result.out.count(warning) == 2
    assert result.verdict("gather.gradient") == "open"
    assert "0001-cure.patch claims to cure it" in result.notes("gather.gradient")
    assert result.report.warnings == [warning]
    assert [patch.outcome for patch in result.report.patches] == ["absent"]


def test_reverted_hunk_fails_the_run(cured: Project) -> None:
    """A patch that applies but has lost the lines that cure."""
    made = cured.root / "made"
    git(made, "reset", "-q", "--hard", "HEAD~1")
    (made / MODULE).write_text(STOCK.replace("return 4", "return 44"))
    git(made, "commit", "-q", "-a", "-m", "without the cure")
    (cured.series / "0001-cure.patch").write_text(git(made, "format-patch", "--stdout", "-1"))
    result = cured.run()
    assert result.status == 1
    assert result.verdict("gather.gradient") == "open"
    assert "not as declared: gather.gradient" in result.out


def test_empty_series(project: Project) -> None:
    result = project.run()
    assert result.status == 0, result.out + result.err
    assert "patched: 0 of 0 patches applied" in result.out
    assert result.verdict("gather.gradient") == "open"


def test_unlisted_patch_file(cured: Project) -> None:
    (cured.series / "0002-stray.patch").write_text("x")
    result = cured.run()
    assert result.status == 2
    assert "fake/v9/0002-stray.patch lies there but no target lists it" in result.err


def test_no_git(cured: Project) -> None:
    empty = cured.root / "empty"
    empty.mkdir()
    result = cured.run(PATH=str(empty))
    assert result.status == 2
    assert "git is not on PATH" in result.err
    assert "install git" in result.err


def test_touched_files(tmp_path: Path) -> None:
    base = {"a/changed.py": "one\n-- a/x\n++ b/x\n", "a/removed.py": "to be removed\n", "a/old name.py": "1\n2\n3\n4\n"}
    write_files(tmp_path, base)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "base")
    # a removed and an added line that look like the names of files
    write_files(tmp_path, {"a/changed.py": "one\n++ b/y\n", "a/added.py": "something new\n"})
    (tmp_path / "a/removed.py").unlink()
    (tmp_path / "a/old name.py").rename(tmp_path / "a/new.py")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "all")
    patch = tmp_path / "p.patch"
    patch.write_text(git(tmp_path, "format-patch", "--stdout", "-1"))
    assert worktree.touched_files(patch) == {
        "a/changed.py": False,
        "a/removed.py": False,
        "a/added.py": True,
        "a/old name.py": False,
        "a/new.py": True,
    }


@pytest.mark.parametrize("size", [0, 3])
def test_commits_are_the_same_whoever_makes_them(tmp_path: Path, size: int) -> None:
    commits = set()
    for number in range(2):
        tree = tmp_path / str(number)
        write_files(tree, {f"f{index}": "x\r\n" for index in range(size)} | {".gitignore": "*\n", "kept.pyc": "x"})
        git_ = worktree.Git(tmp_path / f"home{number}", Identity(name="A", email="a@example.invalid"))
        commits.add(worktree.commit_all(git_, tree, "subject"))
        assert git_.run("show", "-s", "--format=%at %ct", cwd=tree).split() == ["946684800"] * 2
        assert git_.run("ls-files", cwd=tree).split().count("kept.pyc") == 1
    assert len(commits) == 1

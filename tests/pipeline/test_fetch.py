# SPDX-License-Identifier: Apache-2.0
"""Where a tree comes from: the wheel, a repository, a fork's own tree."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from ci.regress import fetch, manifest
from ci.regress.errors import FetchError
from ci.regress.fetch import blob_id
from tests.pipeline.project import MODULE, STOCK, Project, git, write_files


def digest_of_files(root: Path) -> dict[str, tuple[str, int]]:
    """Return the content and time of every file below a directory."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[path.relative_to(root).as_posix()] = (digest, path.stat().st_mtime_ns)
        else:
            found[path.relative_to(root).as_posix()] = ("", 0)
    return found


def make_repository(project: Project) -> Path:
    """Make the repository of the fake project, with a `tests` package of its own, and pin its first commit."""
    root = project.root / "upstream"
    write_files(root, project.files | {"tests/__init__.py": "raise RuntimeError('not ours')\n", "README": "hello\n"})
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "release")
    project.commit = git(root, "rev-parse", "HEAD").strip()
    (root / MODULE).write_text(STOCK.replace("0.5", "0.75"))
    git(root, "commit", "-q", "-a", "-m", "later")
    return root


# --- the wheel


def test_wheel_is_fetched_once_and_a_damaged_one_again(cured: Project) -> None:
    first = cured.run(cached=False)
    assert first.status == 0, first.out + first.err
    assert "nemo_automodel-9.9.9-py3-none-any.whl: fetched, sha256 verified" in first.out
    (kept,) = (cured.root / "cache").rglob("*.whl")
    away = cured.wheel.rename(cured.root / "away.whl")
    second = cured.run(written=True, cached=False)
    assert second.status == 0
    assert "in the cache, sha256 verified" in second.out
    kept.write_bytes(b"damaged")
    away.rename(cured.wheel)
    third = cured.run(written=True, cached=False)
    assert third.status == 0
    assert "the cached file is damaged" in third.out
    assert kept.read_bytes() == cured.wheel.read_bytes()
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_wrong_hash(cured: Project) -> None:
    cured.sha256 = "0" * 64
    result = cured.run(cached=False)
    assert result.status == 2
    assert "wrong hash: the registry's nemo-automodel==9.9.9 is not the wheel that series.toml pins" in result.err
    assert "Got" in result.err
    assert list((cured.root / "cache").rglob("*.whl")) == []
    assert not (cured.root / "reports" / "report.json").exists()


@pytest.mark.parametrize("way", ["refused", "unknown"])
def test_registry_out_of_reach(cured: Project, way: str) -> None:
    more = {"PIP_FIND_LINKS": ""}
    if way == "refused":
        more |= {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
        more |= {"PIP_RETRIES": "0", "PIP_TIMEOUT": "1"}
    result = cured.run(cached=False, **more)
    assert result.status == 2
    assert "nemo-automodel==9.9.9 could not be fetched: registry out of reach? pip says:" in result.err
    assert "No matching distribution found for nemo-automodel==9.9.9" in result.err
    assert "--git PATH-or-URL" in result.err
    assert "--tree PATH" in result.err


def test_no_pip(cured: Project) -> None:
    hide = cured.root / "hide"
    text = """
        import sys
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name == "pip":
                    raise ModuleNotFoundError("No module named 'pip'", name="pip")
        sys.meta_path.insert(0, Hide())
    """
    write_files(hide, {"sitecustomize.py": "\n".join(line[8:] for line in text.splitlines())})
    result = cured.run(cached=False, PYTHONPATH=str(hide))
    assert result.status == 2
    assert f"{sys.executable} has no pip to fetch nemo-automodel==9.9.9 with" in result.err.replace("\n", "")
    assert f"put {cured.wheel.name} at" in result.err


def test_no_wheel_at_all(cured: Project) -> None:
    cured.write()
    cured.wheel.write_bytes(b"no zip")
    digest = hashlib.sha256(b"no zip").hexdigest()
    series = cured.root / "patches" / "series.toml"
    lines = [f'sha256 = "{digest}"' if line.startswith("sha256") else line for line in series.read_text().splitlines()]
    series.write_text("\n".join(lines))
    result = cured.run(written=True)
    assert result.status == 2
    assert "not a wheel: File is not a zip file" in result.err


def test_wheel_with_another_package(cured: Project) -> None:
    cured.files = {name.replace("nemo_automodel", "other"): text for name, text in cured.files.items()}
    cured.blobs = {}
    result = cured.run()
    assert result.status == 2
    assert "holds no nemo_automodel/" in result.err


def test_member_outside_the_tree(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../evil.py", "")
    with pytest.raises(FetchError, match=r"member '\.\./evil\.py' would land outside"):
        fetch.unpack_wheel(wheel, tmp_path / "tree")


def test_wrong_blob_in_the_wheel(cured: Project) -> None:
    cured.blobs = {MODULE: "a" * 40, "nemo_automodel/gone.py": "b" * 40}
    result = cured.run()
    assert result.status == 2
    found = blob_id(STOCK.encode())
    assert "nemo_automodel-9.9.9-py3-none-any.whl is not v9 (commit 111111111):" in result.err
    assert f"{MODULE}: blob {found}, series.toml pins {'a' * 40}" in result.err
    assert f"nemo_automodel/gone.py: blob absent, series.toml pins {'b' * 40}" in result.err


def test_blob_id_is_what_git_says(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb\n\xff")
    said = git(tmp_path, "hash-object", "--no-filters", "file").strip()
    assert blob_id((tmp_path / "file").read_bytes()) == said


# --- a repository


@pytest.mark.parametrize("form", ["path", "url"])
def test_repository_is_only_read(cured: Project, form: str) -> None:
    upstream = make_repository(cured)
    before = digest_of_files(upstream)
    where = str(upstream) if form == "path" else upstream.as_uri()
    result = cured.run("--git", where)
    assert result.status == 0, result.out + result.err
    assert digest_of_files(upstream) == before
    assert result.report.source.kind == "git"
    assert result.report.source.commit == cured.commit
    assert result.verdict("gather.gradient") == "fixed"
    assert f"tree: fake v9 (commit {cured.commit[:9]}), from {where}" in result.out


def test_commit_that_cannot_be_fetched_alone(cured: Project) -> None:
    upstream = make_repository(cured)
    real = shutil.which("git")
    script = f'#!/bin/sh\ncase "$*" in *--depth=1*) echo "not our ref" >&2; exit 128;; esac\nexec {real} "$@"\n'
    write_files(cured.root / "bin", {"git": script})
    (cured.root / "bin" / "git").chmod(0o755)
    result = cured.run("--git", str(upstream), PATH=f"{cured.root / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert result.status == 0, result.out + result.err
    assert "the commit cannot be fetched alone; fetching all branches and tags" in result.out
    assert result.verdict("gather.gradient") == "fixed"


def test_wrong_blob_in_a_repository(cured: Project) -> None:
    upstream = make_repository(cured)
    cured.blobs = {MODULE: "a" * 40}
    result = cured.run("--git", str(upstream))
    assert result.status == 2
    assert f"--git {upstream} is not v9" in result.err
    assert f"{MODULE}: blob {blob_id(STOCK.encode())}, series.toml pins" in result.err


def test_repository_without_the_commit(cured: Project) -> None:
    upstream = make_repository(cured)
    cured.commit = "2" * 40
    result = cured.run("--git", str(upstream))
    assert result.status == 2
    assert f"does not hold commit {'2' * 40} (v9 of https://example.invalid/fake)" in result.err


@pytest.mark.parametrize("where", ["nothing", "plain"])
def test_no_repository(cured: Project, where: str) -> None:
    (cured.root / "plain").mkdir()
    result = cured.run("--git", str(cured.root / where))
    assert result.status == 2
    assert f"--git {cured.root / where}: " in result.err
    assert "does not appear to be a git repository" in result.err


def test_attributes_and_hooks_of_a_repository_have_no_say(cured: Project) -> None:
    upstream = cured.root / "upstream"
    make_repository(cured)
    (upstream / ".gitattributes").write_text("*.py text eol=crlf\n")
    git(upstream, "checkout", "-q", "HEAD~1")
    git(upstream, "add", ".gitattributes")
    git(upstream, "commit", "-q", "-m", "carriage returns")
    cured.commit = git(upstream, "rev-parse", "HEAD").strip()
    home = cured.root / "home"
    hook = home / "hooks" / "post-checkout"
    config = f"[core]\n\thooksPath = {home}/hooks\n\tautocrlf = true\n[am]\n\tthreeWay = true\n"
    write_files(home, {".gitconfig": config})
    write_files(home, {"hooks/post-checkout": f"#!/bin/sh\ntouch {home}/ran\n"})
    for name in ("applypatch-msg", "pre-applypatch", "pre-commit"):
        write_files(home, {f"hooks/{name}": f"#!/bin/sh\ntouch {home}/ran\nexit 1\n"})
    for path in hook.parent.iterdir():
        path.chmod(0o755)
    result = cured.run("--git", str(upstream), HOME=str(home), GIT_DIR=str(home / "nowhere"))
    assert result.status == 0, result.out + result.err
    assert not (home / "ran").exists()


# --- a fork's tree


@pytest.fixture
def fork(cured: Project) -> Path:
    """A fork's tree with a change of its own, links that lead nowhere or back, and leftovers."""
    root = cured.root / "fork"
    write_files(root, cured.files | {"README": "a fork\n", "nemo_automodel/__pycache__/x.pyc": "leftover"})
    (root / MODULE).write_text(STOCK.replace("return 4", "return 44"))
    (root / "nemo_automodel" / "loop").symlink_to(root, target_is_directory=True)
    (root / "nemo_automodel" / "dangling.py").symlink_to("nowhere.py")
    (root / "nemo_automodel" / "linked.py").symlink_to("__init__.py")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "fork")
    (root / MODULE).write_text(STOCK.replace("return 4", "return 444"))
    return root


def test_tree_as_it_stands(cured: Project, fork: Path) -> None:
    before = digest_of_files(fork)
    result = cured.run("--tree", str(fork))
    assert result.status == 0, result.out + result.err
    assert digest_of_files(fork) == before
    assert result.verdict("gather.gradient") == "open"
    assert result.verdict("guard.fine") == "guard"
    assert [side.side for side in result.report.sides] == ["as-is"]
    assert "as it stands" in result.out
    assert "with uncommitted changes" in result.report.source.commit
    assert [patch.outcome for patch in result.report.patches] == ["not applied"]


def test_tree_must_be_green_where_that_is_required(cured: Project, fork: Path) -> None:
    result = cured.run("--tree", str(fork), "--require-green")
    assert result.status == 1
    assert result.verdict("gather.gradient") == "open"
    assert "red, which --require-green does not admit: gather.gradient" in result.out
    assert "not as declared" not in result.out
    assert result.junit().get("failures") == "1"
    (fork / MODULE).write_text(STOCK.replace("0.5", "1.0"))
    assert cured.run("--tree", str(fork), "--require-green").status == 0


def test_tree_with_another_failure(cured: Project, fork: Path) -> None:
    (fork / MODULE).write_text(STOCK.replace("0.5", "0.75"))
    result = cured.run("--tree", str(fork))
    assert result.status == 1
    assert result.verdict("gather.gradient") == "broken"
    assert "gradient is 0.75" in result.notes("gather.gradient")


def test_series_on_a_tree(cured: Project, fork: Path) -> None:
    before = digest_of_files(fork)
    result = cured.run("--tree", str(fork), "--apply")
    assert result.status == 0, result.out + result.err
    assert digest_of_files(fork) == before
    assert result.verdict("gather.gradient") == "fixed"


def test_tree_that_holds_the_patch_already(cured: Project, fork: Path) -> None:
    (fork / MODULE).write_text((fork / MODULE).read_text().replace("0.5", "1.0"))
    result = cured.run("--tree", str(fork), "--apply")
    assert result.status == 0, result.out + result.err
    assert "0001-cure.patch: already in this tree, left out" in result.out
    assert result.verdict("gather.gradient") == "guard"
    assert "0001-cure.patch can go" in result.notes("gather.gradient")
    assert [patch.outcome for patch in result.report.patches] == ["already there"]


def test_files_outside_the_package_that_patches_touch(cured: Project, fork: Path) -> None:
    made = cured.root / "made"
    write_files(made, {"docs/guide.md": "before\n"})
    git(made, "add", "-A")
    git(made, "commit", "-q", "-m", "docs")
    cured.add_patch("before", "after", [], "docs", "docs/guide.md")
    write_files(fork, {"docs/guide.md": "before\n", "docs/other.md": "left out\n"})
    result = cured.run("--tree", str(fork), "--apply", "--keep")
    assert result.status == 0, result.out + result.err
    (kept,) = (cured.root / "tmp").iterdir()
    assert f"kept: {kept}" in result.out
    assert (kept / "stock" / "docs" / "guide.md").read_text() == "before\n"
    assert (kept / "patched" / "docs" / "guide.md").read_text() == "after\n"
    assert not (kept / "stock" / "docs" / "other.md").exists()
    assert not (kept / "stock" / "README").exists()
    assert not (kept / "stock" / "nemo_automodel" / "__pycache__").exists()
    assert not (kept / "stock" / "nemo_automodel" / "loop" / "nemo_automodel").exists()
    assert (kept / "stock" / "nemo_automodel" / "linked.py").is_file()
    assert not os.path.lexists(kept / "stock" / "nemo_automodel" / "dangling.py")


@pytest.mark.parametrize("place", [".", "nemo_automodel", "nowhere"])
def test_no_automodel_tree(cured: Project, place: str) -> None:
    other = cured.root / "other"
    write_files(other, {"nemo_automodel/__init__.py": ""})
    result = cured.run("--tree", str(other / place))
    assert result.status == 2
    if place == "nowhere":
        assert "no such directory" in result.err
    else:
        assert f"not a tree of fake: looked for {MODULE} in it" in result.err


def test_landmark_defaults_to_the_package(cured: Project, tmp_path: Path) -> None:
    cured.write()
    _, target = manifest.load(cured.root / "patches").select(None)
    plain = target.model_copy(update={"landmark": None})
    write_files(tmp_path / "t", {"nemo_automodel/__init__.py": ""})
    fetch.check_tree(tmp_path / "t", plain)

# SPDX-License-Identifier: Apache-2.0
"""docs/applying.md: its commands, in order, on a real work tree."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest, worktree

PAGE = (REPOSITORY / "docs" / "applying.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
LOADED = manifest.load(PATCHES)
_, TARGET = LOADED.select(None)
QUICK = "indexer.train-flag"


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fork, one commit away from the release, and this project beside it."""
    work = tmp_path_factory.mktemp("applying")
    git = worktree.Git(work / "home", LOADED.identity)
    tree = work / "my-fork"
    fetch.unpack_wheel(fetch.fetch_wheel(TARGET.wheel, WHEEL_CACHE, lambda line: None), tree)
    # The fork has moved some lines, and has taken the first patch already.
    experts = tree / "nemo_automodel/components/moe/experts.py"
    experts.write_text("# A fork.\n" + experts.read_text(encoding="utf-8"), encoding="utf-8")
    worktree.commit_all(git, tree, "fork")
    git.run("apply", str(PATCHES / TARGET.series / TARGET.patches[0].file), cwd=tree)
    git.run("add", "--all", cwd=tree)
    git.run("commit", "--quiet", "--message", "taken", cwd=tree)
    config = tree / "nemo_automodel/components/models/deepseek_v4/config.py"
    config.write_text("# A fork.\n" + config.read_text(encoding="utf-8"), encoding="utf-8")
    git.run("commit", "--quiet", "--all", "--message", "moved", cwd=tree)
    (work / "clone").symlink_to(REPOSITORY)
    return work


def run(command: str, where: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of the page; nox itself is replaced by what the session runs, so that nothing is installed."""
    command = command.replace("../", f"{where}/").replace(f'"$PWD"/{where}', str(where))
    session = re.match(r"nox -s (\w+) -- (.*)", command)
    if session:
        quick = f" --only {QUICK} --report-dir {where}/reports" if session[1] == "regress" else ""
        command = f"{shlex.quote(sys.executable)} -m ci.{session[1]} {session[2]}{quick}"
    identity = {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", LOADED.identity.name), ("EMAIL", LOADED.identity.email))
    }
    return subprocess.run(
        command, shell=True, cwd=REPOSITORY, env=os.environ | identity, capture_output=True, text=True
    )


def test_sessions_run_what_the_test_runs() -> None:
    text = (REPOSITORY / "noxfile.py").read_text(encoding="utf-8")
    for module in ("ci.regress", "ci.rebase", "ci.upstream"):
        assert f'"-m", "{module}", *' in text
        assert (REPOSITORY / module.replace(".", "/")).with_suffix(".py").is_file() or module == "ci.regress"


def test_commands_in_order(beside: Path) -> None:
    rebase, apply, regress, undo = COMMANDS
    done = run(rebase, beside)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = dict(
        reversed(line.rsplit(maxsplit=1)) for line in done.stdout.splitlines() if re.search(r"\s{2,}", line)
    )
    slugs = [patch.file[5:-6] for patch in TARGET.patches]
    assert list(outcomes) == slugs
    assert outcomes[slugs[0]].strip() == "taken"
    assert outcomes[slugs[1]].strip() == "applies with offset"
    before = subprocess.check_output(["git", "rev-parse", "HEAD^{tree}"], cwd=beside / "my-fork", text=True)
    done = run(apply, beside)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Applying: ") == len(TARGET.patches) - 1
    done = run(regress, beside)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"{re.escape(QUICK)} +green +guard", done.stdout)
    done = run(re.sub(r"HEAD~\d+", f"HEAD~{len(TARGET.patches) - 1}", undo), beside)
    assert done.returncode == 0, done.stdout + done.stderr
    after = subprocess.check_output(["git", "rev-parse", "HEAD^{tree}"], cwd=beside / "my-fork", text=True)
    assert after == before
    shutil.rmtree(beside / "moe-series")


def test_page_says_how_many_commits_the_series_has() -> None:
    assert COMMANDS[-1].endswith(f"HEAD~{len(TARGET.patches)}..HEAD")


def test_conflict_writes_nothing(beside: Path, tmp_path: Path) -> None:
    tree = tmp_path / "fork"
    shutil.copytree(beside / "my-fork", tree, symlinks=True)
    target = tree / "nemo_automodel/components/models/deepseek_v4/config.py"
    text = target.read_text(encoding="utf-8")
    assert "index_topk: int = 512," in text
    target.write_text(text.replace("index_topk: int = 512,", "index_topk: int = 256,"), encoding="utf-8")
    git = worktree.Git(tmp_path / "home", LOADED.identity)
    git.run("commit", "--quiet", "--all", "--message", "other", cwd=tree)
    done = subprocess.run(
        [sys.executable, "-m", "ci.rebase", "--git", tree, "--commit", "HEAD", "--out", tmp_path / "out"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "config.py, place 1 of 1; the tree has:" in done.stdout
    assert "index_topk: int = 256," in done.stdout
    assert "train_indexer: bool = False," in done.stdout
    assert not (tmp_path / "out").exists()

# SPDX-License-Identifier: Apache-2.0
"""The README and the documents: every command runs, every path and test exists, every figure is the data's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest, worktree

# What a run makes is held against a run, in tests/pipeline/test_extras.py and test_peers.py.
GENERATED = {REPOSITORY / "docs" / "grid.md", REPOSITORY / "docs" / "peers.md"}
# What is sent to other projects speaks of their trees: test_upstreaming.py.
UPSTREAMING = REPOSITORY / "docs" / "upstreaming"
SENT = set(UPSTREAMING.glob("*/*.md"))
PAGES = [REPOSITORY / "README.md", *sorted(set((REPOSITORY / "docs").rglob("*.md")) - GENERATED - SENT)]
LOADED = manifest.load(PATCHES)
NAME, TARGET = LOADED.select(None)

# A contract that is red on the release and takes no world of ranks.
QUICK = "indexer.train-flag"

# The two commands are run by .ci/run, word for word.
PREFIX = "python3 -m venv .venv && .venv/bin/python -m pip install -q nox && .venv/bin/nox -s "
TWO_COMMANDS = [PREFIX + "regress", PREFIX + "tests"]


def fenced(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """Contents of a page's fenced blocks of one language."""
    return fenced(page.read_text(encoding="utf-8"), language)


def commands_in(text: str) -> list[str]:
    """Every line of a console block that starts with the prompt."""
    return [line[2:] for block in fenced(text, "console") for line in block.splitlines() if line.startswith("$ ")]


def commands(page: Path) -> list[str]:
    """The commands of a page."""
    return commands_in(page.read_text(encoding="utf-8"))


# Those of docs/applying.md are run in their order by test_applying.py.
ALL_COMMANDS = sorted({command for page in PAGES if page.name != "applying.md" for command in commands(page)})
REGRESS = re.compile(r"(?:nox -s regress(?: -- )?|python -m ci\.regress ?)(.*)")
BY_HAND = re.compile(r"nox -s (grid|peers|bench-loader|search|mutants|torch-range)")


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git checkout with the release's files, as a fork has it, beside a checkout of this project."""
    work = tmp_path_factory.mktemp("journey")
    tree = work / "my-fork"
    fetch.unpack_wheel(fetch.fetch_wheel(TARGET.wheel, WHEEL_CACHE, lambda line: None), tree)
    worktree.commit_all(worktree.Git(work / "home", LOADED.identity), tree, "release")
    (work / "automodel-moe-regress").symlink_to(REPOSITORY)
    return tree


def shell(command: str, where: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of a page as its reader would."""
    identity = {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", LOADED.identity.name), ("EMAIL", LOADED.identity.email))
    }
    return subprocess.run(
        command, shell=True, cwd=where, env=os.environ | identity, capture_output=True, text=True, check=False
    )


def test_two_commands_are_those_of_ci() -> None:
    shown = [command for command in commands(REPOSITORY / "README.md") if command.startswith("python3 -m venv")]
    assert shown == TWO_COMMANDS
    lines = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("python3 -m venv")] == TWO_COMMANDS


def test_every_command_is_known_here() -> None:
    assert len(ALL_COMMANDS) >= 9
    known = [command for command in ALL_COMMANDS if command in TWO_COMMANDS]
    known += [command for command in ALL_COMMANDS if REGRESS.fullmatch(command)]
    known += [command for command in ALL_COMMANDS if command.startswith(("git ", "torchrun "))]
    known += [command for command in ALL_COMMANDS if BY_HAND.fullmatch(command)]
    assert sorted(known) == ALL_COMMANDS


def test_sessions_by_hand_are_there() -> None:
    named = [found[1] for command in ALL_COMMANDS if (found := BY_HAND.fullmatch(command))]
    assert named
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for name in named:
        assert re.search(rf"^[-*] {name}\b", listed, re.MULTILINE), name


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in ALL_COMMANDS
        if (found := REGRESS.fullmatch(command)) and found[1] and "--git" not in found[1]
    ],
)
def test_regress_command_runs(command: str, fork: Path, tmp_path: Path) -> None:
    arguments = shlex.split(REGRESS.fullmatch(command)[1])
    arguments = [str(fork) if argument == "../my-fork" else argument for argument in arguments]
    quick = [] if {"--list", "--help", "--only"} & set(arguments) else ["--only", QUICK]
    report = [] if "--help" in arguments else ["--report-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "ci.regress", *arguments, *quick, *report],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "--help" in arguments:
        assert "exit status" in done.stdout.lower()
    elif "--list" in arguments:
        assert set(TARGET.contracts) <= set(done.stdout.split())
    else:
        assert ("gather.gate-gradient" if "--only" in arguments else QUICK) in done.stdout
        assert ("open" if arguments[0] == "--tree" and "--apply" not in arguments else "fixed") in done.stdout


def test_torchrun_command_runs(fork: Path) -> None:
    """On the release as it is: what torchrun launched is red, and says so."""
    (command,) = (command for command in ALL_COMMANDS if command.startswith("torchrun "))
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, "-k", "gate_gradient"],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"PYTHONPATH": str(fork), "PYTEST_ADDOPTS": "-p no:cacheprovider"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "gate.weight.grad is None on ranks [0, 1] of 2" in done.stdout


def test_series_goes_on_and_comes_off_a_fork(fork: Path) -> None:
    *apply, undo = (command for command in commands(REPOSITORY / "README.md") if command.startswith("git "))
    assert undo.startswith("git revert")
    for command in apply:
        done = shell(command, fork)
        assert done.returncode == 0, done.stderr
    assert len(shell("git log --format=%s", fork).stdout.splitlines()) == 1 + len(TARGET.patches)
    changed = shell("git diff --name-only before-moe-patches", fork).stdout.splitlines()
    assert set(TARGET.blobs) <= set(changed)
    # A commit of the fork's own, later: it stays.
    (fork / "own.txt").write_text("ours\n", encoding="utf-8")
    assert shell("git add own.txt && git commit -q -m own", fork).returncode == 0
    undone = shell(undo, fork)
    assert undone.returncode == 0, undone.stderr
    assert shell("git diff --name-only before-moe-patches", fork).stdout.splitlines() == ["own.txt"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    checked = 0
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / path).exists(), path
        checked += 1
    for name in re.findall(r"`([^`\s]+)`", text):
        path, _, test = name.partition("::")
        if re.match(r"(patches|nemo_automodel_shim|tests|ci|docs)/", path):
            assert (REPOSITORY / path).exists(), path
            checked += 1
        if test:
            assert re.search(rf"^def {test}\(", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE), name
    assert checked >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_contracts_that_are_named_are_declared(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    families = sorted({contract.partition(".")[0] for contract in TARGET.contracts})
    named = set(re.findall(rf"\b((?:{'|'.join(families)})\.[a-z]+(?:-[a-z]+)+|smoke\.resume)\b", text))
    assert named
    assert named <= set(TARGET.contracts)


def test_design_names_every_contract_that_is_red_on_stock() -> None:
    text = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    red = [name for name, contract in TARGET.contracts.items() if contract.signature]
    assert [name for name in red if f"`{name}`" not in text] == []


def test_pins_in_the_text_are_the_datas() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"`([0-9a-f]{9,40})`", text)) <= {TARGET.commit, TARGET.commit[:9]}
    assert f"patches/{TARGET.series}/" in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_python_blocks_compile() -> None:
    found = [block for page in PAGES for block in blocks(page, "python")]
    assert found
    for block in found:
        compile(block, "page", "exec")

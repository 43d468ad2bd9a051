# SPDX-License-Identifier: Apache-2.0
"""The real release with a damaged series: each patch is needed, for the contracts that it claims and no others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest, worktree

NAME, TARGET = manifest.load(PATCHES).select(None)
# The contracts that take no world of eight ranks, and no GPU.
QUICK = [name for name in TARGET.contracts if not name.startswith(("smoke.", "failure.", "gather.nccl"))]


def run(patches: Path, directory: Path, contracts: list[str], *options: str) -> tuple[int, dict[str, Any], str]:
    """Run the pipeline on the release with the series of ``patches``; exit status, report, and what it printed."""
    only = [word for name in contracts for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "ci.regress", "--patches", patches, "--report-dir", directory, *only, *options],
        cwd=REPOSITORY,
        env=os.environ | {"GATHER_DEGREES": "2"},  # what a patch cures shows at one EP degree
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    report = directory / "report.json"
    return done.returncode, json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}, done.stdout


def copied(tmp_path: Path) -> Path:
    """A copy of the patch directory."""
    return Path(shutil.copytree(PATCHES, tmp_path / "patches"))


@pytest.mark.parametrize("patch", TARGET.patches, ids=lambda patch: patch.file[:4])
def test_without_a_patch_exactly_its_contracts_are_red(patch: manifest.Patch, tmp_path: Path) -> None:
    patches = copied(tmp_path)
    (patches / TARGET.series / patch.file).unlink()
    status, report, output = run(patches, tmp_path / "reports", QUICK)
    assert status == 1, output
    assert f"not there: patches/{TARGET.series}/{patch.file}" in output
    red = {row["id"] for row in report["contracts"] if row["sides"]["patched"]["state"] == "red"}
    still_open = {name for name in QUICK if TARGET.expectation(name) is manifest.Expectation.OPEN}
    assert red - still_open == set(patch.cures) & set(QUICK)
    assert {row["id"] for row in report["contracts"] if not row["ok"]} == set(patch.cures) & set(QUICK)


def test_shim_does_what_the_patches_do(tmp_path: Path) -> None:
    contracts = [*QUICK, *(name for name in TARGET.contracts if name.startswith("failure."))]
    status, report, output = run(PATCHES, tmp_path / "reports", contracts, "--with-shim")
    assert status == 0, output
    states = {row["id"]: {side: found["state"] for side, found in row["sides"].items()} for row in report["contracts"]}
    assert set(states) == set(contracts)
    assert all(found["installed"] == found["patched"] for found in states.values())
    assert sum(found["stock"] == "red" and found["installed"] == "green" for found in states.values()) >= 10


def test_empty_series_fails_the_run(tmp_path: Path) -> None:
    patches = copied(tmp_path)
    for patch in TARGET.patches:
        (patches / TARGET.series / patch.file).unlink()
    status, report, output = run(patches, tmp_path / "reports", ["indexer.frozen-by-default", "sparse.cold-save"])
    assert status == 1, output
    assert [row["verdict"] for row in report["contracts"]] == ["open", "open"]
    assert not any(row["as_declared"] for row in report["contracts"])


def test_reverted_hunk_fails_the_run(tmp_path: Path) -> None:
    patches = copied(tmp_path)
    (name,) = [patch.file for patch in TARGET.patches if "init.every-parameter" in patch.cures]
    file = patches / TARGET.series / name
    text = file.read_text(encoding="utf-8")
    sections = re.split(r"(?m)^(?=diff --git )", text)
    kept = [
        section
        for section in sections
        if not section.startswith("diff --git a/nemo_automodel/components/models/deepseek_v4/mtp.py")
    ]
    assert len(kept) == len(sections) - 1
    file.write_text("".join(kept), encoding="utf-8")
    status, report, output = run(patches, tmp_path / "reports", ["init.every-parameter"])
    assert status == 1, output
    (row,) = report["contracts"]
    assert row["sides"]["patched"]["state"] == "red"
    assert "9 parameters were not initialised" in row["sides"]["patched"]["headline"]


def test_hunk_that_does_not_fit_is_shown(tmp_path: Path) -> None:
    patches = copied(tmp_path)
    file = patches / TARGET.series / TARGET.patches[0].file
    text = file.read_text(encoding="utf-8")
    line = "            indices = _all_gather_dim0_var(indices, differentiable=False)"
    assert text.count(f"\n {line}\n") == 1
    file.write_text(text.replace(f"\n {line}\n", "\n             indices = gather(indices)\n"), encoding="utf-8")
    status, report, output = run(patches, tmp_path / "reports", ["gather.gate-gradient"])
    assert status == 2, output
    assert report == {}
    (header,) = [
        hunk for hunk in re.findall(r"(?m)^@@ [^@]+ @@", text) if line in text.split(hunk)[1].split("\n@@ ")[0]
    ]
    for word in (file.name, "nemo_automodel/components/moe/experts.py", header, line.strip()):
        assert word in output


def test_unit_tests_of_the_patches_pass_on_the_patched_tree(tmp_path: Path) -> None:
    loaded = manifest.load(PATCHES)
    git = worktree.Git(tmp_path / "home", loaded.identity)
    tree = tmp_path / "tree"
    fetch.unpack_wheel(fetch.fetch_wheel(TARGET.wheel, WHEEL_CACHE, lambda line: None), tree)
    worktree.commit_all(git, tree, "release")
    files = [PATCHES / TARGET.series / patch.file for patch in TARGET.patches]
    worktree.apply_series(git, tree, files, False, lambda line: None)
    added = [name for file in files for name in worktree.touched_files(file) if name.startswith("tests/unit_tests/")]
    assert len(added) == len(files)
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *added],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 28
    assert "skipped" not in done.stdout

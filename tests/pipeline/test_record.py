# SPDX-License-Identifier: Apache-2.0
"""patches/results.toml: the last run of each target, written by the run itself."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime

import pytest

from ci import targets
from ci.regress import PATCHES, manifest
from tests.pipeline.project import Project


def test_run_is_recorded_beside_the_others(cured: Project) -> None:
    cured.write()
    file = cured.root / "patches" / "results.toml"
    file.write_text('["other/v1"]\ndate = "2026-01-01"\nfixed = 3\n')
    result = cured.run("--record", written=True)
    assert result.status == 0, result.out + result.err
    found = tomllib.loads(file.read_text())
    assert found["other/v1"] == {"date": "2026-01-01", "fixed": 3}
    mine = found["fake/v9"]
    assert mine["date"] == datetime.now(UTC).date().isoformat()
    assert (mine["commit"], mine["exit_status"], mine["fixed"], mine["guard"]) == (cured.commit, 0, 1, 1)


def test_part_of_a_run_is_not_recorded(cured: Project) -> None:
    result = cured.run("--record", "--only", "guard.fine")
    assert result.status == 2
    assert "--record is for a whole run on a pinned release" in result.err
    assert not (cured.root / "patches" / "results.toml").exists()


def test_every_release_was_run_with_the_contracts_that_it_has_now() -> None:
    loaded = manifest.load(PATCHES)
    results = targets.read_results()
    releases = [name for name in results if loaded.targets[name].wheel is not None]
    assert loaded.select(None)[0] in releases
    for name in releases:
        last = results[name]
        counted = sum(last.get(verdict.value.replace(" ", "_"), 0) for verdict in targets.COUNTED)
        assert (name, last["exit_status"], counted) == (name, 0, len(loaded.targets[name].contracts))


def test_the_readme_has_the_table_of_now() -> None:
    page = targets.PAGE.read_text(encoding="utf-8")
    made = targets.table(manifest.load(PATCHES), targets.read_results())
    assert targets.replaced(page, made) == page, "python -m ci.targets writes it anew"


@pytest.mark.parametrize("page", ["", targets.END + targets.BEGIN, (targets.BEGIN + targets.END) * 2])
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        targets.replaced(page, "| |\n")


def test_a_target_that_failed_or_was_never_run_says_so() -> None:
    loaded = manifest.load(PATCHES)
    name = next(iter(loaded.targets))
    failed = targets.table(loaded, {name: {"date": "2026-01-02", "exit_status": 1, "fixed": 3, "not_run": 2}})
    lines = {line.split("`")[1]: line for line in failed.splitlines()[2:]}
    assert lines.keys() == loaded.targets.keys()
    assert lines.pop(name).endswith("| 3 | 0 | 0 | 2 | 2026-01-02, failed |")
    assert all(line.endswith("| – | – | – | – | never |") for line in lines.values())


def test_every_target_that_is_in_git_only_has_a_good_result() -> None:
    loaded = manifest.load(PATCHES)
    results = tomllib.loads((PATCHES / "results.toml").read_text(encoding="utf-8"))
    in_git_only = {name: target for name, target in loaded.targets.items() if target.wheel is None}
    assert set(results) >= set(in_git_only)
    for name, target in in_git_only.items():
        assert (name, results[name]["commit"], results[name]["exit_status"]) == (name, target.commit, 0)

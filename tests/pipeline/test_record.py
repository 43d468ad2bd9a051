# SPDX-License-Identifier: Apache-2.0
"""patches/results.toml: the last run of each target, written by the run itself."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime

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


def test_every_target_that_is_in_git_only_has_a_good_result() -> None:
    loaded = manifest.load(PATCHES)
    results = tomllib.loads((PATCHES / "results.toml").read_text(encoding="utf-8"))
    in_git_only = {name: target for name, target in loaded.targets.items() if target.wheel is None}
    assert set(results) >= set(in_git_only)
    for name, target in in_git_only.items():
        assert (name, results[name]["commit"], results[name]["exit_status"]) == (name, target.commit, 0)

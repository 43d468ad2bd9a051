# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that is saved on some ranks and loaded on fewer, with parameters that were never updated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.automodel import reshard_ranks
from tests.contracts.automodel.upstream import PRELOAD
from tests.support.training import differences
from tests.support.world import run_world


@pytest.mark.contract("sparse.reshard", meaning="a partial run under EP and FSDP2 resumes on fewer ranks bit for bit")
def test_partial_run_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_world(reshard_ranks.save_partial, 4, tmp_path / "save", args=(path,), preload=PRELOAD)
    for ranks in (2, 1):
        for alone, resumed in run_world(
            reshard_ranks.resume, ranks, tmp_path / f"load-{ranks}", args=(path,), preload=PRELOAD
        ):
            assert set(alone["never.proj.weight"]) == {"parameter"}
            different = differences(alone, resumed)
            assert not different, f"on {ranks} ranks differ from the run that never stopped: {different[:3]}"

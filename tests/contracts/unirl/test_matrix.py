# SPDX-License-Identifier: Apache-2.0
"""Torch and DCP × gathered and sharded × partial, cold and dense × fresh and warm, on FSDP2 ranks; every optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.unirl import boundary_ranks
from tests.contracts.unirl.runs import OPTIMIZERS, Cell, cells
from tests.contracts.unirl.upstream import PRELOAD
from tests.support.world import run_world


def run_cells(chosen: list[Cell], ranks: int, directory: Path, *, shard: bool = True) -> None:
    """Every cell is exact; the one that all ranks are told of on the release comes first."""
    chosen = sorted(chosen, key=lambda cell: (cell.form != "dcp", cell.content != "partial"))
    found = run_world(boundary_ranks.try_cells, ranks, directory, [chosen, shard], preload=PRELOAD, deadline=120.0)
    for done, wrong in found:
        assert wrong is None, f"not exact after {done} cells: {wrong}"
        assert done == len(chosen) > 0


@pytest.mark.contract("matrix.fsdp", meaning="0 ULP in every cell of the matrix on 1, 2 and 4 FSDP2 ranks")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_matrix_on_fsdp_ranks(ranks: int, tmp_path: Path) -> None:
    run_cells(cells(["AdamW"]), ranks, tmp_path)


@pytest.mark.contract("matrix.momentum", meaning="the same for an optimizer that keeps no step")
def test_matrix_of_sgd_with_momentum(tmp_path: Path) -> None:
    run_cells(cells(["SGD-momentum"]), 2, tmp_path)


@pytest.mark.contract("matrix.optimizers", meaning="partial and cold files of every torch optimizer resume exactly")
def test_every_optimizer(tmp_path: Path) -> None:
    ways = [("partial", "gathered", "fresh"), ("partial", "dcp", "warm"), ("cold", "gathered", "warm")]
    run_cells([Cell(name, *way) for name in OPTIMIZERS for way in ways], 1, tmp_path, shard=False)

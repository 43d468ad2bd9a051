# SPDX-License-Identifier: Apache-2.0
"""The gather over NCCL, one GPU a rank: the same rank body; "not run" where there are too few GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contracts.automodel import gather_ranks
from tests.contracts.automodel.gather_cases import CASES, TWO_GROUPS, degrees
from tests.contracts.automodel.test_gather import TOLERANCE, Found, gate_errors, hidden_errors, hold
from tests.contracts.automodel.upstream import PRELOAD
from tests.contracts.outcomes import ContractNotApplicable
from tests.support import launch
from tests.support.world import run_world


def compare(size: int, directory: Path) -> Found:
    """The fp32 cases of the loop on this many GPUs; the grouped GEMM takes bf16 alone on some of them."""
    gpus = torch.cuda.device_count()
    if launch.current is not None and launch.current.backend != "nccl":
        raise ContractNotApplicable(f"torchrun has launched {launch.current.backend}, not nccl")
    if launch.current is None and gpus < size:
        raise ContractNotApplicable(f"needs {size} GPUs; torch sees {gpus}")
    cases = [case for case in (*CASES, *(TWO_GROUPS if size > 2 else ())) if case.experts == "torch"]
    cases = [case for case in cases if size > 1 or case.layout != "empty-rank"]
    ranks = run_world(gather_ranks.compare, size, directory, (cases,), preload=PRELOAD, backend="nccl")
    return [list(case) for case in zip(*ranks, strict=True)]


def check(size: int, directory: Path, measure: Callable[[str, float], None]) -> None:
    """Hold router and hidden-state gradients against one process on one GPU."""
    found = compare(size, directory)
    hold(gate_errors(found), "gate gradient", "gate_relative_error", measure, TOLERANCE)
    hold(hidden_errors(found), "hidden-state gradient", "hidden_relative_error", measure, TOLERANCE)


@pytest.mark.contract("gather.nccl-one-rank", meaning="EP=1 on one GPU is the layer without expert parallelism")
def test_one_gpu(tmp_path: Path, measure: Callable[[str, float], None]) -> None:
    check(1, tmp_path, measure)


@pytest.mark.contract("gather.nccl", meaning="over NCCL the router and what lies below it train as in one process")
@pytest.mark.parametrize("size", [size for size in degrees(2, 4, 8) if size > 1])
def test_several_gpus(size: int, tmp_path: Path, measure: Callable[[str, float], None]) -> None:
    check(size, tmp_path, measure)

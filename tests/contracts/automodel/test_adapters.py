# SPDX-License-Identifier: Apache-2.0
"""Adapters (PEFT) on experts under expert parallelism: their optimizer is saved by integer ids, not by names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.automodel import adapter_ranks
from tests.contracts.automodel.upstream import PRELOAD
from tests.support.training import differences
from tests.support.world import run_world

NEVER = "model.layers.1.mlp.experts.lora_gate_and_up_A"


@pytest.mark.contract(
    "sparse.adapters", meaning="adapters on experts under EP resume bit for bit, never updated or not"
)
@pytest.mark.parametrize("names", [("layers.",), adapter_ranks.USED], ids=["all-updated", "some-never"])
def test_adapters_on_experts_resume(names: tuple[str, ...], tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    outcomes = run_world(adapter_ranks.resume, 2, tmp_path / "ranks", args=(path, names), preload=PRELOAD)
    for alone, resumed in outcomes:
        restored = alone.pop("loaded")["entries"]
        assert restored == ["exp_avg", "exp_avg_sq", "parameter", "step"], f"after the load there is only {restored}"
        steps = alone[NEVER].get("step", 0)  # later releases make up zeros for what no step reached
        assert (float(steps) == 0) is (names == adapter_ranks.USED)
        assert differences(alone, resumed) == []

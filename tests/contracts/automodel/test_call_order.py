# SPDX-License-Identifier: Apache-2.0
"""The order in which a trainer outside Automodel (NeMo-RL) uses one ``Checkpointer`` for everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contracts.automodel.upstream import plain_checkpointer
from tests.support.training import differences, start_run


@pytest.mark.contract(
    "order.one-checkpointer",
    meaning="one Checkpointer whose config changes between calls resumes a partial run exactly",
)
def test_one_checkpointer_saves_and_resumes_with_changing_config(tmp_path: Path) -> None:
    checkpointer = plain_checkpointer(tmp_path / "unused")
    run = start_run()
    base = {name: param.detach().clone() for name, param in run.model.state_dict().items()}
    run.train(range(3), ["used"])
    saved = tmp_path / "step-3"
    checkpointer.config.checkpoint_dir = saved
    checkpointer.save_model(run.model, str(saved))
    checkpointer.save_optimizer(run.optimizer, run.model, str(saved), run.scheduler)

    # A later save, of another run and to another place, leaves nothing behind in the same object.
    other = start_run(("used", "elsewhere"))
    other.train(range(1), ["elsewhere"])
    checkpointer.config.checkpoint_dir = tmp_path / "other"
    checkpointer.save_optimizer(other.optimizer, other.model, str(tmp_path / "other"), other.scheduler)

    resumed = start_run()
    resumed.model.load_state_dict(base)
    checkpointer.config.checkpoint_dir = saved
    checkpointer.load_model(resumed.model, str(saved / "model"))
    assert all(torch.equal(param, resumed.model.state_dict()[name]) for name, param in run.model.state_dict().items())
    checkpointer.load_optimizer(resumed.optimizer, resumed.model, str(saved), resumed.scheduler)
    for each in (run, resumed):
        each.train(range(3, 7), ["used", "late"])
    assert differences(run.snapshot(), resumed.snapshot()) == []

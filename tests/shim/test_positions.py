# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that is saved by integer ids, as the release does for adapters under EP or on quantised weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    OptimizerStateError,
    load_optimizer_state,
    positional_optimizer_state_dict,
    validate_optimizers_for_save,
)
from tests.shim import state_ranks
from tests.support.training import Run, differences, start_run
from tests.support.world import run_world

NAMES = ("used", "late", "never")


def _run(names: tuple[str, ...] = NAMES, *, grouped: bool = False) -> Run:
    run = start_run(names)
    if grouped:
        groups = [
            {"params": list(run.model[name].parameters()), "lr": 0.01 * (1 + at)} for at, name in enumerate(names)
        ]
        optimizer = torch.optim.AdamW(groups)
        return Run(run.model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
    return run


def _save(run: Run, path: Path) -> None:
    state = {
        "optim": positional_optimizer_state_dict([run.model], [run.optimizer]),
        "sched": run.scheduler.state_dict(),
    }
    dcp.save(state, checkpoint_id=str(path))


def _load(run: Run, path: Path, **options: Any) -> None:
    load_optimizer_state([run.model], [run.optimizer], [run.scheduler], path, **options)


@pytest.mark.parametrize("recorded", [True, False], ids=["our-file", "stock-file"])
@pytest.mark.parametrize("grouped", [False, True], ids=["one-group", "groups"])
@pytest.mark.parametrize("loaded_into", ["fresh", "stepped"])
@pytest.mark.parametrize("steps", [0, 3], ids=["cold", "partial"])
def test_resume_equals_the_uninterrupted_run(
    steps: int, loaded_into: str, grouped: bool, recorded: bool, tmp_path: Path
) -> None:
    run, resumed = _run(grouped=grouped), _run(grouped=grouped)
    run.train(range(steps), ["used"])
    before = run.snapshot()
    if recorded:
        _save(run, tmp_path)
        kept = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
        assert sum("never_updated" in key for key in kept) == (4 if steps else 6)
    else:
        dcp.save({"optim": run.optimizer.state_dict(), "sched": run.scheduler.state_dict()}, checkpoint_id=tmp_path)
    assert differences(before, run.snapshot()) == []
    if loaded_into == "stepped":
        resumed.train(range(50, 52), ["late"])
    resumed.model.load_state_dict(run.model.state_dict())
    _load(resumed, tmp_path)
    for each in (run, resumed):
        each.train(range(3, 6), ["used", "late"])
    assert differences(run.snapshot(), resumed.snapshot()) == []


@pytest.mark.parametrize("names", [("used", "late"), (*NAMES, "new")], ids=["fewer", "more"])
@pytest.mark.parametrize("options", [{}, {"allow_new_parameters": True}], ids=["strict", "new-allowed"])
def test_another_number_of_parameters_is_refused(
    names: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    run, other = _run(), _run(names)
    run.train(range(3), ["used"])
    _save(run, tmp_path)
    before = other.snapshot()
    with pytest.raises(
        OptimizerStateError, match=rf"for groups of \[6\] parameters; the live groups have \[{2 * len(names)}\]"
    ):
        _load(other, tmp_path, **options)
    assert differences(before, other.snapshot()) == []


def test_damage_is_named_by_the_live_parameter(tmp_path: Path) -> None:
    run, other = _run(), _run()
    run.train(range(3), ["used"])
    state = positional_optimizer_state_dict([run.model], [run.optimizer])
    state["state"] = copy.deepcopy(state["state"])
    del state["state"][1]["exp_avg_sq"]
    dcp.save({"optim": state, "sched": run.scheduler.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(OptimizerStateError, match=r"used\.bias lacks exp_avg_sq"):
        _load(other, tmp_path)


def test_lost_state_is_told_from_never_updated(tmp_path: Path) -> None:
    run, other = _run(), _run()
    run.train(range(3), ["used"])
    state = positional_optimizer_state_dict([run.model], [run.optimizer])
    del state["state"][0]
    dcp.save({"optim": state, "sched": run.scheduler.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(OptimizerStateError, match=r"used\.weight has lost its state"):
        _load(other, tmp_path)


def test_a_save_of_several_parts_is_refused() -> None:
    parts = [_run(("used",)), _run(("late",))]
    models: list[nn.Module] = [part.model for part in parts]
    optimizers = [part.optimizer for part in parts]
    with pytest.raises(
        OptimizerStateError, match="2 optimizers on one rank: state by integer ids is that of one of them"
    ):
        validate_optimizers_for_save(models, optimizers, by_position=True)


def test_ranks_that_hold_other_parameters_in_the_same_place_are_refused(tmp_path: Path) -> None:
    texts = run_world(state_ranks.save_stages_by_position, 2, tmp_path)
    assert len(set(texts)) == 1
    assert "nothing was written" in texts[0]
    assert "parameter 0 of the optimizer (stage0.weight: state, step 1 on rank 0; stage1.weight" in texts[0]


def _stages() -> tuple[list[Run], dict[str, Any]]:
    runs = [_run(("same",)) for _ in range(2)]  # names that say nothing of the stage
    return runs, {
        "models": [run.model for run in runs],
        "optimizers": [run.optimizer for run in runs],
        "parts": [("parts", f"part_{at}") for at, _ in enumerate(runs)],
    }


@pytest.mark.parametrize("updated", [0, 1])
def test_each_part_of_a_pipeline_gets_its_own_state(updated: int, tmp_path: Path) -> None:
    runs, live = _stages()
    runs[updated].train(range(3), ["same"])
    validate_optimizers_for_save(live["models"], live["optimizers"], by_position=True, parts=live["parts"])
    saved = [positional_optimizer_state_dict([run.model], [run.optimizer]) for run in runs]
    assert ["never_updated" in each for each in saved] == [at != updated for at in range(2)]
    dcp.save({"optim": {"parts": {"part_0": saved[0], "part_1": saved[1]}}}, checkpoint_id=tmp_path)
    others, again = _stages()
    for mine, theirs in zip(others, runs, strict=True):
        mine.model.load_state_dict(theirs.model.state_dict())
        mine.scheduler.load_state_dict(theirs.scheduler.state_dict())
    load_optimizer_state(again["models"], again["optimizers"], None, tmp_path, parts=again["parts"])
    assert [len(run.optimizer.state) for run in others] == [2 if at == updated else 0 for at in range(2)]
    for run in (*runs, *others):
        run.train(range(3, 6), ["same"])
    assert [differences(*pair) for pair in zip(*(_snapshots(each) for each in (runs, others)), strict=True)] == [[], []]
    with pytest.raises(OptimizerStateError, match=r"for groups of \[\] parameters in part_2"):
        load_optimizer_state(again["models"][:1], again["optimizers"][:1], None, tmp_path, parts=[("parts", "part_2")])
    with pytest.raises(OptimizerStateError, match="for one optimizer; there are 2"):
        load_optimizer_state(again["models"], again["optimizers"], None, tmp_path)


def _snapshots(runs: list[Run]) -> list[dict[str, Any]]:
    return [run.snapshot() for run in runs]

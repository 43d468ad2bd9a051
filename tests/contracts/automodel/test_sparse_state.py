# SPDX-License-Identifier: Apache-2.0
"""Optimizer checkpoints through the release's own Checkpointer, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.contracts.automodel.upstream import plain_checkpointer
from tests.support.training import Run, differences, names_of, start_run


def saved_after(path: Path, steps: int, names: list[str]) -> Run:
    """Train ``steps`` steps on the layers of ``names``, and save the optimizer to ``path``."""
    run = start_run()
    run.train(range(steps), names)
    plain_checkpointer(path).save_optimizer(run.optimizer, run.model, str(path), run.scheduler)
    return run


def fresh_copy(run: Run) -> Run:
    """A run that starts anew from the same weights."""
    other = start_run()
    other.model.load_state_dict(run.model.state_dict())
    return other


@pytest.mark.contract(
    "sparse.partial-adamw", meaning="a run in which some parameters had no gradient yet resumes exactly"
)
def test_partial_adamw_resumes_bit_for_bit(tmp_path: Path) -> None:
    run = saved_after(tmp_path, 3, ["used"])
    keys = dcp.FileSystemReader(tmp_path / "optim").read_metadata().state_dict_metadata
    made_up = sorted(key for key in keys if key.startswith(("optim.state.late", "optim.state.never")))
    assert not made_up, f"the file holds state that no step made: {made_up}"

    resumed = fresh_copy(run)
    plain_checkpointer(tmp_path).load_optimizer(resumed.optimizer, resumed.model, str(tmp_path), resumed.scheduler)
    assert names_of(resumed.model, list(resumed.optimizer.state)) == ["used.bias", "used.weight"]
    assert differences(run.snapshot(), resumed.snapshot()) == []
    for each in (run, resumed):
        each.train(range(3, 7), ["used", "late"])
    assert differences(run.snapshot(), resumed.snapshot()) == []
    assert int(resumed.optimizer.state[resumed.model["late"].weight]["step"]) == 4
    assert resumed.model["never"].weight not in resumed.optimizer.state


@pytest.mark.contract(
    "sparse.older-file", meaning="a partial checkpoint as the releases to 0.6.0 write it resumes exactly"
)
def test_partial_file_of_an_older_release_resumes(tmp_path: Path) -> None:
    run = start_run()
    run.train(range(3), ["used"])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"optim": get_optimizer_state_dict(run.model, run.optimizer, options=options)}
    dcp.save(state | {"sched": run.scheduler.state_dict()}, checkpoint_id=str(tmp_path / "optim"))
    resumed = fresh_copy(run)
    plain_checkpointer(tmp_path).load_optimizer(resumed.optimizer, resumed.model, str(tmp_path), resumed.scheduler)
    for each in (run, resumed):
        each.train(range(3, 7), ["used", "late"])
    assert differences(run.snapshot(), resumed.snapshot()) == []


@pytest.mark.contract("sparse.cold-save", meaning="saving before the first step does not move the live run")
def test_saving_before_the_first_step_moves_nothing(tmp_path: Path) -> None:
    run = start_run()
    before = run.snapshot()
    plain_checkpointer(tmp_path).save_optimizer(run.optimizer, run.model, str(tmp_path), run.scheduler)
    moved = differences(before, run.snapshot())
    assert not moved, f"the save gave the live optimizer state: {moved[:3]}"
    resumed = fresh_copy(run)
    plain_checkpointer(tmp_path).load_optimizer(resumed.optimizer, resumed.model, str(tmp_path), resumed.scheduler)
    for each in (run, resumed):
        each.train(range(4), ["used", "late"])
    assert differences(run.snapshot(), resumed.snapshot()) == []


@pytest.mark.contract("sparse.dense-format", meaning="a checkpoint of fully updated parameters keeps torch's format")
def test_dense_checkpoint_loads_as_torch_itself_loads_it(tmp_path: Path) -> None:
    run = saved_after(tmp_path, 3, ["used", "late", "never"])
    # What an unpatched tree does at a load: torch's own template, DCP, torch's own setter.
    other = fresh_copy(run)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"optim": get_optimizer_state_dict(other.model, other.optimizer, options=options)}
    state["sched"] = other.scheduler.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / "optim"))
    set_optimizer_state_dict(other.model, other.optimizer, state["optim"], options=options)
    other.scheduler.load_state_dict(state["sched"])
    for each in (run, other):
        each.train(range(3, 7), ["used", "late", "never"])
    assert differences(run.snapshot(), other.snapshot()) == []


@pytest.mark.contract(
    "sparse.half-an-entry", meaning="state that lost a part is refused by name, and nothing is changed"
)
@pytest.mark.parametrize("entry", ["exp_avg_sq", "step"])
def test_half_an_entry_is_refused_by_name(entry: str, tmp_path: Path) -> None:
    run = start_run()
    run.train(range(3), ["used"])
    state = get_optimizer_state_dict(
        run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    del state[f"state.used.weight.{entry}"]
    dcp.save({"optim": state}, checkpoint_id=str(tmp_path / "optim"))

    other = fresh_copy(run)
    before = other.snapshot()
    with pytest.raises(BaseException) as failure:  # CheckpointException of torch derives from BaseException
        plain_checkpointer(tmp_path).load_optimizer(other.optimizer, other.model, str(tmp_path))
    text = str(failure.value).strip()
    helpful = f"used.weight lacks {entry}" in text and "late" not in text and str(tmp_path) in text
    assert helpful, f"unhelpful refusal: {text.splitlines()[-1].strip()}"
    changed = differences(before, other.snapshot())
    assert not changed, f"the refused load changed {changed[:3]}"


@pytest.mark.contract(
    "checkpoint.model-in-path", meaning="an adapter run resumes below a directory whose name starts with model"
)
@pytest.mark.parametrize("name", ["models", "model"])
def test_adapter_run_below_a_directory_named_like_the_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    adapters = {"is_peft": True, "model_save_format": "safetensors"}
    run = start_run()
    run.train(range(3), ["used", "late", "never"])
    plain_checkpointer(path, **adapters).save_optimizer(run.optimizer, run.model, str(path), run.scheduler)
    resumed = fresh_copy(run)
    checkpointer = plain_checkpointer(path, **adapters)
    checkpointer.load_optimizer(resumed.optimizer, resumed.model, str(path), resumed.scheduler)
    assert differences(run.snapshot(), resumed.snapshot()) == []


@pytest.mark.contract("sparse.model-strictness", meaning="a model checkpoint that lacks a parameter is still refused")
def test_model_state_stays_strict(tmp_path: Path) -> None:
    run = start_run(("used", "late"))
    dcp.save(run.model.state_dict(), checkpoint_id=str(tmp_path / "model"))
    larger = start_run(("used", "late", "extra"))
    with pytest.raises(BaseException, match="extra") as failure:
        plain_checkpointer(tmp_path).load_model(larger.model, str(tmp_path / "model"))
    assert not isinstance(failure.value, KeyboardInterrupt)
    smaller = start_run(("used", "late"))
    with torch.no_grad():
        for param in smaller.model.parameters():
            param.zero_()
    plain_checkpointer(tmp_path).load_model(smaller.model, str(tmp_path / "model"))
    assert all(torch.equal(*pair) for pair in zip(run.model.parameters(), smaller.model.parameters(), strict=False))

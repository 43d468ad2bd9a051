# SPDX-License-Identifier: Apache-2.0
"""The loader by itself: optimizers, schedulers, names, refusals, and agreement between ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    OptimizerStateError,
    iter_named_parameters,
    load_optimizer_state,
    log_parameters_without_state,
    optimizer_state_dict,
)
from tests.contracts.training import Run, differences, snapshot, start_run
from tests.shim import state_ranks
from tests.support.world import run_world

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam-l2": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "nadam": lambda params: torch.optim.NAdam(params),
    "radam": lambda params: torch.optim.RAdam(params),
    "adamax": lambda params: torch.optim.Adamax(params),
    "adagrad": lambda params: torch.optim.Adagrad(params),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "rmsprop-centered": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "rprop": lambda params: torch.optim.Rprop(params),
    "asgd": lambda params: torch.optim.ASGD(params),
    "adafactor": lambda params: torch.optim.Adafactor(params),
}


def run_with(optimizer: str) -> Run:
    run = start_run()
    made = OPTIMIZERS[optimizer](run.model.parameters())
    return Run(run.model, made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0 / (1 + step)))


def save(run: Run, path: Path) -> None:
    dcp.save(
        {"optim": optimizer_state_dict(run.model, run.optimizer), "sched": run.scheduler.state_dict()},
        checkpoint_id=str(path),
    )


def load(run: Run, path: Path, **options: Any) -> None:
    load_optimizer_state([run.model], [run.optimizer], [run.scheduler], path, **options)


def state_of(run: Run) -> dict[str, Any]:
    return snapshot(run.model, run.optimizer, run.scheduler)


@pytest.mark.parametrize("loaded_into", ["fresh", "stepped", "gradients-waiting"])
@pytest.mark.parametrize("steps", [0, 3], ids=["cold", "partial"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_equals_the_uninterrupted_run(optimizer: str, steps: int, loaded_into: str, tmp_path: Path) -> None:
    run = run_with(optimizer)
    run.train(range(steps), ["used"])
    before = state_of(run)
    save(run, tmp_path)
    assert differences(before, state_of(run)) == []

    resumed = run_with(optimizer)
    if loaded_into == "stepped":
        resumed.train(range(50, 52), ["late"])
    resumed.model.load_state_dict(run.model.state_dict())
    if loaded_into == "gradients-waiting":
        resumed.model["never"](torch.ones(1, 4)).sum().backward()
    load(resumed, tmp_path)
    resumed.optimizer.zero_grad()
    for each in (run, resumed):
        each.train(range(3, 8), ["used", "late"])
    assert differences(state_of(run), state_of(resumed)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20),
    ],
    ids=["multi-step", "cyclic", "cosine", "one-cycle"],
)
def test_schedulers_go_on_and_can_be_saved_again(make: Callable[[Any], Any], tmp_path: Path) -> None:
    def build() -> Run:
        run = start_run()
        return Run(run.model, run.optimizer, make(run.optimizer))

    run, resumed = build(), build()
    run.train(range(3), ["used"])
    save(run, tmp_path / "first")
    resumed.model.load_state_dict(run.model.state_dict())
    load(resumed, tmp_path / "first")
    save(resumed, tmp_path / "second")
    for each in (run, resumed):
        each.train(range(3, 8), ["used", "late"])
    assert differences(state_of(run), state_of(resumed)) == []


def test_names_are_those_of_torch_below_wrappers() -> None:
    model = start_run().model
    model["used"] = checkpoint_wrapper(model["used"])
    model["late"] = torch.compile(model["late"])
    names = [name for name, _ in iter_named_parameters(model)]
    assert sorted(names) == sorted(name for name, _ in start_run().model.named_parameters())


def test_file_with_wrapped_names_is_the_same_parameter(tmp_path: Path) -> None:
    run = start_run()
    run.train(range(3), ["used"])
    flat = optimizer_state_dict(run.model, run.optimizer)
    renamed = {key.replace("used.", "_orig_mod.used._checkpoint_wrapped_module."): value for key, value in flat.items()}
    assert renamed.keys() != flat.keys()
    dcp.save({"optim": renamed}, checkpoint_id=str(tmp_path))
    resumed = start_run()
    load_optimizer_state([resumed.model], [resumed.optimizer], None, tmp_path)
    assert differences(state_of(run)["state"], state_of(resumed)["state"]) == []


def test_keys_equal_torchs_where_all_is_updated() -> None:
    run = start_run()
    cold = set(optimizer_state_dict(run.model, run.optimizer))
    run.train(range(1), ["used", "late", "never"])
    dense = get_optimizer_state_dict(
        run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert differences(optimizer_state_dict(run.model, run.optimizer), dense) == []
    assert cold == {key for key in dense if key.startswith("param_groups.")}


def test_one_name_may_be_the_beginning_of_another(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        model.a = nn.Parameter(torch.ones(2))
        model.child = nn.Module()
        model.child.exp_avg = nn.Parameter(torch.ones(3))
        model.register_parameter("child_a", nn.Parameter(torch.ones(2)))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    (model.a.sum() + model.child.exp_avg.square().sum()).backward()
    optimizer.step()
    dcp.save({"optim": optimizer_state_dict(model, optimizer)}, checkpoint_id=str(tmp_path))
    other, fresh = build()
    load_optimizer_state([other], [fresh], None, tmp_path)
    assert torch.equal(fresh.state[other.child.exp_avg]["exp_avg"], optimizer.state[model.child.exp_avg]["exp_avg"])
    assert other.child_a not in fresh.state


def test_groups_keep_their_own_saved_options_in_another_order(tmp_path: Path) -> None:
    def build(order: list[str], lr: dict[str, float]) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        model = start_run().model
        groups = [{"params": list(model[name].parameters()), "lr": lr[name]} for name in order]
        return model, torch.optim.AdamW(groups)

    model, optimizer = build(["used", "late", "never"], {"used": 0.1, "late": 0.2, "never": 0.3})
    dcp.save({"optim": optimizer_state_dict(model, optimizer)}, checkpoint_id=str(tmp_path))
    other, fresh = build(["never", "used", "late"], dict.fromkeys(("used", "late", "never"), 9.0))
    load_optimizer_state([other], [fresh], None, tmp_path)
    assert [group["lr"] for group in fresh.param_groups] == [0.3, 0.1, 0.2]


def test_group_option_that_an_older_file_lacks_keeps_the_live_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run()
    run.train(range(2), ["used"])
    flat = optimizer_state_dict(run.model, run.optimizer)
    older = {key: value for key, value in flat.items() if not key.endswith("decoupled_weight_decay")}
    assert len(older) == len(flat) - 6
    dcp.save({"optim": older}, checkpoint_id=str(tmp_path))
    resumed = start_run()
    load_optimizer_state([resumed.model], [resumed.optimizer], None, tmp_path)
    assert resumed.optimizer.param_groups[0]["decoupled_weight_decay"] is True
    assert "decoupled_weight_decay" in caplog.text


def test_two_parts_of_which_one_is_cold(tmp_path: Path) -> None:
    first, second = start_run(("used",)), start_run(("never",))
    first.train(range(3), ["used"])
    flat = optimizer_state_dict(first.model, first.optimizer) | optimizer_state_dict(second.model, second.optimizer)
    dcp.save({"optim": flat}, checkpoint_id=str(tmp_path))
    fresh = [start_run(("used",)), start_run(("never",))]
    load_optimizer_state([run.model for run in fresh], [run.optimizer for run in fresh], None, tmp_path)
    assert differences(state_of(first)["state"], state_of(fresh[0])["state"]) == []
    assert not fresh[1].optimizer.state


def test_as_many_optimizers_as_parts(tmp_path: Path) -> None:
    run = start_run()
    save(run, tmp_path)
    with pytest.raises(OptimizerStateError, match="1 model parts and 2 optimizers"):
        load_optimizer_state([run.model], [run.optimizer, run.optimizer], None, tmp_path)


@pytest.mark.parametrize("damage", ["metadata-absent", "metadata-cut", "data-absent", "data-cut"])
def test_damaged_files_are_named_and_nothing_is_changed(damage: str, tmp_path: Path) -> None:
    run = start_run()
    run.train(range(3), ["used"])
    save(run, tmp_path)
    file = tmp_path / (".metadata" if damage.startswith("metadata") else "__0_0.distcp")
    data = file.read_bytes()
    file.unlink()
    if damage.endswith("cut"):
        file.write_bytes(data[: len(data) // 2])
    before = state_of(run)
    with pytest.raises(OptimizerStateError, match="nothing was changed") as failure:
        load(run, tmp_path)
    assert str(file) in str(failure.value)
    assert differences(before, state_of(run)) == []


def test_a_save_says_how_many_have_no_state(caplog: pytest.LogCaptureFixture) -> None:
    run = start_run()
    run.train(range(1), ["used"])
    with caplog.at_level("INFO"):
        log_parameters_without_state([run.model], [run.optimizer])
        plain = torch.optim.SGD(run.model.parameters(), lr=0.1)
        log_parameters_without_state([run.model], [plain])
    assert [message for message in caplog.messages if "never updated" in message] == [
        "Optimizer state: 4 parameters of 6 never updated, saved without state: "
        "late.weight, late.bias, never.weight, never.bias."
    ]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (state_ranks.one_rank_cannot_look, "rank 1: 2 live parameters not listed"),
        (state_ranks.one_rank_cannot_act, "rank 1: ValueError: no such schedule"),
    ],
    ids=["look", "act"],
)
def test_a_failure_on_one_rank_is_the_same_error_on_all(body: Callable[..., Any], cause: str, tmp_path: Path) -> None:
    found = run_world(body, 3, tmp_path)
    texts = {rank["text"] for rank in found}
    assert len(texts) == 1
    assert cause in texts.pop()
    assert [rank["changed"] for rank in found] == [[], [], []]


def test_parameters_of_another_rank_are_not_called_dropped(tmp_path: Path) -> None:
    messages = [line for rank in run_world(state_ranks.everything_is_listed_somewhere, 2, tmp_path) for line in rank]
    dropped = [line for line in messages if "dropped" in line]
    assert len(dropped) == 1
    assert re.search("2 saved parameters dropped.*: never.bias, never.weight", dropped[0])

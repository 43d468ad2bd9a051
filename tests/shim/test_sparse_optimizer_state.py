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
from torch.optim.optimizer import register_optimizer_step_post_hook

from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    OptimizerStateError,
    iter_named_parameters,
    load_optimizer_state,
    log_parameters_without_state,
    optimizer_state_dict,
)
from tests.shim import state_ranks
from tests.support.training import Run, differences, start_run
from tests.support.world import run_world


class Renamed(torch.optim.AdamW):
    """An optimizer of somebody's own that steps as torch's does."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam-l2": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw-tensor-lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), foreach=False),
    "adamw-subclass": lambda params: Renamed(params, lr=1e-2),
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


@pytest.mark.parametrize("loaded_into", ["fresh", "stepped", "gradients-waiting"])
@pytest.mark.parametrize("steps", [0, 3], ids=["cold", "partial"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_equals_the_uninterrupted_run(optimizer: str, steps: int, loaded_into: str, tmp_path: Path) -> None:
    run = run_with(optimizer)
    run.train(range(steps), ["used"])
    before = run.snapshot()
    save(run, tmp_path)
    assert differences(before, run.snapshot()) == []

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
    assert differences(run.snapshot(), resumed.snapshot()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20),
        lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 6]),
            ]
        ),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 6]),
            ],
            [1],
        ),
    ],
    ids=["multi-step", "cyclic", "cosine", "one-cycle", "chained", "sequential"],
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
    assert differences(run.snapshot(), resumed.snapshot()) == []


def test_names_are_those_of_torch_below_wrappers() -> None:
    model = start_run().model
    model["used"] = checkpoint_wrapper(model["used"])
    model["late"] = torch.compile(model["late"])
    model["never"] = nn.Sequential(model["never"])
    model["never"].register_module("module", nn.Linear(1, 1))
    names = [name for name, _ in iter_named_parameters(model)]
    # A child that is merely called "module" is no wrapper.
    assert {name for name in names if "module" in name} == {"never.module.weight", "never.module.bias"}
    names = [name.replace("never.0", "never") for name in names if "module" not in name]
    assert sorted(names) == sorted(name for name, _ in start_run().model.named_parameters())


def test_names_below_ddp_are_those_of_torch(tmp_path: Path) -> None:
    assert run_world(state_ranks.names_below_ddp, 2, tmp_path) == [True, True]


def test_file_with_wrapped_names_is_the_same_parameter(tmp_path: Path) -> None:
    run = start_run()
    run.train(range(3), ["used"])
    flat = optimizer_state_dict(run.model, run.optimizer)
    renamed = {key.replace("used.", "_orig_mod.used._checkpoint_wrapped_module."): value for key, value in flat.items()}
    assert renamed.keys() != flat.keys()
    dcp.save({"optim": renamed}, checkpoint_id=str(tmp_path))
    resumed = start_run()
    load_optimizer_state([resumed.model], [resumed.optimizer], None, tmp_path)
    assert differences(run.snapshot()["state"], resumed.snapshot()["state"]) == []


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
    assert differences(first.snapshot()["state"], fresh[0].snapshot()["state"]) == []
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
    before = run.snapshot()
    with pytest.raises(OptimizerStateError, match="nothing was changed") as failure:
        load(run, tmp_path)
    assert str(file) in str(failure.value)
    assert differences(before, run.snapshot()) == []


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


# Half of a single entry is none: such a parameter was never updated.
SEVERAL_ENTRIES = [name for name in OPTIMIZERS if not name.startswith("sgd")]


@pytest.mark.parametrize("optimizer", SEVERAL_ENTRIES)
def test_half_an_entry_is_refused_whatever_the_optimizer(optimizer: str, tmp_path: Path) -> None:
    run = run_with(optimizer)
    run.train(range(3), ["used"])
    flat = optimizer_state_dict(run.model, run.optimizer)
    entries = sorted(key for key in flat if key.startswith("state.used.weight."))
    assert len(entries) > 1
    for number, entry in enumerate(entries):
        rest = {key: value for key, value in flat.items() if key != entry}
        dcp.save({"optim": rest}, checkpoint_id=str(tmp_path / str(number)))
        with pytest.raises(OptimizerStateError, match=f"used.weight lacks {entry.rpartition('.')[2]}"):
            load_optimizer_state([run.model], [run.optimizer], None, tmp_path / str(number))


class Mixed(torch.optim.Optimizer):
    """Not torch's own step: matrices with many rows keep a scale, and some parameters another state altogether."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Plain descent that leaves state behind."""
        for number, param in enumerate(self.param_groups[0]["params"]):
            if param.grad is not None:
                state = self.state[param]
                state["step"] = torch.tensor(float(state.get("step", 0)) + 1)
                if number % 2:
                    state["velocity"] = param.grad.clone()
                else:
                    state["moment"] = param.grad.clone()
                    if param.numel() >= 16:
                        state["scale"] = torch.ones(2)
                with torch.no_grad():
                    param.sub_(0.1 * param.grad)


def mixed() -> tuple[nn.Module, Mixed]:
    """A parameter of each kind, two of them alike."""
    torch.manual_seed(5)
    model = nn.ParameterList([torch.randn(size) for size in ((4, 4), (4, 4), (2, 2), (3,), (4, 4))])
    return model, Mixed(model.parameters())


def mixed_step(model: nn.Module, optimizer: Mixed) -> None:
    sum(param.square().sum() for param in model).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_that_differs_between_parameters_is_not_damage(tmp_path: Path) -> None:
    model, optimizer = mixed()
    mixed_step(model, optimizer)
    dcp.save({"optim": optimizer_state_dict(model, optimizer)}, checkpoint_id=str(tmp_path))
    other, fresh = mixed()
    load_optimizer_state([other], [fresh], None, tmp_path)
    assert differences(optimizer_state_dict(model, optimizer), optimizer_state_dict(other, fresh)) == []


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda flat: flat.pop("state.0.scale"), "0 lacks scale"),
        (lambda flat: flat.update({"state.0.moment": torch.zeros(6, 4)}), "0: moment has shape"),
    ],
    ids=["entry", "shape"],
)
def test_damage_is_seen_where_the_optimizer_cannot_be_asked(
    damage: Callable[[dict[str, Any]], Any], text: str, tmp_path: Path
) -> None:
    model, optimizer = mixed()
    mixed_step(model, optimizer)
    flat = optimizer_state_dict(model, optimizer)
    damage(flat)
    dcp.save({"optim": flat}, checkpoint_id=str(tmp_path))
    with pytest.raises(OptimizerStateError, match=text):
        load_optimizer_state([model], [optimizer], None, tmp_path)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    run = start_run()
    sgd = torch.optim.SGD(run.model.parameters(), lr=0.1)
    dcp.save({"optim": optimizer_state_dict(run.model, sgd)}, checkpoint_id=str(tmp_path / "sgd"))
    with pytest.raises(
        OptimizerStateError, match=r"another optimizer than AdamW: its groups have .*momentum.*lack .*betas"
    ):
        load_optimizer_state([run.model], [run.optimizer], None, tmp_path / "sgd")
    run.train(range(1), ["used"])
    dcp.save({"optim": optimizer_state_dict(run.model, run.optimizer)}, checkpoint_id=str(tmp_path / "adamw"))
    with pytest.raises(OptimizerStateError, match="another optimizer than SGD"):
        load_optimizer_state([run.model], [sgd], None, tmp_path / "adamw")


def test_options_that_are_containers_or_have_dots(tmp_path: Path) -> None:
    def build(value: int) -> Run:
        run = start_run()
        groups = [{"params": list(run.model.parameters()), "extra": {"a": value, 3: [value]}, "my.option": value}]
        return Run(run.model, torch.optim.AdamW(groups), run.scheduler)

    run, resumed = build(1), build(2)
    run.train(range(2), ["used"])
    save(run, tmp_path)
    load_optimizer_state([resumed.model], [resumed.optimizer], None, tmp_path)
    assert resumed.optimizer.param_groups[0]["extra"] == {"a": 1, 3: [1]}
    assert resumed.optimizer.param_groups[0]["my.option"] == 1


def test_names_in_a_group_stay_the_live_ones(tmp_path: Path) -> None:
    def build(names: tuple[str, ...]) -> Run:
        run = start_run()
        named = [(name, param) for name, param in run.model.named_parameters() if name.startswith(names)]
        return Run(run.model, torch.optim.AdamW(named), run.scheduler)

    run, resumed = build(("used", "late", "never")), build(("used", "late"))
    run.train(range(2), ["used"])
    save(run, tmp_path)
    load_optimizer_state([resumed.model], [resumed.optimizer], None, tmp_path)
    names = resumed.optimizer.param_groups[0]["param_names"]
    assert names == ["used.weight", "used.bias", "late.weight", "late.bias"]


def test_integer_parameter_in_the_optimizer(tmp_path: Path) -> None:
    run = start_run()
    run.model.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    run.optimizer.param_groups[0]["params"].append(run.model.table)
    run.train(range(2), ["used"])
    log_parameters_without_state([run.model], [run.optimizer])
    dcp.save({"optim": optimizer_state_dict(run.model, run.optimizer)}, checkpoint_id=str(tmp_path))
    before = run.snapshot()
    load_optimizer_state([run.model], [run.optimizer], None, tmp_path)
    assert differences(before, run.snapshot()) == []


def test_strides_of_the_state_are_those_of_the_parameter(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(6)
        model = nn.ParameterList([torch.randn(5, 3).t()])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (model[0] * torch.arange(15.0).view(3, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    assert not model[0].is_contiguous()
    train(model, optimizer)
    dcp.save({"optim": optimizer_state_dict(model, optimizer)}, checkpoint_id=str(tmp_path))
    other, fresh = build()
    other.load_state_dict(model.state_dict())
    load_optimizer_state([other], [fresh], None, tmp_path)
    for pair in ((model, optimizer), (other, fresh)):
        train(*pair)
        train(*pair)
    assert torch.equal(model[0], other[0])


def test_two_parts_and_two_schedulers_get_their_own(tmp_path: Path) -> None:
    parts = [start_run(("used",)), start_run(("late",), lr=0.5)]
    for number, part in enumerate(parts):
        part.train(range(2 + number), list(part.model))
    flat = {key: value for part in parts for key, value in optimizer_state_dict(part.model, part.optimizer).items()}
    dcp.save({"optim": flat, "sched": parts[0].scheduler.state_dict()}, checkpoint_id=str(tmp_path))
    fresh = [start_run(("used",)), start_run(("late",), lr=0.5)]
    load_optimizer_state(
        [part.model for part in fresh],
        [part.optimizer for part in fresh],
        [part.scheduler for part in fresh],
        tmp_path,
    )
    for part, other in zip(parts, fresh, strict=True):
        assert differences(part.snapshot()["state"], other.snapshot()["state"]) == []
        assert other.optimizer.param_groups[0]["initial_lr"] == part.optimizer.param_groups[0]["initial_lr"]
        assert other.scheduler.state_dict() == parts[0].scheduler.state_dict()


def test_looking_at_an_optimizer_runs_nobodys_hooks() -> None:
    calls: list[str] = []
    run = start_run()
    run.optimizer.register_step_pre_hook(lambda *args: calls.append("own"))
    handle = register_optimizer_step_post_hook(lambda *args: calls.append("global"))
    try:
        log_parameters_without_state([run.model], [run.optimizer])
        assert calls == []
        run.train(range(1), ["used"])
        assert calls == ["own", "global"]
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (state_ranks.one_rank_cannot_look, "rank 1: 2 live parameters not listed"),
        (state_ranks.one_rank_cannot_act, "rank 1: ValueError: no such schedule"),
        (state_ranks.one_rank_cannot_act_on_nested_schedulers, "rank 1: ValueError: no such schedule"),
        (state_ranks.one_rank_fails_without_a_text, "rank 1: Mute"),
    ],
    ids=["look", "act", "act-nested", "no-text"],
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


def test_a_stage_of_new_parameters_beside_known_ones(tmp_path: Path) -> None:
    assert run_world(state_ranks.one_stage_is_all_new, 2, tmp_path) == [2, 0]


def test_nothing_in_common_on_any_rank(tmp_path: Path) -> None:
    texts = set(run_world(state_ranks.nothing_is_listed_anywhere, 2, tmp_path))
    assert len(texts) == 1
    assert "no parameter in common: saved 'late.bias', live 'added.bias'" in texts.pop()


def test_scalar_parameter_that_is_a_dtensor(tmp_path: Path) -> None:
    assert run_world(state_ranks.scalar_parameter, 2, tmp_path) == [[], []]

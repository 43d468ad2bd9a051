# SPDX-License-Identifier: Apache-2.0
"""Cold optimizers, warm targets, names under wrappers, adapters and groups at the boundary."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.contracts.outcomes import PreconditionError
from tests.contracts.unirl.runs import (
    ADAMW,
    ALL,
    LATE,
    OPTIMIZERS,
    USED,
    Factory,
    resume,
    short,
    start,
    with_optimizer,
)
from tests.contracts.unirl.upstream import backend_of, sharded_state
from tests.support.training import WIDTH, Run, differences

pytestmark = pytest.mark.usefixtures("one_rank")

EXPORTS = {
    "gathered": sharded_state.gather_optimizer_state_dict,
    "sharded": sharded_state.sharded_optimizer_state_dict,
}


@pytest.mark.contract("cold.live-stays-cold", meaning="saving an optimizer that has not stepped does not move it")
@pytest.mark.parametrize("name", ["Adam-L2", "SGD-momentum"])
@pytest.mark.parametrize("form", EXPORTS)
def test_saving_a_cold_optimizer_moves_nothing(name: str, form: str) -> None:
    run = start(OPTIMIZERS[name])
    before = run.snapshot()
    EXPORTS[form](run.model, run.optimizer)
    moved = differences(before, run.snapshot())
    assert not moved, f"the save gave the live optimizer state: {moved[:3]}"
    assert all(param.grad is None for param in run.model.parameters())


@pytest.mark.contract(
    "cold.gradients-stay", meaning="gradients that wait at a cold save stay; the file resumes exactly"
)
@pytest.mark.parametrize("name", ["AdamW", "Adam-L2", "SGD-momentum"])
@pytest.mark.parametrize("form", ["gathered", "torch"])
def test_gradients_that_wait_at_the_save_stay(name: str, form: str, tmp_path: Path) -> None:
    resume_with_gradients(name, form, tmp_path)


@pytest.mark.contract("cold.gradients-stay-dcp", meaning="the same in the DCP format, where the release has it right")
@pytest.mark.parametrize("name", ["AdamW", "Adam-L2", "SGD-momentum"])
def test_gradients_that_wait_at_a_dcp_save_stay(name: str, tmp_path: Path) -> None:
    resume_with_gradients(name, "dcp", tmp_path)


def resume_with_gradients(name: str, form: str, tmp_path: Path) -> None:
    """Save and resume before the first step, with gradients on both sides."""
    run, other = start(OPTIMIZERS[name]), start(OPTIMIZERS[name], seed=2)
    for each in (run, other):
        each.model["used"](torch.ones(2, WIDTH)).sum().backward()
    held = {key: param.grad.clone() for key, param in run.model.named_parameters() if param.grad is not None}
    resume(run, other, form, tmp_path)
    assert not run.optimizer.state
    left = {key: param.grad for key, param in run.model.named_parameters() if param.grad is not None}
    assert differences(held, left) == []
    assert differences(run.snapshot(), other.snapshot()) == [], "the resume is not exact"
    for each in (run, other):
        each.optimizer.zero_grad()
        each.train(range(4), LATE)
    assert differences(run.snapshot(), other.snapshot()) == []


@pytest.mark.contract("warm.forgets", meaning="absent in the file is absent after the load into a warm optimizer")
@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum"])
@pytest.mark.parametrize("form", ["gathered", "sharded", "torch", "dcp"])
def test_a_warm_optimizer_loses_what_the_file_does_not_have(name: str, form: str, tmp_path: Path) -> None:
    run, other = start(OPTIMIZERS[name]), start(OPTIMIZERS[name], seed=2)
    run.train(range(3), USED)
    other.train(range(50, 52), ALL)
    if len(other.optimizer.state) != 6:
        raise PreconditionError("the target is not warm")
    resume(run, other, form, tmp_path)
    assert len(other.optimizer.state) == 2
    assert differences(run.snapshot(), other.snapshot()) == []


def unwrapped(run: Run) -> dict[str, Any]:
    """A snapshot without the wrappers' part of the names."""
    found = run.snapshot()
    for part in ("parameters", "state"):
        found[part] = {
            name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): value
            for name, value in found[part].items()
        }
    return found


def compiled(module: nn.Module) -> nn.Module:
    """``torch.compile``, which the environment of the sides switches off."""
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"), torch._dynamo.config.patch(disable=False):
        return torch.compile(module, backend="eager")


@pytest.mark.contract("names.wrapped", meaning="checkpoint and compile wrappers leave no trace in the names")
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, compiled])
@pytest.mark.parametrize("saved_wrapped", [True, False])
@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_wrapped_names(wrap: Callable[..., nn.Module], saved_wrapped: bool, form: str, tmp_path: Path) -> None:
    plain, wrapped = start(seed=1 + saved_wrapped), start(seed=2 - saved_wrapped)
    for name in ALL:
        wrapped.model[name] = wrap(wrapped.model[name])
    if not any("_checkpoint_wrapped" in name or "_orig_mod" in name for name, _ in wrapped.model.named_parameters()):
        raise PreconditionError("the wrapper does not show in the names")
    run, other = (wrapped, plain) if saved_wrapped else (plain, wrapped)
    run.train(range(3), USED)
    resume(run, other, form, tmp_path)
    for each in (run, other):
        each.train(range(3, 7), LATE)
    assert differences(unwrapped(run), unwrapped(other)) == []


class Adapter(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 1, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(1, WIDTH, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(seed: int, blocks: int) -> Run:
    """Blocks with 12 adapters each; 60 of them have 1440 names, as in the report."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.transformer_blocks = nn.ModuleList(nn.ModuleList(Adapter() for _ in range(12)) for _ in range(blocks))
    return with_optimizer(model)


def train_adapted(run: Run, steps: range, left_out: int) -> None:
    """Step; the last adapters of the last block do not reach the loss, as in the report."""
    adapters = [adapter for block in run.model.transformer_blocks for adapter in block]
    for step in steps:
        data = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
        sum(adapter(data).square().mean() for adapter in adapters[: len(adapters) - left_out]).backward()
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()


@pytest.mark.contract("names.adapters", meaning="1440 adapter parameters of which 4 were never updated resume exactly")
@pytest.mark.parametrize(("form", "blocks"), [("torch", 60), ("dcp", 5)])  # DCP takes 2 ms a tensor
def test_adapters_that_never_get_gradients(form: str, blocks: int, tmp_path: Path) -> None:
    run, other = adapted(1, blocks), adapted(2, blocks)
    names = 24 * blocks
    train_adapted(run, range(2), left_out=2)
    state = sharded_state.gather_optimizer_state_dict(run.model, run.optimizer)
    listed = sum(len(group["params"]) for group in state["param_groups"])
    if (listed, len(state["state"])) != (names, names - 4):
        raise PreconditionError(f"{listed} names, {len(state['state'])} entries")
    with torch.no_grad():
        for mine, theirs in zip(run.model.parameters(), other.model.parameters(), strict=True):
            if not mine.requires_grad:
                theirs.copy_(mine)
    backend_of(run.model, form, run.optimizer, run.scheduler).save(str(tmp_path), mode="adapter")
    try:
        backend_of(other.model, form, other.optimizer, other.scheduler).load(str(tmp_path))
    except BaseException as failure:
        raise AssertionError(f"the resume was refused: {short(failure)}") from failure
    assert len(other.optimizer.state) == names - 4
    for each in (run, other):
        train_adapted(each, range(2, 4), left_out=0)
    assert len(other.optimizer.state) == names
    assert differences(run.snapshot(), other.snapshot()) == []


def grouped(reverse: bool) -> Factory:
    """Two groups with options of their own."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 3e-3, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups[::-1] if reverse else groups)

    return make


@pytest.mark.contract("groups.by-name", meaning="each parameter gets its own group's options, in any order")
@pytest.mark.parametrize("form", ["gathered", "dcp"])
def test_groups_go_by_name(form: str, tmp_path: Path) -> None:
    run, other = start(grouped(False)), start(grouped(True), seed=2)
    run.train(range(3), USED)
    run.optimizer.param_groups[0]["lr"] = 0.5
    if form == "dcp":
        run.scheduler = other.scheduler = None
    state = None
    if form == "gathered":
        state = sharded_state.gather_optimizer_state_dict(run.model, run.optimizer)
        other.model.load_state_dict(run.model.state_dict())
        load(lambda: sharded_state.load_optimizer_state_dict(other.model, other.optimizer, state))
    else:
        backend_of(run.model, form, run.optimizer).save(str(tmp_path))
        load(lambda: backend_of(other.model, form, other.optimizer).load(str(tmp_path)))
    loaded = {id(param): group for group in other.optimizer.param_groups for param in group["params"]}
    assert loaded[id(other.model["used"].weight)]["lr"] == 0.5
    assert loaded[id(other.model["late"].weight)]["weight_decay"] == 0.1
    assert {len(group["params"]) for group in other.optimizer.param_groups} == {2, 4}
    assert other.model["never"].weight not in other.optimizer.state


@pytest.mark.contract("groups.conflict", meaning="different saved options within one live group are refused")
def test_conflicting_options_are_refused() -> None:
    run, other = start(grouped(False)), start(ADAMW, seed=2)
    run.train(range(3), ALL)
    before = other.snapshot()
    failure: Exception | None = None
    try:
        state = sharded_state.gather_optimizer_state_dict(run.model, run.optimizer)
        sharded_state.load_optimizer_state_dict(other.model, other.optimizer, state)
    except Exception as caught:
        failure = caught
    text = "" if failure is None else short(failure)
    assert "used.weight" in text, f"not refused by name: {text or 'accepted in silence'}"
    assert differences(before, other.snapshot()) == []


def load(attempt: Callable[[], object]) -> None:
    """Run a load, where a refusal is a failed assertion."""
    try:
        attempt()
    except BaseException as failure:
        raise AssertionError(f"the resume was refused: {short(failure)}") from failure

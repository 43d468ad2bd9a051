# SPDX-License-Identifier: Apache-2.0
"""One training run that is saved and resumed, as data: what a search draws, and what the grid runs by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.optimizers import OPTIMIZERS, OTHERS, Kind
from tests.support.training import differences, snapshot

# Parameters by kind; "transposed" has strides of its own.
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (4, 3),
    "square": (3, 3),
    "transposed": (3, 5),
    "vector": (3,),
    "scalar": (),
    "cube": (2, 3, 2),
    "rows-0": (0, 4),
}
MATRICES = ("matrix", "square", "transposed")

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 3),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 8),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "warm-restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30, cycle_momentum=False),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.MultiStepLR(optimizer, [3, 5])]
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}
LOADED_INTO = ("fresh", "stepped", "partly-stepped", "gradients-waiting")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A run over parameters that get gradient at some steps, saved after some of these, and resumed."""

    optimizer: str
    shapes: tuple[str, ...]  # one parameter each
    group_of: tuple[int, ...]  # the group of each parameter
    before: tuple[frozenset[int], ...]  # a step: the parameters that get gradient, before the save
    after: tuple[frozenset[int], ...]  # and after it
    loaded_into: str = "fresh"
    scheduler: str = "none"
    frozen: frozenset[int] = frozenset()  # require no gradient any more at the save, and stay in the optimizer
    empty_group: bool = False
    tied: bool = False  # the first parameter has a second name
    reversed_groups: bool = False  # groups in another order at the load
    dtype: torch.dtype = torch.float32

    @property
    def kind(self) -> Kind:
        """What the optimizer can do."""
        return OTHERS.get(self.optimizer) or OPTIMIZERS[self.optimizer]


@dataclasses.dataclass
class Party:
    """A model with its optimizer and scheduler, in one of the runs of a scenario."""

    scenario: Scenario
    model: nn.Module
    params: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def step(self, number: int, chosen: frozenset[int]) -> None:
        """One update from seeded gradients."""
        kind = self.scenario.kind
        self.give(number, chosen)
        if kind.closure:
            self.optimizer.step(lambda: sum(param.grad.sum() for param in self.params if param.grad is not None))
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            # The plateau's wants a metric; what is not torch's own, an increment.
            plain = isinstance(self.scheduler, lr_scheduler.LRScheduler)
            plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([1.0] if plateau else [] if plain else [1]))
        self.optimizer.zero_grad()

    def give(self, number: int, chosen: frozenset[int]) -> None:
        """Set gradients, as a backward would."""
        for index in sorted(chosen):
            param = self.params[index]
            generator = torch.Generator().manual_seed(1000 * number + index)
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            gradient = torch.empty_like(param).copy_(gradient)  # with the parameter's strides
            param.grad = gradient.to_sparse() if self.scenario.kind.sparse else gradient

    def snapshot(self) -> dict[str, Any]:
        """A copy of all that the run goes on from; groups by the parameters in them, since their order may differ.

        An empty group is left out, and what a scheduler last did to it: the layout holds options a parameter.
        """
        found = snapshot(self.model, self.optimizer, self.scheduler if self.scheduler is not None else _Silent())
        names = {id(param): name for name, param in self.model.named_parameters()}
        groups = zip(found.pop("groups"), self.optimizer.param_groups, strict=True)
        found["groups"] = {
            str([names[id(param)] for param in group["params"]]): options
            for options, group in groups
            if group["params"]
        }
        if self.scenario.empty_group:
            found["scheduler"] = _without(found["scheduler"], "_last_lr")
        return found


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.to_dense().clone()


def _without(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, name) for key, item in value.items() if key != name}
    return [_without(item, name) for item in value] if isinstance(value, list) else value


class _Silent:
    def state_dict(self) -> dict[str, Any]:
        return {}


def start(scenario: Scenario, *, again: bool = False) -> Party:
    """Build the run from its beginning; ``again`` as the one that the checkpoint is loaded into."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Module()
    params = []
    for index, shape in enumerate(scenario.shapes):
        data = torch.randn(SHAPES[shape], generator=generator).to(scenario.dtype)
        if shape == "transposed":
            data = data.t()
        child = nn.Module()
        child.weight = nn.Parameter(data, requires_grad=not scenario.kind.frozen)
        model.add_module(f"layer{index}", child)
        params.append(child.weight)
    if scenario.tied:
        model.add_module("tied", model.get_submodule("layer0"))
    numbers = sorted(set(scenario.group_of))
    groups: list[dict[str, Any]] = []
    for number in numbers:
        groups.append(
            {"params": [param for param, own in zip(params, scenario.group_of, strict=True) if own == number]}
        )
    if scenario.empty_group:
        groups.append({"params": []})
    if again and scenario.reversed_groups:
        groups.reverse()
        numbers.reverse()
    optimizer = scenario.kind.make(params if scenario.kind.closure else groups)
    # Groups of their own: what the one that is loaded into was built with must not matter.
    for position, group in enumerate(optimizer.param_groups):
        if len(numbers) > 1 and position < len(numbers):
            group["lr"] = group["lr"] * (5.0 if again else 1.0 + numbers[position] / 2)
    return Party(scenario, model, params, optimizer, SCHEDULERS[scenario.scheduler](optimizer))


def disturb(party: Party) -> None:
    """Bring the run that is loaded into to where the scenario wants it."""
    everything = frozenset(range(len(party.params)))
    if party.scenario.loaded_into == "stepped":
        party.step(901, everything)
        party.step(902, everything)
    elif party.scenario.loaded_into == "partly-stepped":
        party.step(901, frozenset({0}))
    elif party.scenario.loaded_into == "gradients-waiting":
        party.give(903, frozenset({len(party.params) - 1}))


@dataclasses.dataclass
class Played:
    """What came of a scenario: paths at which the runs differ, and by how much their parameters do in the end."""

    differences: list[str]
    drift: float


def play(scenario: Scenario, save: Callable[[Party], Any], load: Callable[[Party], Any], moved: bool = True) -> Played:
    """Run the scenario three times: uninterrupted, saved, and resumed from the save.

    Args:
        scenario: What to run.
        save: Saves optimizer and scheduler of a party.
        load: Loads them into another one; weights are copied here.
        moved: Whether a save that moves the live run counts.

    Returns:
        Differences begin with ``saved`` for the run that was saved, with ``resumed`` for the resumed one.
    """
    alone, saved, resumed = start(scenario), start(scenario), start(scenario, again=True)
    for party in (alone, saved):
        for number, chosen in enumerate(scenario.before):
            party.step(number, chosen)
        for index in scenario.frozen:
            party.params[index].requires_grad_(False)
    save(saved)
    found = [f"saved{path}" for path in differences(alone.snapshot(), saved.snapshot())] if moved else []
    for index in scenario.frozen:
        resumed.params[index].requires_grad_(False)
    disturb(resumed)
    with torch.no_grad():
        for mine, theirs in zip(resumed.params, alone.params, strict=True):
            mine.copy_(theirs)
    waiting = [_dense(param.grad) for param in resumed.params]
    load(resumed)
    found += differences(waiting, [_dense(param.grad) for param in resumed.params], "resumed.gradient")
    resumed.optimizer.zero_grad()
    found += [f"resumed{path}" for path in differences(alone.snapshot(), resumed.snapshot())]
    for number, chosen in enumerate(scenario.after, start=len(scenario.before)):
        for party in (alone, saved, resumed):
            party.step(number, chosen)
    for name, party in (("saved", saved), ("resumed", resumed)):
        if name == "resumed" or moved:
            found += [f"{name}, later{path}" for path in differences(alone.snapshot(), party.snapshot())]
    drift = 0.0
    for party in (saved, resumed):
        for mine, theirs in zip(party.params, alone.params, strict=True):
            drift = max([drift, *((mine - theirs).abs().flatten().tolist())])
    return Played(found, drift)

# SPDX-License-Identifier: Apache-2.0
"""A single-process run with parameters that are used, used late, and never used; and bitwise comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH = 4


@dataclasses.dataclass
class Run:
    """Model, optimizer and scheduler of one training run."""

    model: nn.ModuleDict
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def train(self, steps: range, names: list[str]) -> None:
        """Step through seeded data; only the layers of ``names`` enter the loss."""
        for step in steps:
            data = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
            sum(self.model[name](data).square().mean() for name in names).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, Any]:
        """A copy of all that the run goes on from."""
        return snapshot(self.model, self.optimizer, self.scheduler)


def start_run(names: tuple[str, ...] = ("used", "late", "never"), **options: Any) -> Run:
    """A fresh AdamW run over one ``Linear(4, 4)`` a name."""
    generator = torch.Generator().manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})
    return Run(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))


def names_of(model: nn.Module, params: list[nn.Parameter]) -> list[str]:
    """Sorted fully qualified names of ``params`` in ``model``."""
    wanted = {id(param) for param in params}
    return sorted(name for name, param in model.named_parameters() if id(param) in wanted)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """A copy of all that training goes on from: this rank's shards, optimizer state by name, options, scheduler."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        "parameters": {name: _copy(param) for name, param in model.named_parameters()},
        "state": {
            names[id(param)]: {entry: _copy(value) for entry, value in state.items()}
            for param, state in optimizer.state.items()
            if state
        },
        "groups": [
            {option: _copy(value) for option, value in group.items() if option != "params"}
            for group in optimizer.param_groups
        ],
        "scheduler": scheduler.state_dict(),
    }


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Paths at which two snapshots are not equal bit for bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        return [] if same else [where]
    if isinstance(left, dict) and isinstance(right, dict):
        found = [f"{where}.{key} (on one side only)" for key in left.keys() ^ right.keys()]
        for key in left.keys() & right.keys():
            found += differences(left[key], right[key], f"{where}.{key}")
        return sorted(found)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return [
            path
            for index, pair in enumerate(zip(left, right, strict=False))
            for path in differences(*pair, f"{where}[{index}]")
        ]
    return [] if type(left) is type(right) and left == right else [where]


def _copy(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value

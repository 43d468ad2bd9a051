# SPDX-License-Identifier: Apache-2.0
"""All of ``torch.optim``, in each of its modes, and what torch itself does not let each of them do."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import optim


@dataclasses.dataclass(frozen=True)
class Kind:
    """One optimizer class with options, and torch's own limits on it."""

    make: Callable[[Any], optim.Optimizer]
    matrices: bool = False  # takes two-dimensional parameters only
    elements: bool = False  # fails on a parameter that has no elements
    together: bool = False  # cannot update some parameters for the first time beside others
    sparse: bool = False  # takes sparse gradients only
    closure: bool = False  # steps on a closure, keeps the state of all parameters with the first
    frozen: bool = False  # does not step leaves that require grad
    steps: bool = True  # steps on a CPU at all
    saved: bool = True  # torch can flatten its state at all


VARIANTS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd-momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd-dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd-nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"lr": 1e-2}),
    "adam-l2": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam-amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw": (optim.AdamW, {"lr": 1e-2}),
    "adamw-amsgrad": (optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "nadam": (optim.NAdam, {"weight_decay": 0.1}),
    "nadam-decoupled": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"weight_decay": 0.1}),
    "radam-decoupled": (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"weight_decay": 0.1}),
    "rmsprop-centered": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "rprop": (optim.Rprop, {"lr": 0.05}),
    "asgd": (optim.ASGD, {"lr": 0.05, "t0": 2, "weight_decay": 0.1}),
    "adafactor": (optim.Adafactor, {"weight_decay": 0.1}),
    "muon": (optim.Muon, {"lr": 0.02}),
}
MODES: dict[str, dict[str, Any]] = {
    "maximize": {"maximize": True},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "differentiable": {"differentiable": True},
    "tensor-lr": {"lr": None, "foreach": False},
}
# One variant of a class stands for the class in the modes; where the modes' code differs between variants, several.
IN_MODES = {
    *("sgd", "sgd-nesterov", "adam-l2", "adam-amsgrad", "adamw", "nadam", "radam", "adamax", "adagrad", "adadelta"),
    *("rmsprop-centered", "rprop", "asgd", "adafactor"),
}


def _supports(cls: type[optim.Optimizer], mode: str, options: dict[str, Any]) -> bool:
    known = inspect.signature(cls.__init__).parameters
    if not set(options) <= set(known):
        return False
    if mode == "fused":
        return cls in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
    if mode == "tensor-lr":
        return cls in (
            optim.SGD,
            optim.Adam,
            optim.AdamW,
            optim.RMSprop,
            optim.Adagrad,
            optim.Adadelta,
            optim.Adafactor,
        )
    return True


def _kind(name: str, cls: type[optim.Optimizer], mode: str, options: dict[str, Any]) -> Kind:
    def make(params: Any) -> optim.Optimizer:
        own = dict(options)
        if "lr" in own and own["lr"] is None:
            own["lr"] = torch.tensor(VARIANTS[name][1].get("lr", 1e-2))
        return cls(params, **own)

    return Kind(
        make,
        matrices=cls is optim.Muon,
        elements=cls in (optim.Adafactor, optim.Muon),
        together=mode == "fused" and bool(options.get("momentum")),
        frozen=mode == "differentiable",
        steps=mode != "capturable",
    )


def _catalogue() -> dict[str, Kind]:
    found = {name: _kind(name, cls, "", options) for name, (cls, options) in VARIANTS.items()}
    for name in VARIANTS:
        if name not in IN_MODES:
            continue
        cls, options = VARIANTS[name]
        for mode, added in MODES.items():
            if _supports(cls, mode, added):
                found[f"{name}-{mode}"] = _kind(name, cls, mode, {**options, **added})
    found["sparse-adam"] = Kind(lambda params: optim.SparseAdam(params, lr=1e-2), matrices=True, sparse=True)
    found["lbfgs"] = Kind(
        lambda params: optim.LBFGS(params, lr=0.1, max_iter=3), closure=True, elements=True, saved=False
    )
    found["lbfgs-wolfe"] = Kind(
        lambda params: optim.LBFGS(params, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
        closure=True,
        elements=True,
        saved=False,
    )
    return found


OPTIMIZERS = _catalogue()


class StepInGroup(optim.Optimizer):
    """Keeps its step in the group, as fused optimizers of other libraries do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Momentum whose weight depends on the group's step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    moment = state.setdefault("moment", torch.zeros_like(param))
                    moment.mul_(1 - 1 / (1 + group["step"])).add_(param.grad)
                    param.sub_(moment, alpha=float(group["lr"]))


class Nested(optim.Optimizer):
    """State in nested dicts, of other shapes than the parameter's, with numbers of Python's own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Scale by factors that are kept a side."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    rows = param.size(0) if param.ndim else 1
                    state["pre"] = {"l": torch.zeros(rows, rows), "r": {"diagonal": torch.zeros(3), "count": 0}}
                    state["scale"] = 1.0
                pre = state["pre"]
                pre["l"].add_(float(param.grad.sum()))
                pre["r"]["diagonal"].add_(0.5)
                pre["r"]["count"] += 1
                state["scale"] = state["scale"] * 0.9
                factor = state["scale"] / (1 + float(pre["l"].abs().sum()) + pre["r"]["count"])
                param.sub_(param.grad * factor, alpha=float(group["lr"]))


class EightBit(optim.Optimizer):
    """A moment in int8 with a scale."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Momentum, quantised after each update."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                moment = state["codes"] * state["scale"] if state else torch.zeros_like(param)
                moment = moment.mul(0.9).add(param.grad)
                state["scale"] = (moment.abs().max() / 127).clamp(min=1e-8)
                state["codes"] = (moment / state["scale"]).round().to(torch.int8)
                state["step"] = state.get("step", 0) + 1
                param.sub_(moment, alpha=float(group["lr"]))


# Not torch's own: the loader cannot ask these what a whole entry is.
OTHERS: dict[str, Kind] = {
    "step-in-group": Kind(StepInGroup),
    "nested-state": Kind(Nested),
    "int8-with-scale": Kind(EightBit, elements=True),
}

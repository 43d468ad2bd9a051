# SPDX-License-Identifier: Apache-2.0
"""The live side: parameters by name, and the state that their optimizer gives each once it has been updated."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_automodel_shim.components.checkpoint.optimizer_checkpoint import (
    OptimizerCheckpoint,
    OptimizerStateError,
    plain_name,
)
from nemo_automodel_shim.components.checkpoint.rank_agreement import describe_error

logger = logging.getLogger(__name__)


def iter_named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter with the fully qualified name that ``torch.distributed.checkpoint`` gives it.

    Compile, activation-checkpoint and DDP wrappers leave no trace in the name. A parameter that is shared appears
    once, under its first name.

    Args:
        model: The root module.

    Yields:
        Pairs of name and parameter, in the order of ``nn.Module.named_parameters``.
    """
    replicated = [
        f"{plain_name(name)}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]
    for name, param in model.named_parameters():
        name = plain_name(name)
        for prefix in replicated:
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        yield name, param


@dataclass
class LiveParameter:
    """One parameter of one optimizer."""

    name: str
    param: nn.Parameter
    optimizer: int
    group_index: int
    group: dict[str, Any]
    index: int  # the integer id that Optimizer.state_dict gives the parameter

    @property
    def options(self) -> dict[str, Any]:
        return {option: value for option, value in self.group.items() if option != "params"}


def live_parameters(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer], parts: Sequence[tuple[str, ...]] = ()
) -> list[LiveParameter]:
    """List the parameters of each optimizer, by name; below the last word of its part, where it has one."""
    if len(models) != len(optimizers):
        raise OptimizerStateError(
            f"{len(models)} model parts and {len(optimizers)} optimizers: pass one optimizer a part."
        )
    lives = []
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=False)):
        names: dict[int, str] = {}
        prefix = "".join(f"{word}." for word in parts[number][-1:]) if parts else ""
        for name, param in iter_named_parameters(model):
            names.setdefault(id(param), prefix + name)
        index = 0
        for group_index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise OptimizerStateError(
                        f"Parameter {index} of optimizer {number} (shape {list(param.shape)}) is not in the model "
                        "that was passed with it; pass the model whose parameters the optimizer was built from."
                    )
                lives.append(LiveParameter(names[id(param)], param, number, group_index, group, index))
                index += 1
    return lives


def has_stepped(optimizer: torch.optim.Optimizer, *params: nn.Parameter) -> bool:
    """Whether any of ``params`` (all, if none is named) has state with a step above 0, or without a step."""
    states = [optimizer.state.get(param) for param in params] or list(optimizer.state.values())
    return any(state and float(state.get("step", 1)) > 0 for state in states)


class ExpectedState:
    """Which state entries a whole parameter has, and which of them have the parameter's shape."""

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        lives: list[LiveParameter],
        groups: dict[tuple[int, int], dict[str, Any]],
        checkpoint: OptimizerCheckpoint | None = None,
    ) -> None:
        self._optimizers, self._groups = optimizers, groups
        self._probed: dict[tuple, dict[str, tuple[bool, torch.dtype | None]] | None] = {}
        # What the parameters of a group have on disk, for optimizers that cannot be asked.
        self._own: dict[str, frozenset[str]] = {}
        self._saved: dict[tuple, set[frozenset[str]]] = defaultdict(set)
        # Entry and dimensions -> how many have the parameter's shape, how many another.
        self._shapes: dict[tuple, Counter] = defaultdict(Counter)
        self._dtypes: dict[tuple, set[torch.dtype]] = defaultdict(set)
        for live in lives if checkpoint is not None else ():
            entries = checkpoint.entries.get(live.name, {})
            self._own[live.name] = frozenset(entries)
            self._saved[(*self._group(live), live.param.size(), live.param.dtype)].add(frozenset(entries))
            for entry, key in entries.items():
                stored = checkpoint.stored(key)
                if stored is not None:
                    self._dtypes[(*self._group(live), live.param.dtype, entry)].add(stored.properties.dtype)
                if live.param.numel() > 1:  # a scale or a count has the shape of a small parameter by chance
                    same = stored is not None and stored.size == live.param.size()
                    self._shapes[(*self._group(live), entry)][live.param.ndim, same] += 1
        self._any = any(self._own.values()) or any(any(optimizer.state.values()) for optimizer in optimizers)

    @staticmethod
    def _group(live: LiveParameter) -> tuple[int, int]:
        return (live.optimizer, live.group_index)

    def _ask(self, live: LiveParameter) -> dict[str, tuple[bool, torch.dtype | None]] | None:
        kind = (*self._group(live), live.param.ndim, live.param.dtype, live.param.device.type)
        if kind not in self._probed:
            options = self._groups[self._group(live)]
            self._probed[kind] = _probe(self._optimizers[live.optimizer], options, live.param)
        return self._probed[kind]

    def any_state(self, live: LiveParameter) -> bool:
        """Whether the optimizer gives such a parameter state at all."""
        asked = self._ask(live)
        return bool(asked) if asked is not None else self._any

    def entries(self, live: LiveParameter) -> Iterable[str]:
        """Names of the entries that a whole parameter has.

        Where the optimizer cannot be asked, an entry counts as lost if a parameter of the same group, shape and dtype
        has all that this one has, and that entry too.
        """
        asked = self._ask(live)
        if asked is not None:
            return asked
        own = self._own.get(live.name, frozenset())
        siblings = self._saved[(*self._group(live), live.param.size(), live.param.dtype)]
        return max((each for each in siblings if each >= own), key=len, default=own)

    def has_the_parameters_shape(self, live: LiveParameter, entry: str) -> bool:
        """Whether ``entry``, which has another shape, ought to have that of the parameter.

        Where the optimizer cannot be asked, it ought to if it has for all other parameters of the group that have as
        many dimensions or more.
        """
        asked = self._ask(live)
        if asked is not None:
            return asked.get(entry, (False, None))[0]
        shapes = self._shapes[(*self._group(live), entry)]
        found = {
            same: sum(count for (ndim, is_same), count in shapes.items() if is_same == same and ndim >= live.param.ndim)
            for same in (True, False)
        }
        return live.param.numel() > 1 and found[True] > 0 and found[False] == 1

    def keeps_dtype(self, live: LiveParameter, entry: str, dtype: torch.dtype) -> bool:
        """Whether ``entry`` has ``dtype`` because the optimizer made it so, whatever the parameter's dtype.

        Where the optimizer cannot be asked: if the file has no other dtype of the entry in the group.
        """
        asked = self._ask(live)
        if asked is not None:
            return asked.get(entry, (False, None))[1] == dtype
        return self._dtypes[(*self._group(live), live.param.dtype, entry)] == {dtype}


def _probe(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], param: nn.Parameter
) -> dict[str, tuple[bool, torch.dtype | None]] | None:
    """Step a stand-in of ``optimizer`` on a tiny parameter: entry -> whether it has the parameter's shape, and dtype.

    The live optimizer and its parameters are not involved. ``None`` where the step is not torch's own, or cannot be
    taken on such a parameter.
    """
    step = inspect.unwrap(type(optimizer).step)  # without the hooks, which belong to real steps
    if not step.__module__.startswith("torch.optim."):
        return None
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    try:
        tiny = nn.Parameter(torch.zeros([3] * param.ndim, dtype=param.dtype, device=param.device))
        tiny.grad = torch.zeros_like(tiny)
        stand_in.__dict__["state"] = defaultdict(dict)
        stand_in.__dict__["param_groups"] = [{**copy.deepcopy(options), "params": [tiny]}]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            step(stand_in)
    except Exception as exc:
        logger.debug("%s cannot be probed: %s", type(optimizer).__name__, describe_error(exc))
        return None
    return {
        name: (value.ndim > 0 and value.shape == tiny.shape, value.dtype)
        if isinstance(value, torch.Tensor)
        else (False, None)
        for name, value in stand_in.__dict__["state"].get(tiny, {}).items()
        if value is not None
    }

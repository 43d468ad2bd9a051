# SPDX-License-Identifier: Apache-2.0
"""The saved scheduler, as each live one takes it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch

from nemo_automodel_shim.components.checkpoint.optimizer_checkpoint import OptimizerCheckpoint, OptimizerStateError

_SCHEDULER = "sched"
# Options that torch's schedulers put into a group.
SCHEDULER_OPTIONS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}
)
# What a scheduler keeps for each group, by the group's place.
_BY_GROUP = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "base_momentums", "max_momentums")


def read_schedulers(
    checkpoint: OptimizerCheckpoint,
    schedulers: list[Any],
    optimizers: list[torch.optim.Optimizer],
    groups: dict[tuple[int, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The saved scheduler once for each live one, with keys of the type and groups in the order of the live one."""
    paths = {key: path for key, path in checkpoint.metadata.paths.items() if len(path) > 1 and path[0] == _SCHEDULER}
    if schedulers and not paths:
        raise OptimizerStateError(
            f"{checkpoint.path} holds no scheduler ({_SCHEDULER}.*), but one was passed; pass scheduler=None to "
            "resume the optimizer alone."
        )
    values, _ = checkpoint.read_values(paths if schedulers else ())
    state = nest({paths[key][1:]: value for key, value in values.items()})
    scheduled = []
    for number, scheduler in enumerate(schedulers):
        # Some schedulers take entries out of the dict that they are given: each gets its own.
        own = typed_like(copy.deepcopy(state), scheduler.state_dict())
        owner = getattr(scheduler, "optimizer", None)
        place = next((at for at, each in enumerate(optimizers) if each is owner), min(number, len(optimizers) - 1))
        mine = [groups[key] for key in sorted(groups) if key[0] == place]
        _order_groups(checkpoint.path, own, mine)
        _fill_empty_groups(own, optimizers[place], mine)
        scheduled.append(own)
    return scheduled


def _order_groups(path: str, state: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Bring what a scheduler keeps for each group into the live order, if that is another than at the save."""
    for inner in state.get("_schedulers", ()):
        if isinstance(inner, dict):
            _order_groups(path, inner, groups)
    saved = state.get("base_lrs")
    live = [_number(group.get("initial_lr")) for group in groups]
    if not isinstance(saved, list) or None in live:
        return
    known = [_number(value) for value in saved]
    if known == live or None in known or sorted(known) != sorted(live):
        return
    if len(set(known)) < len(known):
        raise OptimizerStateError(
            f"The parameter groups stand in another order than in {path}, where the scheduler has base_lrs {known} "
            f"and the live groups have initial_lr {live}. Build the groups in the order of the save."
        )
    order = [known.index(value) for value in live]
    for key in _BY_GROUP:
        values = state.get(key)
        if isinstance(values, list) and len(values) == len(order):
            state[key] = [values[at] for at in order]


def _fill_empty_groups(state: dict[str, Any], optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    # The options of a group without parameters are not in the file; the scheduler has them.
    for option, key in (("lr", "_last_lr"), ("initial_lr", "base_lrs")):
        values = state.get(key)
        if isinstance(values, list) and len(values) == len(groups):
            for live, group, value in zip(optimizer.param_groups, groups, values, strict=True):
                if not live["params"] and not isinstance(group.get(option), torch.Tensor):
                    group[option] = value


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else None


def nest(flat: dict[tuple[Any, ...], Any]) -> dict[Any, Any]:
    nested: dict[Any, Any] = {}
    for (*parents, leaf), value in flat.items():
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return nested


def typed_like(saved: Any, live: Any) -> Any:
    """Undo what DCP does to containers, by the type that the live one has.

    Integer keys became text, lists that hold tensors or dicts became dicts by position, and empty dicts are gone.
    """
    if not isinstance(saved, dict):
        return saved
    if saved and all(isinstance(key, int) for key in saved):
        items = live if isinstance(live, (list, tuple)) else ()
        return [typed_like(saved[at], items[at] if at < len(items) else None) for at in sorted(saved)]
    live = live if isinstance(live, dict) else {}
    keys: dict[Any, Any] = {str(key): key for key in live}
    if isinstance(live, Counter) or (live and all(isinstance(key, int) for key in live)):
        keys |= {key: int(key) for key in saved if key.lstrip("-").isdigit()}
    typed = {keys.get(key, key): typed_like(value, live.get(keys.get(key, key))) for key, value in saved.items()}
    if isinstance(live, Counter):
        return Counter(typed)
    return typed | {key: {} for key, value in live.items() if isinstance(value, dict) and key not in typed}

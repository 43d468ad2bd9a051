# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in which some parameters have none.

A parameter that never received a gradient has no optimizer state, and a checkpoint is right to hold none for it.
Loading must leave it without state too: its first gradient then starts it at step 0, as in a run that was never
interrupted. ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` cannot express that. It fills an
optimizer that has no state by a step with zero gradients, so the template asks for state of every parameter, and
where missing keys are tolerated the filled ``step=1`` stays.

Here the template comes from the checkpoint's own metadata and the live parameter groups:

1. look: list the live parameters by fully qualified name, take the metadata from rank 0, reach a verdict on each;
2. read: fetch the keys that the verdicts ask for, by this rank alone;
3. agree: one failure on any rank is the same error on all ranks, and nothing has been touched yet;
4. act: ``Optimizer.load_state_dict``, then the scheduler; a failure here is rolled back on all ranks.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import numbers
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate

from nemo_automodel_shim.components.checkpoint.live_optimizer import (
    ExpectedState,
    LiveParameter,
    has_stepped,
    live_parameters,
)
from nemo_automodel_shim.components.checkpoint.optimizer_checkpoint import (
    OptimizerCheckpoint,
    OptimizerStateError,
    open_metadata,
    without_collections,
)
from nemo_automodel_shim.components.checkpoint.rank_agreement import (
    any_rank,
    describe_error,
    format_ranks,
    gather_texts,
    same_on_all_ranks,
)
from nemo_automodel_shim.components.checkpoint.scheduler_state import (
    SCHEDULER_OPTIONS,
    nest,
    read_schedulers,
    typed_like,
)

logger = logging.getLogger(__name__)

_EXAMPLES = 5


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Flattened state of ``optimizer``, without moving an optimizer that has not stepped.

    Args:
        model: The module whose parameters the optimizer updates.
        optimizer: The optimizer to describe. It is not changed.

    Returns:
        ``state.<name>.<entry>`` and ``param_groups.<name>.<option>``, the keys of
        ``get_optimizer_state_dict(..., flatten_optimizer_state_dict=True)``. Parameters without state have no
        ``state`` keys; for each that would have some once updated there is ``never_updated.<name>``, by which a load
        tells it from one whose state was lost.

    Raises:
        OptimizerStateError: If the optimizer holds a parameter that is not in the model, or state of a form that
            cannot be saved by name.
    """
    lives = live_parameters([model], [optimizer])
    if any(optimizer.state.values()):
        try:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            flat = get_optimizer_state_dict(model, optimizer, options=options)
        except NotImplementedError as exc:
            raise OptimizerStateError(
                f"State of {type(optimizer).__name__} cannot be saved by parameter name ({describe_error(exc)}). "
                "Nothing was written; use another optimizer, or save its own state_dict()."
            ) from exc
    else:
        # torch would fill an optimizer without state by a step with zero gradients, and that moves the live run.
        flat = {f"param_groups.{live.name}.{option}": value for live in lives for option, value in live.options.items()}
    return flat | {f"never_updated.{live.name}": True for live in _cold([optimizer], lives)}


def positional_optimizer_state_dict(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """``Optimizer.state_dict`` with a record of the parameters without state.

    Args:
        models: The model, as a list of one part.
        optimizers: Its optimizer. It is not changed.

    Returns:
        ``state`` and ``param_groups`` as ``Optimizer.state_dict`` gives them, by integer id, and ``never_updated``, of
        the ids that would have state once updated and have none, where there are any.
    """
    cold = _cold(optimizers, live_parameters(models, optimizers))
    return optimizers[0].state_dict() | ({"never_updated": {live.index: True for live in cold}} if cold else {})


def validate_optimizers_for_save(
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    *,
    by_position: bool = False,
    parts: list[tuple[str, ...]] | None = None,
) -> None:
    """Check, before a save, that the ranks agree on the state; say once how many parameters have none.

    A parameter is one key in the file. Where some ranks have state for it and others have none, or where they count
    different steps, the file could hold the one or the other only, and nobody would be told which. Every rank of the
    default process group must call this; it costs one small all-gather, and a second exchange where the ranks hold
    different parameters.

    Args:
        models: The model parts of this rank.
        optimizers: One optimizer a model part. They are not changed.
        by_position: Whether the file will have integer ids (``positional_optimizer_state_dict``). One id is one key,
            so all ranks must then hold the same parameter under it.
        parts: Where the state dict of each optimizer will lie below ``optim``; ``None`` for one optimizer, which lies
            there itself.

    Raises:
        OptimizerStateError: On every rank alike, if the ranks do not agree. Nothing has been written then.
    """
    summary: dict[str, str] = {}
    cold: list[LiveParameter] = []
    error = None
    try:
        if by_position and len(parts or [()]) != len(optimizers):
            raise OptimizerStateError(
                f"{len(optimizers)} optimizers on one rank: state by integer ids is that of one of them, the others "
                "would be lost. Train without several model parts, or without PEFT on quantised weights or EP."
            )
        lives = live_parameters(models, optimizers, parts or () if by_position else ())
        summary = _summary(optimizers, lives)
        if by_position:
            summary = {
                f"parameter {live.index} of {'.'.join((parts or [()])[live.optimizer]) or 'the optimizer'}": (
                    f"{live.name}: {summary[live.name]}"
                )
                for live in lives
            }
        cold = _cold(optimizers, lives)
    except Exception as exc:
        error = str(exc) if isinstance(exc, OptimizerStateError) else describe_error(exc)
    text = json.dumps(summary, sort_keys=True) if error is None else error
    if not same_on_all_ranks(hashlib.sha256(text.encode()).digest() + bytes([error is not None])):
        texts, flags = gather_texts(text, error is not None)
        failed = {rank: said for rank, (said, (bad,)) in enumerate(zip(texts, flags, strict=True)) if bad}
        found = _by_text(failed) if failed else _disagreement([json.loads(said or "{}") for said in texts])
        if found:
            raise OptimizerStateError(f"The optimizer was not saved; nothing was written. {found}")
    elif error is not None:
        raise OptimizerStateError(f"The optimizer was not saved; nothing was written. {error}")
    if cold:
        logger.info(
            "Optimizer state: %s of %d never updated, saved without state: %s.",
            _count(cold, "parameter"),
            len(summary),
            _some([live.name for live in cold]),
        )


def load_optimizer_state(
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    schedulers: list[Any] | None,
    path: str | os.PathLike,
    *,
    allow_new_parameters: bool = False,
    parts: list[tuple[str, ...]] | None = None,
) -> None:
    """Load what ``path`` holds for the live parameters; leave without state what it lists without state.

    Every rank of the default process group must call this. Each live parameter is one of: *restored* (its whole
    state is saved), *never updated* (listed, no state saved: it stays without state), *damaged* (part of its state
    is saved: refused) or *unknown* (not listed: refused, or started cold with ``allow_new_parameters``). Saved
    parameters that no rank holds any more are dropped and reported.

    Args:
        models: The model parts of this rank.
        optimizers: One optimizer a model part.
        schedulers: Schedulers to load from the saved one, or ``None`` to leave schedulers alone.
        path: Directory of the DCP checkpoint.
        allow_new_parameters: Start parameters that the checkpoint does not list without state. Their group's
            options still come from the checkpoint.
        parts: Where the state dict of each optimizer lies below ``optim``, in a file with integer ids; ``None`` for one
            optimizer, which lies there itself.

    Raises:
        OptimizerStateError: On every rank alike, if any rank cannot load. No optimizer, parameter group or
            scheduler has been changed then.
    """
    with without_collections():
        _load(models, optimizers, schedulers or [], os.fspath(path), allow_new_parameters, parts or [()])


def _load(
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    schedulers: list[Any],
    path: str,
    allow_new_parameters: bool,
    parts: list[tuple[str, ...]],
) -> None:
    loaded: list[dict[str, Any]] = []
    scheduled: list[dict[str, Any]] = []
    lives: list[LiveParameter] = []
    restored: dict[tuple[int, int], dict[str, Any]] = {}
    expected: ExpectedState | None = None
    seen, cause = _Seen(), None
    metadata, unreadable = open_metadata(path)
    try:
        lives = live_parameters(models, optimizers)
        seen.live = {live.name for live in lives}
        if unreadable is not None:
            raise OptimizerStateError(unreadable)
        checkpoint = OptimizerCheckpoint(path, metadata, seen.live)
        if checkpoint.by_position:
            _check_parts(path, parts, optimizers)
            lives = live_parameters(models, optimizers, parts)
            seen.live = {live.name for live in lives}
            checkpoint.name_positions(_names_by_group(parts, optimizers, lives))
        _look(checkpoint, seen, allow_new_parameters)
        groups = _read_groups(checkpoint, optimizers, lives, seen)
        expected = ExpectedState(optimizers, lives, groups, checkpoint)
        restored = _read_state(checkpoint, lives, expected, seen)
        scheduled = read_schedulers(checkpoint, schedulers, optimizers, groups)
        loaded = _assemble(optimizers, lives, groups, restored, seen)
    except Exception as exc:
        cause = exc
    _agree_before(path, cause, seen)

    before = _Snapshot(optimizers, schedulers)
    try:
        for optimizer, state in zip(optimizers, loaded, strict=False):
            optimizer.load_state_dict(state)
        _keep_dtypes(optimizers, lives, restored, expected)
        for scheduler, state in zip(schedulers, scheduled, strict=False):
            if "num_steps" in state and not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
                scheduler.num_steps = 0  # OptimizerParamScheduler adds the saved steps to those it has taken
            scheduler.load_state_dict(state)
    except Exception as exc:
        cause = exc
    try:
        dropped = _agree_after(path, cause, seen)
    except OptimizerStateError:
        before.restore()
        raise
    _report(path, seen, dropped)


@dataclass
class _Seen:
    """What a rank found, for the report and for the ranks to agree on."""

    listed: list[str] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    never_updated: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    defaulted: set[str] = field(default_factory=set)
    discarded: set[str] = field(default_factory=set)
    restored: int = 0


def _cold(optimizers: list[torch.optim.Optimizer], lives: list[LiveParameter]) -> list[LiveParameter]:
    """The parameters without state, of those to which the optimizer gives some."""
    expected = ExpectedState(optimizers, lives, {(live.optimizer, live.group_index): live.options for live in lives})
    bare = [live for live in lives if not optimizers[live.optimizer].state.get(live.param)]
    return [live for live in bare if expected.any_state(live)]


def _summary(optimizers: list[torch.optim.Optimizer], lives: list[LiveParameter]) -> dict[str, str]:
    """What the ranks must agree on, by parameter: whether there is state, and its counters."""
    counters: list[tuple[str, str, Any]] = []
    summary: dict[str, str] = {}
    for live in lives:
        state = optimizers[live.optimizer].state.get(live.param)
        summary[live.name] = "state" if state else "no state"
        for entry, value in (state or {}).items():
            scalar = isinstance(value, numbers.Number) or (isinstance(value, torch.Tensor) and value.ndim == 0)
            if scalar and not isinstance(value, DTensor) and (entry == "step" or live.param.ndim > 0):
                counters.append((live.name, str(entry), value))
    tensors: dict[torch.device, list[int]] = defaultdict(list)
    values = [value for _, _, value in counters]
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            tensors[value.device].append(place)
    for places in tensors.values():  # one transfer a device
        for place, value in zip(places, torch.stack([values[at].double() for at in places]).tolist(), strict=True):
            values[place] = value
    for (name, entry, _), value in zip(counters, values, strict=True):
        summary[name] += f", {entry} {float(value):.17g}" if isinstance(value, (int, float)) else f", {entry} {value}"
    return summary


def _disagreement(summaries: list[dict[str, str]]) -> str | None:
    """The parameters about which ranks that hold them say different things, in words."""
    said: dict[str, dict[str, list[int]]] = {}
    for rank, summary in enumerate(summaries):
        for name, text in summary.items():
            said.setdefault(name, {}).setdefault(text, []).append(rank)
    differ = [
        f"{name} ({'; '.join(f'{text} on rank {format_ranks(ranks)}' for text, ranks in texts.items())})"
        for name, texts in said.items()
        if len(texts) > 1
    ]
    if not differ:
        return None
    return (
        f"The ranks do not agree on the state of {_count(differ, 'parameter')}: {_some(differ)}. A file holds one "
        "value a parameter. Give the parameter a gradient on every rank (zeros where a rank has none) or on none."
    )


def _check_parts(path: str, parts: list[tuple[str, ...]], optimizers: list[torch.optim.Optimizer]) -> None:
    if len(parts) != len(optimizers):
        raise OptimizerStateError(
            f"{path} has integer ids in place of names, for one optimizer; there are {len(optimizers)}. Build the "
            "model parts that it was saved with."
        )


def _names_by_group(
    parts: list[tuple[str, ...]], optimizers: list[torch.optim.Optimizer], lives: list[LiveParameter]
) -> dict[tuple[str, ...], list[list[str]]]:
    names: dict[tuple[str, ...], list[list[str]]] = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        names[part] = [[] for _ in optimizer.param_groups]
    for live in lives:
        names[parts[live.optimizer]][live.group_index].append(live.name)
    return names


def _look(checkpoint: OptimizerCheckpoint, seen: _Seen, allow_new_parameters: bool) -> None:
    seen.listed = sorted(checkpoint.options)
    seen.new = sorted(seen.live - set(checkpoint.options))
    if not allow_new_parameters and seen.live and len(seen.new) == len(seen.live):
        raise OptimizerStateError(_nothing_in_common(checkpoint.path, seen.listed[0], seen.new[0]))
    if seen.new and not allow_new_parameters:
        raise OptimizerStateError(
            f"{_count(seen.new, 'live parameter')} not listed in {checkpoint.path}: {_some(seen.new)}. If they are "
            "new since the save (unfrozen, added), pass allow_new_parameters=True: they then start without state."
        )


def _nothing_in_common(path: str, saved: str, live: str) -> str:
    return (
        f"{path} and the live optimizer have no parameter in common: saved {saved!r}, live {live!r}. Is it the "
        "checkpoint of another model, or are the names prefixed differently?"
    )


def _read_groups(
    checkpoint: OptimizerCheckpoint, optimizers: list[torch.optim.Optimizer], lives: list[LiveParameter], seen: _Seen
) -> dict[tuple[int, int], dict[str, Any]]:
    """The saved options of each live group, by optimizer and group number."""
    template, raw = checkpoint.read_values(
        key for live in lives for key in checkpoint.options.get(live.name, {}).values()
    )
    owners: dict[tuple[int, int], dict[tuple[Any, ...], tuple[str, str]]] = defaultdict(dict)
    for live in lives:
        found = owners[live.optimizer, live.group_index]
        for place, key in checkpoint.options.get(live.name, {}).items():
            if place[0] == "param_names":
                continue  # names of the parameters that the group held then; the live group knows its own
            first_name, first_key = found.setdefault(place, (live.name, key))
            same = key in raw and raw.get(first_key) is raw[key]
            if not same and not _equal(template[first_key], template[key]):
                raise OptimizerStateError(
                    "Parameters of one live group have different saved values of "
                    f"{'.'.join(map(str, place))!r} in {checkpoint.path}: {template[first_key]!r} for {first_name}, "
                    f"{template[key]!r} for {live.name}. Build the optimizer with the groups that it was saved with."
                )
    groups: dict[tuple[int, int], dict[str, Any]] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            live_options = {option: value for option, value in group.items() if option != "params"}
            saved = nest({place: template[key] for place, (_, key) in owners[number, index].items()})
            saved = {option: typed_like(value, live_options.get(option)) for option, value in saved.items()}
            lacking = sorted(set(optimizer.defaults) - set(saved)) if saved else []
            strange = sorted(set(saved) - set(live_options) - SCHEDULER_OPTIONS)
            if lacking and strange:
                raise OptimizerStateError(
                    f"{checkpoint.path} was saved by another optimizer than {type(optimizer).__name__}: its groups "
                    f"have {', '.join(strange)} and lack {', '.join(lacking)}. Build the optimizer that it was saved "
                    "with."
                )
            absent = set(live_options) - set(saved) - {"param_names"} if saved else set()
            # What an optimizer has counted in its group is state: absent in the file, absent after the load.
            counted = absent - set(optimizer.defaults) - SCHEDULER_OPTIONS if has_stepped(optimizer) else set()
            seen.discarded |= counted
            seen.defaulted |= absent - counted
            kept = {option: value for option, value in live_options.items() if option not in counted}
            groups[number, index] = {**kept, **saved}
    return groups


def _read_state(
    checkpoint: OptimizerCheckpoint, lives: list[LiveParameter], expected: ExpectedState, seen: _Seen
) -> dict[tuple[int, int], dict[str, Any]]:
    """The saved state of each restored parameter, by optimizer number and parameter index."""
    template: dict[str, Any] = {}
    problems = []
    for live in lives:
        entries = checkpoint.entries.get(live.name)
        if not entries:
            if live.name not in checkpoint.options or not expected.any_state(live):
                continue
            if checkpoint.never_updated is not None and live.name not in checkpoint.never_updated:
                problems.append(f"{live.name} has lost its state (the file does not say that it was never updated)")
            else:
                seen.never_updated.append(live.name)
            continue
        lacking = sorted(name for name in expected.entries(live) if not _has(entries, name))
        if lacking:
            problems.append(f"{live.name} lacks {', '.join(lacking)} (saved: {', '.join(sorted(entries))})")
            continue
        for entry, key in entries.items():
            stored = checkpoint.stored(key)
            if stored is None:
                template[key] = None
                continue
            if stored.size != live.param.size() and expected.has_the_parameters_shape(live, entry):
                problems.append(
                    f"{live.name}: {entry} has shape {list(stored.size)}, the parameter {list(live.param.size())}"
                )
                break
            template[key] = _empty(live.param, entry, stored)
        else:
            seen.restored += 1
    if problems:
        raise OptimizerStateError(
            f"{checkpoint.path} holds damaged state of {_count(problems, 'parameter')}: {_some(problems, '; ')}. "
            "Resume from another checkpoint, or without optimizer state."
        )
    checkpoint.read(template)
    restored: dict[tuple[int, int], dict[str, Any]] = {}
    for live in lives:
        for entry, key in checkpoint.entries.get(live.name, {}).items():
            *parents, leaf = entry.split(".")
            node = restored.setdefault((live.optimizer, live.index), {})
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = template[key] if isinstance(template[key], torch.Tensor) else copy.deepcopy(template[key])
    return restored


def _empty(param: nn.Parameter, entry: str, stored: TensorStorageMetadata) -> torch.Tensor:
    """A tensor to read ``entry`` into, placed as the optimizer would place it for ``param``."""
    dtype = stored.properties.dtype
    if stored.size == param.size() and (param.ndim > 0 or (isinstance(param, DTensor) and entry != "step")):
        # empty_like keeps mesh, placements and strides; fused kernels compute wrong values where strides differ.
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    if isinstance(param, DTensor) and len(stored.size) > 0:
        # State of another shape (row and column factors) is what new_zeros makes of a DTensor: replicated.
        local = torch.empty(stored.size, dtype=dtype, device=param.device)
        return DTensor.from_local(local, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False)
    return torch.empty(stored.size, dtype=dtype, device="cpu")


def _assemble(
    optimizers: list[torch.optim.Optimizer],
    lives: list[LiveParameter],
    groups: dict[tuple[int, int], dict[str, Any]],
    restored: dict[tuple[int, int], dict[str, Any]],
    seen: _Seen,
) -> list[dict[str, Any]]:
    """What ``Optimizer.load_state_dict`` takes, an optimizer."""
    loaded = []
    new = set(seen.new)
    for number, optimizer in enumerate(optimizers):
        mine = [live for live in lives if live.optimizer == number]
        state = {live.index: restored[number, live.index] for live in mine if (number, live.index) in restored}
        # Adagrad makes its state when it is built: that is where a new parameter starts.
        state |= {
            live.index: optimizer.state[live.param]
            for live in mine
            if live.name in new and optimizer.state.get(live.param) and not has_stepped(optimizer, live.param)
        }
        loaded.append(
            {
                "state": state,
                "param_groups": [
                    {
                        **copy.deepcopy(groups[number, position]),
                        "params": [live.index for live in mine if live.group_index == position],
                    }
                    for position in range(len(optimizer.param_groups))
                ],
            }
        )
    return loaded


def _keep_dtypes(
    optimizers: list[torch.optim.Optimizer],
    lives: list[LiveParameter],
    restored: dict[tuple[int, int], dict[str, Any]],
    expected: ExpectedState | None,
) -> None:
    """Undo casts: ``Optimizer.load_state_dict`` gives floating state the parameter's dtype, whatever it had."""
    for live in lives:
        optimizer = optimizers[live.optimizer]
        if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or expected is None:
            continue  # it knows its own state
        state = optimizer.state.get(live.param)
        saved = restored.get((live.optimizer, live.index))
        if state and saved:
            _put_back(state, saved, "", live, expected)


def _put_back(
    state: dict[Any, Any], saved: dict[Any, Any], prefix: str, live: LiveParameter, expected: ExpectedState
) -> None:
    for entry, was in saved.items():
        now = state.get(entry)
        if isinstance(was, dict) and isinstance(now, dict):
            _put_back(now, was, f"{prefix}{entry}.", live, expected)
        elif (
            isinstance(was, torch.Tensor)
            and isinstance(now, torch.Tensor)
            and was.dtype != now.dtype
            and expected.keeps_dtype(live, f"{prefix}{entry}", was.dtype)
        ):
            state[entry] = was.to(now.device)


class _Snapshot:
    """The live objects before they are changed.

    ``Optimizer.load_state_dict`` replaces state and groups and fills neither; schedulers are changed in place, with
    those that they hold.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], schedulers: list[Any]) -> None:
        self._optimizers = [(optimizer, optimizer.state, optimizer.param_groups) for optimizer in optimizers]
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        met: set[int] = set()
        waiting = list(schedulers)
        while waiting:
            scheduler = waiting.pop()
            if id(scheduler) not in met and self._keep(scheduler):
                met.add(id(scheduler))
                held = [item for value in vars(scheduler).values() for item in self._items(value)]
                waiting.extend(item for item in held if isinstance(item, torch.optim.lr_scheduler.LRScheduler))
                for function in vars(scheduler).get("lr_lambdas", ()):
                    self._keep(function)

    def _keep(self, held: Any) -> bool:
        attributes = getattr(held, "__dict__", None)
        if not isinstance(attributes, dict) or inspect.isroutine(held):
            return False
        self._attributes.append((attributes, dict(attributes)))
        for value in attributes.values():
            if isinstance(value, (list, dict)):
                self._containers.append((value, value.copy()))
        return True

    @staticmethod
    def _items(value: Any) -> Iterable[Any]:
        return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)

    def restore(self) -> None:
        for optimizer, state, groups in self._optimizers:
            optimizer.state, optimizer.param_groups = state, groups
        for attributes, values in self._attributes:
            attributes.clear()
            attributes.update(values)
        for container, values in self._containers:
            if isinstance(container, dict):
                container.clear()
                container.update(values)
            else:
                container[:] = values


def _agree_before(path: str, cause: Exception | None, seen: _Seen) -> None:
    """Exchange failures, before anything has been touched; raise the same error on every rank if there is one."""
    common = len(seen.new) < len(seen.live)
    texts, flags = gather_texts(_text(cause), bool(seen.live), common)
    found = _by_text({rank: text for rank, text in enumerate(texts) if text is not None})
    if not found and any(holds for holds, _ in flags) and not any(shares for _, shares in flags):
        example = _nothing_in_common(path, seen.listed[0], seen.new[0]) if seen.new else None
        found = next(text for text in gather_texts(example)[0] if text is not None)
    _refuse(path, found, cause)


def _agree_after(path: str, cause: Exception | None, seen: _Seen) -> list[str]:
    """Exchange failures of acting; return the saved names that no rank holds."""
    failed, *held = any_rank([cause is not None, *(name in seen.live for name in seen.listed)])
    if failed:
        texts, _ = gather_texts(_text(cause))
        _refuse(path, _by_text({rank: text for rank, text in enumerate(texts) if text is not None}), cause)
    return [name for name, holds in zip(seen.listed, held, strict=True) if not holds]


def _refuse(path: str, found: str, cause: Exception | None) -> None:
    if found:
        raise OptimizerStateError(
            f"The optimizer was not resumed from {path}; nothing was changed on any rank. {found}"
        ) from cause


def _text(cause: Exception | None) -> str | None:
    if cause is None:
        return None
    return str(cause) if isinstance(cause, OptimizerStateError) else describe_error(cause)


def _by_text(texts: dict[int, str]) -> str:
    """Failures in words, those with the same text together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return " | ".join(f"rank {format_ranks(where)}: {text}" for text, where in ranks.items())


def _report(path: str, seen: _Seen, dropped: list[str]) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if seen.defaulted:
        logger.warning("%s has no group option %s; the live values stay.", path, ", ".join(sorted(seen.defaulted)))
    if seen.discarded:
        logger.warning(
            "%s has no group option %s, which the live optimizer counts in its groups; removed.",
            path,
            ", ".join(sorted(seen.discarded)),
        )
    if seen.new:
        logger.warning(
            "%s: %s not in the checkpoint, started without state: %s.",
            path,
            _count(seen.new, "parameter"),
            _some(seen.new),
        )
    if rank == 0:
        if dropped:
            logger.warning(
                "%s: state of %s dropped, which no optimizer holds any more (frozen or removed since): %s.",
                path,
                _count(dropped, "saved parameter"),
                _some(dropped),
            )
        logger.info(
            "%s: optimizer state of %d parameters restored, %d never updated and left without state.",
            path,
            seen.restored,
            len(seen.never_updated),
        )


def _has(entries: dict[str, str], name: str) -> bool:
    return name in entries or any(entry.startswith(name + ".") for entry in entries)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return not isinstance(left, torch.Tensor) and not isinstance(right, torch.Tensor) and left == right


def _count(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _some(items: list[str], separator: str = ", ") -> str:
    more = len(items) - _EXAMPLES
    return separator.join(items[:_EXAMPLES]) + (f" and {more} more" if more > 0 else "")

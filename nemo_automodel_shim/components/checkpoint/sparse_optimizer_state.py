# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in which some parameters have none.

A parameter that never received a gradient has no optimizer state, and a checkpoint is right to hold none for it.
Loading must leave it without state too: its first gradient then starts it at step 0, as in a run that was never
interrupted. ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` cannot express that. It fills an
optimizer that has no state by a step with zero gradients, so the template asks for state of every parameter, and
where missing keys are tolerated the filled ``step=1`` stays.

Here the template comes from the checkpoint's own metadata and the live parameter groups:

1. look: list the live parameters by fully qualified name, read the metadata, reach a verdict on each parameter;
2. read: fetch the keys that the verdicts ask for, by this rank alone;
3. agree: one failure on any rank is the same error on all ranks, and nothing has been touched yet;
4. act: ``Optimizer.load_state_dict``, then the scheduler; a failure here is rolled back on all ranks.

The layout on disk is the one of ``StateDictOptions(flatten_optimizer_state_dict=True)``:
``optim.state.<name>.<entry>``, ``optim.param_groups.<name>.<option>`` and ``sched.<entry>``.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)

_STATE = "optim.state."
_GROUPS = "optim.param_groups."
_SCHEDULER = "sched"
# Wrappers that torch leaves out of a fully qualified name; a file written with them names the same parameters.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
# Options that torch's schedulers put into a group.
_SCHEDULER_OPTIONS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}
)
_EXAMPLES = 5


class OptimizerStateError(RuntimeError):
    """The optimizer state on disk does not fit the live optimizer; nothing was changed on any rank.

    The text is the same on every rank. It names the checkpoint, the parameters and what to do next.
    """


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
        f"{_plain(name)}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]
    for name, param in model.named_parameters():
        name = _plain(name)
        for prefix in replicated:
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        yield name, param


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Flattened state of ``optimizer``, without moving an optimizer that has not stepped.

    Args:
        model: The module whose parameters the optimizer updates.
        optimizer: The optimizer to describe. It is not changed.

    Returns:
        ``state.<name>.<entry>`` and ``param_groups.<name>.<option>``, the keys of
        ``get_optimizer_state_dict(..., flatten_optimizer_state_dict=True)``. Parameters without state have no
        ``state`` keys.

    Raises:
        OptimizerStateError: If the optimizer holds a parameter that is not in the model.
    """
    if optimizer.state:
        return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    # torch would fill an optimizer without state by a step with zero gradients, and that moves the live run.
    return {
        f"param_groups.{live.name}.{option}": value
        for live in _live_parameters([model], [optimizer])
        for option, value in live.options.items()
    }


def log_parameters_without_state(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Say once, at a save, how many parameters of this rank have no optimizer state, and that this is kept.

    Args:
        models: The model parts of this rank.
        optimizers: One optimizer a model part. They are not changed.
    """
    lives = _live_parameters(models, optimizers)
    expected = _Expected(optimizers, lives, {(live.optimizer, live.group_index): live.options for live in lives})
    cold = [
        live.name for live in lives if not optimizers[live.optimizer].state.get(live.param) and expected.any_state(live)
    ]
    if cold:
        logger.info(
            "Optimizer state: %s of %d never updated, saved without state: %s.",
            _count(cold, "parameter"),
            len(lives),
            _some(cold),
        )


def load_optimizer_state(
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    schedulers: list[Any] | None,
    path: str | os.PathLike,
    *,
    allow_new_parameters: bool = False,
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

    Raises:
        OptimizerStateError: On every rank alike, if any rank cannot load. No optimizer, parameter group or
            scheduler has been changed then.
    """
    path = os.fspath(path)
    loaded: list[dict[str, Any]] = []
    scheduled: list[dict[str, Any]] = []
    schedulers = schedulers or []
    seen, cause = _Seen(), None
    try:
        lives = _live_parameters(models, optimizers)
        checkpoint = _Checkpoint(path, {live.name for live in lives})
        seen = _look(checkpoint, lives, allow_new_parameters)
        groups = _read_groups(checkpoint, optimizers, lives, seen)
        restored = _read_state(checkpoint, optimizers, lives, groups, seen)
        loaded = _assemble(optimizers, lives, groups, restored)
        scheduled = _read_schedulers(checkpoint, schedulers)
    except Exception as exc:
        cause = exc
    dropped = _agree(path, cause, seen)

    before = _Snapshot(optimizers, schedulers)
    try:
        for optimizer, state in zip(optimizers, loaded, strict=False):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(schedulers, scheduled, strict=False):
            scheduler.load_state_dict(state)
    except Exception as exc:
        cause = exc
    try:
        _agree(path, cause, _Seen())
    except OptimizerStateError:
        before.restore()
        raise
    _report(path, seen, dropped)


@dataclass
class _Live:
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


@dataclass
class _Seen:
    """What a rank found, for the report and for the ranks to agree on."""

    listed: list[str] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    never_updated: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    defaulted: set[str] = field(default_factory=set)
    restored: int = 0


def _live_parameters(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> list[_Live]:
    if len(models) != len(optimizers):
        raise OptimizerStateError(
            f"{len(models)} model parts and {len(optimizers)} optimizers: pass one optimizer a part."
        )
    lives = []
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=False)):
        names: dict[int, str] = {}
        for name, param in iter_named_parameters(model):
            names.setdefault(id(param), name)
        index = 0
        for group_index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise OptimizerStateError(
                        f"Parameter {index} of optimizer {number} (shape {list(param.shape)}) is not in the model "
                        "that was passed with it; pass the model whose parameters the optimizer was built from."
                    )
                lives.append(_Live(names[id(param)], param, number, group_index, group, index))
                index += 1
    return lives


class _Planner(DefaultLoadPlanner):
    """Unpickles each distinct byte string once: a group's options stand in the file once a parameter."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.raw: dict[str, bytes] = {}
        self._known: dict[bytes, bytes] = {}
        self._values: dict[bytes, Any] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raw = value.getvalue()
        raw = self._known.setdefault(raw, raw)
        if raw not in self._values:
            # The trust that torch.distributed.checkpoint itself places in a checkpoint.
            self._values[raw] = torch.load(io.BytesIO(raw), weights_only=False)
        self.raw[read_item.dest_index.fqn] = raw
        self.state_dict[read_item.dest_index.fqn] = self._values[raw]


class _Checkpoint:
    """A DCP checkpoint of optimizer state, read by one rank without a collective."""

    def __init__(self, path: str, live_names: set[str]) -> None:
        self.path = path
        self.reader = FileSystemReader(path)
        try:
            self.metadata: Metadata = self.reader.read_metadata()
        except Exception as exc:
            raise OptimizerStateError(
                f"{os.path.join(path, '.metadata')} cannot be read ({_one_line(exc)}); is the checkpoint complete?"
            ) from exc
        paths = self.metadata.planner_data or {}
        # parameter -> option, and place within an option that is itself a container -> key
        self.options: dict[str, dict[tuple[Any, ...], str]] = defaultdict(dict)
        self.entries: dict[str, dict[str, str]] = defaultdict(dict)  # parameter -> state entry -> key
        state_keys = []
        for key in self.metadata.state_dict_metadata:
            if key.startswith(_GROUPS):
                place = paths.get(key, ())
                flat, *inner = place[1:] if len(place) > 1 else (key.removeprefix("optim."),)
                name, option = _split_option(_plain(flat.removeprefix("param_groups.")), live_names)
                self.options[name][(option, *inner)] = key
            elif key.startswith(_STATE):
                state_keys.append(key)
        if not self.options:
            raise OptimizerStateError(
                f"{path} holds no parameter groups ({_GROUPS}*): it is no optimizer checkpoint of this layout."
            )
        for key in state_keys:
            name, entry = self._split(_plain(key[len(_STATE) :]))
            self.entries[name][entry] = key

    def template(self, keys: Iterable[str]) -> dict[str, Any]:
        """Something to read ``keys`` into, where no live tensor says how they should lie."""
        stored = {key: self.metadata.state_dict_metadata[key] for key in keys}
        return {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for key, entry in stored.items()
        }

    def _split(self, rest: str) -> tuple[str, str]:
        # Entries may be nested and names may be prefixes of one another: the longest listed name owns the key.
        name = rest
        while name not in self.options:
            name, dot, _ = name.rpartition(".")
            if not dot:
                raise OptimizerStateError(
                    f"{self.path} holds state ({_STATE}{rest}) of a parameter that its groups do not list; "
                    "the file is damaged."
                )
        return name, rest[len(name) + 1 :]

    def read(self, template: dict[str, Any]) -> _Planner:
        """Fill ``template`` in place: tensors by copy, other values by assignment. Local to this rank."""
        planner = _Planner()
        try:
            planner.set_up_planner(template, self.metadata, False)
            self.reader.set_up_storage_reader(self.metadata, False)
            plan = self.reader.prepare_local_plan(planner.create_local_plan())
            plan = planner.finish_plan(self.reader.prepare_global_plan([plan])[0])
            self.reader.read_data(plan, planner).wait()
        except Exception as exc:
            raise OptimizerStateError(
                f"{self._blame(template)} cannot be read ({_one_line(exc)}); is the checkpoint complete?"
            ) from exc
        return planner

    def _blame(self, template: dict[str, Any]) -> str:
        # torch's message rarely says which file: name those of the keys that were asked for that are gone or short.
        ends: dict[str, int] = {}
        for index, info in (self.metadata.storage_data or {}).items():
            if index.fqn in template:
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        files = []
        for name, end in sorted(ends.items()):
            file = os.path.join(self.path, name)
            size = os.path.getsize(file) if os.path.exists(file) else None
            if size is None or size < end:
                files.append(f"{file} ({'absent' if size is None else f'{size} bytes, {end} needed'})")
        return ", ".join(files) or self.path


def _look(checkpoint: _Checkpoint, lives: list[_Live], allow_new_parameters: bool) -> _Seen:
    seen = _Seen(listed=sorted(checkpoint.options), live={live.name for live in lives})
    seen.new = sorted(seen.live - set(checkpoint.options))
    if not allow_new_parameters and lives and len(seen.new) == len(seen.live):
        raise OptimizerStateError(_nothing_in_common(checkpoint.path, seen.listed[0], seen.new[0]))
    if seen.new and not allow_new_parameters:
        raise OptimizerStateError(
            f"{_count(seen.new, 'live parameter')} not listed in {checkpoint.path}: {_some(seen.new)}. If they are "
            "new since the save (unfrozen, added), pass allow_new_parameters=True: they then start without state."
        )
    return seen


def _nothing_in_common(path: str, saved: str, live: str) -> str:
    return (
        f"{path} and the live optimizer have no parameter in common: saved {saved!r}, live {live!r}. Is it the "
        "checkpoint of another model, or are the names prefixed differently?"
    )


def _read_groups(
    checkpoint: _Checkpoint, optimizers: list[torch.optim.Optimizer], lives: list[_Live], seen: _Seen
) -> dict[tuple[int, int], dict[str, Any]]:
    """The saved options of each live group, by optimizer and group number."""
    template = checkpoint.template(key for live in lives for key in checkpoint.options.get(live.name, {}).values())
    planner = checkpoint.read(template)
    owners: dict[tuple[int, int], dict[tuple[Any, ...], tuple[str, str]]] = defaultdict(dict)
    for live in lives:
        found = owners[live.optimizer, live.group_index]
        for place, key in checkpoint.options.get(live.name, {}).items():
            if place[0] == "param_names":
                continue  # names of the parameters that the group held then; the live group knows its own
            first_name, first_key = found.setdefault(place, (live.name, key))
            same = key in planner.raw and planner.raw.get(first_key) == planner.raw[key]
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
            saved = _nest({place: template[key] for place, (_, key) in owners[number, index].items()})
            saved = {option: _typed_like(value, live_options.get(option)) for option, value in saved.items()}
            lacking = sorted(set(optimizer.defaults) - set(saved)) if saved else []
            strange = sorted(set(saved) - set(live_options) - _SCHEDULER_OPTIONS)
            if lacking and strange:
                raise OptimizerStateError(
                    f"{checkpoint.path} was saved by another optimizer than {type(optimizer).__name__}: its groups "
                    f"have {', '.join(strange)} and lack {', '.join(lacking)}. Build the optimizer that it was saved "
                    "with."
                )
            seen.defaulted.update(set(live_options) - set(saved) - {"param_names"} if saved else ())
            groups[number, index] = {**live_options, **saved}
    return groups


def _read_state(
    checkpoint: _Checkpoint,
    optimizers: list[torch.optim.Optimizer],
    lives: list[_Live],
    groups: dict[tuple[int, int], dict[str, Any]],
    seen: _Seen,
) -> dict[tuple[int, int], dict[str, Any]]:
    """The saved state of each restored parameter, by optimizer number and parameter index."""
    expected = _Expected(optimizers, lives, groups, checkpoint)
    template: dict[str, Any] = {}
    problems = []
    for live in lives:
        entries = checkpoint.entries.get(live.name)
        if not entries:
            if live.name in checkpoint.options and expected.any_state(live):
                seen.never_updated.append(live.name)
            continue
        lacking = sorted(name for name in expected.entries(live) if not _has(entries, name))
        if lacking:
            problems.append(f"{live.name} lacks {', '.join(lacking)} (saved: {', '.join(sorted(entries))})")
            continue
        for entry, key in entries.items():
            stored = checkpoint.metadata.state_dict_metadata[key]
            if isinstance(stored, BytesStorageMetadata):
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
            node[leaf] = template[key]
    return restored


class _Expected:
    """Which state entries a whole parameter has, and which of them have the parameter's shape."""

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        lives: list[_Live],
        groups: dict[tuple[int, int], dict[str, Any]],
        checkpoint: _Checkpoint | None = None,
    ) -> None:
        self._optimizers, self._groups = optimizers, groups
        self._probed: dict[tuple, dict[str, bool] | None] = {}
        # What the parameters of a group have on disk, for optimizers that cannot be asked.
        self._own: dict[str, frozenset[str]] = {}
        self._saved: dict[tuple, set[frozenset[str]]] = defaultdict(set)
        self._shapes: dict[tuple, Counter] = defaultdict(Counter)  # entry -> how many have the parameter's shape
        for live in lives if checkpoint is not None else ():
            entries = checkpoint.entries.get(live.name, {})
            self._own[live.name] = frozenset(entries)
            self._saved[(*self._group(live), live.param.size(), live.param.dtype)].add(frozenset(entries))
            for entry, key in entries.items():
                stored = checkpoint.metadata.state_dict_metadata[key]
                size = stored.size if isinstance(stored, TensorStorageMetadata) else None
                self._shapes[(*self._group(live), entry)][size == live.param.size()] += 1
        self._any = any(self._own.values())

    @staticmethod
    def _group(live: _Live) -> tuple[int, int]:
        return (live.optimizer, live.group_index)

    def _ask(self, live: _Live) -> dict[str, bool] | None:
        kind = (*self._group(live), live.param.ndim, live.param.dtype, live.param.device.type)
        if kind not in self._probed:
            options = self._groups[self._group(live)]
            self._probed[kind] = _probe(self._optimizers[live.optimizer], options, live.param)
        return self._probed[kind]

    def any_state(self, live: _Live) -> bool:
        """Whether the optimizer gives such a parameter state at all."""
        asked = self._ask(live)
        return bool(asked) if asked is not None else self._any

    def entries(self, live: _Live) -> Iterable[str]:
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

    def has_the_parameters_shape(self, live: _Live, entry: str) -> bool:
        """Whether ``entry``, which has another shape, ought to have that of the parameter.

        Where the optimizer cannot be asked, it ought to if it has for all other parameters of the group.
        """
        asked = self._ask(live)
        if asked is not None:
            return asked.get(entry, False)
        shapes = self._shapes[(*self._group(live), entry)]
        return live.param.ndim > 0 and shapes[True] > 0 and shapes[False] == 1


def _probe(optimizer: torch.optim.Optimizer, options: dict[str, Any], param: nn.Parameter) -> dict[str, bool] | None:
    """Step a stand-in of ``optimizer`` on a tiny parameter: entry -> whether it has the parameter's shape.

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
        logger.debug("%s cannot be probed: %s", type(optimizer).__name__, _one_line(exc))
        return None
    return {
        name: isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == tiny.shape
        for name, value in stand_in.__dict__["state"].get(tiny, {}).items()
        if value is not None
    }


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
    lives: list[_Live],
    groups: dict[tuple[int, int], dict[str, Any]],
    restored: dict[tuple[int, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """What ``Optimizer.load_state_dict`` takes, an optimizer."""
    loaded = []
    for number, optimizer in enumerate(optimizers):
        mine = [live for live in lives if live.optimizer == number]
        loaded.append(
            {
                "state": {
                    live.index: restored[number, live.index] for live in mine if (number, live.index) in restored
                },
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


def _read_schedulers(checkpoint: _Checkpoint, schedulers: list[Any]) -> list[dict[str, Any]]:
    """The saved scheduler once for each live one, with keys of the type that the live one has."""
    paths = {
        key: path
        for key, path in (checkpoint.metadata.planner_data or {}).items()
        if isinstance(path, tuple) and path[0] == _SCHEDULER and len(path) > 1
    }
    if schedulers and not paths:
        raise OptimizerStateError(
            f"{checkpoint.path} holds no scheduler ({_SCHEDULER}.*), but one was passed; pass scheduler=None to "
            "resume the optimizer alone."
        )
    template = checkpoint.template(paths if schedulers else ())
    checkpoint.read(template)
    state = _nest({paths[key][1:]: value for key, value in template.items()})
    # Some schedulers take entries out of the dict that they are given: each gets its own.
    return [_typed_like(copy.deepcopy(state), scheduler.state_dict()) for scheduler in schedulers]


def _nest(flat: dict[tuple[Any, ...], Any]) -> dict[Any, Any]:
    nested: dict[Any, Any] = {}
    for (*parents, leaf), value in flat.items():
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return nested


def _typed_like(saved: Any, live: Any) -> Any:
    """Undo what DCP does to containers, by the type that the live one has.

    Integer keys became text, lists that hold tensors or dicts became dicts by position, and empty dicts are gone.
    """
    if not isinstance(saved, dict):
        return saved
    if saved and all(isinstance(key, int) for key in saved):
        items = live if isinstance(live, (list, tuple)) else ()
        return [_typed_like(saved[at], items[at] if at < len(items) else None) for at in sorted(saved)]
    live = live if isinstance(live, dict) else {}
    keys: dict[Any, Any] = {str(key): key for key in live}
    if isinstance(live, Counter) or (live and all(isinstance(key, int) for key in live)):
        keys |= {key: int(key) for key in saved if key.lstrip("-").isdigit()}
    typed = {keys.get(key, key): _typed_like(value, live.get(keys.get(key, key))) for key, value in saved.items()}
    if isinstance(live, Counter):
        return Counter(typed)
    return typed | {key: {} for key, value in live.items() if isinstance(value, dict) and key not in typed}


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


def _agree(path: str, cause: Exception | None, seen: _Seen) -> list[str]:
    """Exchange failures; raise the same error on every rank, or return the saved names that no rank holds."""
    error = None
    if cause is not None:
        error = str(cause) if isinstance(cause, OptimizerStateError) else _one_line(cause)
    vote = (error, bytes(name in seen.live for name in seen.listed), min(seen.live, default=None))
    votes: list[Any] = [vote]
    if dist.is_available() and dist.is_initialized():
        votes = [None] * dist.get_world_size()
        # Text, never the exception: one that cannot be pickled would leave the other ranks waiting.
        dist.all_gather_object(votes, vote)
    ranks: dict[str, list[int]] = {}
    for rank, (text, _, _) in enumerate(votes):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    found = " | ".join(f"rank {_ranges(where)}: {text}" for text, where in ranks.items())
    dropped = [name for name, *held in zip(seen.listed, *(held for _, held, _ in votes), strict=False) if not any(held)]
    examples = [example for _, _, example in votes if example is not None]
    if not found and examples and len(dropped) == len(seen.listed) > 0:
        found = _nothing_in_common(path, dropped[0], examples[0])
    if found:
        raise OptimizerStateError(
            f"The optimizer was not resumed from {path}; nothing was changed on any rank. {found}"
        ) from cause
    return dropped


def _report(path: str, seen: _Seen, dropped: list[str]) -> None:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if seen.defaulted:
        logger.warning("%s has no group option %s; the live values stay.", path, ", ".join(sorted(seen.defaulted)))
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


def _plain(name: str) -> str:
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _split_option(rest: str, live_names: set[str]) -> tuple[str, str]:
    # An option's name may hold dots: a live parameter's name decides where it begins.
    name, _, option = rest.rpartition(".")
    longest = name
    while longest and longest not in live_names:
        longest = longest.rpartition(".")[0]
    return (longest, rest[len(longest) + 1 :]) if longest else (name, option)


def _one_line(exc: Exception) -> str:
    try:
        return " ".join(f"{type(exc).__name__}: {exc}".split())
    except Exception:
        return type(exc).__name__  # an exception whose text cannot be had must not keep the other ranks waiting


def _count(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _some(items: list[str], separator: str = ", ") -> str:
    more = len(items) - _EXAMPLES
    return separator.join(items[:_EXAMPLES]) + (f" and {more} more" if more > 0 else "")


def _ranges(ranks: list[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)

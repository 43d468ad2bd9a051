# SPDX-License-Identifier: Apache-2.0
"""What comes of one row with one peer."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ci import grid
from ci.peers.loaders import Peer, save_as_torch
from ci.peers.rows import Row
from tests.support.scenario import SCHEDULERS, Party, play, start
from tests.support.training import differences

EXACT, DRIFT, REFUSED, ERROR, SILENT = "exact", "drift", "refused", "error", "silent"
# A slip inside, not a refusal.
INTERNAL = (LookupError, TypeError, AttributeError, AssertionError, ArithmeticError)
ONE_SIDED = re.compile(r"(saved|resumed)(, later)?\.state\.(\S+) \(on one side only\)")

Checkpointer = Callable[[Path], Any]


class _Stopped(BaseException):
    def __init__(self, failure: BaseException, changed: bool) -> None:
        super().__init__(str(failure))
        self.failure, self.changed = failure, changed


def of(row: Row, peer: Peer, checkpointer: Checkpointer) -> dict[str, Any]:
    """The outcome: ``class``, ``drift``, ``error`` (its type), ``changed`` and ``zeros``, where they apply."""
    try:
        if row.damage:
            return _damaged(row, peer, checkpointer)
        return _played(row, peer, checkpointer)
    except _Stopped as stopped:
        return _failed(row, stopped.failure, stopped.changed)


def drifts(row: Row, peer: Peer, checkpointer: Checkpointer, steps: list[int]) -> list[float] | None:
    """The largest difference of parameters after each number of steps; nothing where it does not load."""
    found = []
    chosen = row.scenario().after[0]
    for count in steps:
        again = dataclasses.replace(row, changes={**row.changes, "after": (chosen,) * count})
        outcome = of(again, peer, checkpointer)
        if outcome["class"] not in (EXACT, DRIFT):
            return None
        found.append(outcome.get("drift", 0.0))
    return found


def _played(row: Row, peer: Peer, checkpointer: Checkpointer) -> dict[str, Any]:
    parties: dict[str, Party] = {}
    if row.upstream_scheduler:
        SCHEDULERS.update(grid._upstream_schedulers())
    with tempfile.TemporaryDirectory() as place:
        owner = checkpointer(Path(place))

        def save(party: Party) -> None:
            parties["saved"] = party
            held = [group["params"] for group in party.optimizer.param_groups]
            if row.without_last:  # the file knows nothing of a parameter that was frozen, and not in the optimizer
                party.optimizer.param_groups[-1]["params"] = held[-1][:-1]
            action = save_as_torch if row.torch_file else peer.save
            try:
                action(owner, party.optimizer, party.model, place, grid._listed(party))
            finally:
                for group, params in zip(party.optimizer.param_groups, held, strict=True):
                    group["params"] = params

        def load(party: Party) -> None:
            parties["resumed"] = party
            options = dict(row.options) if peer.side == "ours" else {}
            arguments = (owner, party.optimizer, party.model, place, grid._listed(party))
            _attempt(lambda: peer.load(*arguments, **options), party)

        try:
            played = play(row.scenario(), save, load)
        except (_Stopped, KeyboardInterrupt):
            raise
        except BaseException as failure:  # of the save, or of the steps after the load
            raise _Stopped(failure, True) from failure
    if row.due == REFUSED:
        return {"class": SILENT}
    if not played.differences:
        return {"class": EXACT}
    if not played.drift and _only_zeros(played.differences, parties):
        return {"class": EXACT, "zeros": True}
    return {"class": DRIFT, "drift": played.drift}


def _attempt(load: Callable[[], None], party: Party) -> None:
    before = party.snapshot()
    try:
        load()
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        raise _Stopped(failure, bool(differences(before, party.snapshot()))) from failure


def _failed(row: Row, failure: BaseException, changed: bool) -> dict[str, Any]:
    # What DCP raises holds the failures of the ranks.
    inner = [failure, *(getattr(failure, "failures", None) or {}).values()]
    causes = [item[0] if isinstance(item, tuple) else item for item in inner]
    slip = any(isinstance(cause, INTERNAL) for cause in causes)
    clear = not slip and re.search(row.names, str(failure)) is not None and not changed
    return {"class": REFUSED if clear else ERROR, "error": type(failure).__name__, "changed": changed}


def _only_zeros(found: list[str], parties: dict[str, Party]) -> bool:
    """Whether runs differ in nothing but state of zeros, at step 0, which is what no state means."""
    for path in found:
        match = ONE_SIDED.fullmatch(path)
        if match is None:
            return False
        party = parties[match[1]]
        state = party.optimizer.state.get(dict(party.model.named_parameters())[match[3]], {})
        # State that a run has over the uninterrupted one; where it has none, it has lost what that one has.
        if match[2] and (not state or any(bool(torch.as_tensor(value).ne(0).any()) for value in state.values())):
            return False
    return True


class _Door:
    """The loader that the grid's damages are tried on: a peer, and an optimizer that is fresh, as at a resume."""

    def __init__(self, peer: Peer, owner: Any, scenario: Any) -> None:
        self._peer, self._owner, self._scenario = peer, owner, scenario

    def load_optimizer(self, optimizer: Any, model: Any, place: str, schedulers: Any) -> None:
        optimizer.state.clear()
        party = Party(self._scenario, model, list(model.parameters()), optimizer, None)
        _attempt(lambda: self._peer.load(self._owner, optimizer, model, place, schedulers), party)


def _damaged(row: Row, peer: Peer, checkpointer: Checkpointer) -> dict[str, Any]:
    stopped: list[_Stopped] = []
    made = row.scenario()

    class Door(_Door):
        def load_optimizer(self, *arguments: Any) -> None:
            try:
                super().load_optimizer(*arguments)
            except _Stopped as failure:
                stopped.append(failure)
                raise

    if row.damage == "foreign":
        with tempfile.TemporaryDirectory() as place:
            saved, live = start(dataclasses.replace(made, optimizer="sgd-momentum")), start(made)
            saved.step(0, frozenset(range(len(saved.params))))
            owner = checkpointer(Path(place))
            save_as_torch(owner, saved.optimizer, saved.model, place, None)
            _Door(peer, owner, made).load_optimizer(live.optimizer, live.model, place, None)
            return {"class": SILENT}
    grid.run_damage(row.optimizer, row.damage, lambda place: Door(peer, checkpointer(place), made))
    if stopped:
        raise stopped[0]
    return {"class": SILENT}

# SPDX-License-Identifier: Apache-2.0
"""What is malformed is refused by name with nothing changed, on every rank; the caller's dict is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.contracts.unirl import boundary_ranks
from tests.contracts.unirl.runs import ALL, short, start, take_weights
from tests.contracts.unirl.upstream import PRELOAD, backend_of, sharded_state
from tests.support.training import Run, differences
from tests.support.world import run_world

WEIGHT = "used.weight"
Change = Callable[[dict[str, Any]], Any]


def exported() -> tuple[Run, dict[str, Any]]:
    """A run in which every parameter has state, and its gathered state."""
    run = start()
    run.train(range(3), ALL)
    return run, copy.deepcopy(sharded_state.gather_optimizer_state_dict(run.model, run.optimizer))


def trained_copy(run: Run) -> Run:
    """A run with the same weights, whose optimizer has stepped."""
    other = start(seed=2)
    other.train(range(50, 52), ALL)
    take_weights(run, other)
    return other


def names_twice(state: dict[str, Any]) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": [WEIGHT]})


def entry(name: str, value: Any = None) -> Change:
    """Drop an entry of the weight, or put another one there."""

    def change(state: dict[str, Any]) -> None:
        if value is None:
            del state["state"][WEIGHT][name]
        else:
            state["state"][WEIGHT][name] = value

    return change


MALFORMED: dict[str, tuple[Change, str]] = {
    "no exp_avg": (entry("exp_avg"), r"used\.weight.*exp_avg"),
    "no exp_avg_sq": (entry("exp_avg_sq"), r"used\.weight.*exp_avg_sq"),
    "no step": (entry("step"), r"used\.weight.*step"),
    "a moment of another shape": (entry("exp_avg", torch.zeros(4, 3)), r"used\.weight.*exp_avg.*\[4, 3\]"),
    "a moment that is no tensor": (entry("exp_avg", "x"), r"used\.weight.*exp_avg"),
    "an entry that is no dict": (lambda state: state["state"].update({WEIGHT: 1}), r"used\.weight"),
    "state of an unknown name": (lambda state: state["state"].update(ghost={"step": torch.ones(())}), "ghost"),
    "a live name not listed": (lambda state: state["param_groups"][0]["params"].remove("late.bias"), "late.bias"),
    "a name in two groups": (names_twice, r"used\.weight"),
    "a name twice in a group": (lambda state: state["param_groups"][0]["params"].append(WEIGHT), r"used\.weight"),
    "integer ids": (lambda state: state["param_groups"][0].update(params=[0, 1, 2, 3, 4, 5]), "0"),
    "no groups": (lambda state: state.pop("param_groups"), "param_groups"),
}


@pytest.mark.contract("malformed.refused", meaning="malformed entries are refused by name, with nothing changed")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("form", ["gathered", "sharded"])
def test_malformed_state_is_refused_by_name(case: str, form: str) -> None:
    change, pattern = MALFORMED[case]
    run, state = exported()
    other = trained_copy(run)
    before = other.snapshot()
    change(state)
    load = sharded_state.load_optimizer_state_dict
    if form == "sharded":
        load = sharded_state.load_sharded_optimizer_state_dict
    failure: Exception | None = None
    try:
        load(other.model, other.optimizer, state)
    except Exception as caught:
        failure = caught
    assert failure is not None, f"{case}: accepted in silence"
    named = type(failure).__name__ == "OptimizerStateError"
    assert named, f"{case}: no refusal by name: {short(failure)}"
    with pytest.raises(type(failure), match=pattern):
        load(other.model, other.optimizer, state)
    assert differences(before, other.snapshot()) == []


@pytest.mark.contract("malformed.files", meaning="a malformed file is refused by name before the model is touched")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_malformed_file_is_refused_by_name(form: str, tmp_path: Path) -> None:
    run, _ = exported()
    backend_of(run.model, form, run.optimizer, run.scheduler).save(str(tmp_path))
    if form == "torch":
        file = torch.load(tmp_path / "checkpoint.pt")
        del file["optimizer_state_dict"]["state"][WEIGHT]["exp_avg"]
        torch.save(file, tmp_path / "checkpoint.pt")
    else:
        optimizer = sharded_state.sharded_optimizer_state_dict(run.model, run.optimizer)
        optimizer["state"] = {name: dict(held) for name, held in optimizer["state"].items()}
        del optimizer["state"][WEIGHT]["exp_avg"]
        dcp.save({"model": run.model.state_dict(), "optim": optimizer}, checkpoint_id=str(tmp_path))
    other = start(seed=2)
    before = other.snapshot()
    failure: BaseException | None = None
    try:
        backend_of(other.model, form, other.optimizer, other.scheduler).load(str(tmp_path))
    except BaseException as caught:
        failure = caught
    assert failure is not None, "accepted in silence"
    text = short(failure)
    assert "used.weight: lacks exp_avg" in text, f"no refusal by name: {text}"
    assert differences(before, other.snapshot()) == []


@pytest.mark.contract("malformed.rank-0-alone", meaning="where rank 0 alone refuses, every rank raises the same error")
def test_rank_0_alone_refuses(tmp_path: Path) -> None:
    outcomes = run_world(
        boundary_ranks.refused_by_rank_0_alone, 2, tmp_path, preload=PRELOAD, pg_timeout=6.0, deadline=20.0, check=False
    )
    failed = [f"rank {outcome.rank} {outcome.kind}: {outcome.message}" for outcome in outcomes if outcome.kind != "ok"]
    assert not failed, "; ".join(" ".join(text.split())[:200] for text in failed)
    texts = {outcome.value["text"] for outcome in outcomes}
    assert len(texts) == 1, f"the ranks were told different things: {texts}"
    assert "used.weight" in (texts.pop() or "accepted in silence")
    assert [outcome.value["changed"] for outcome in outcomes] == [[], []]


@pytest.mark.contract("caller.unchanged", meaning="neither a load nor later steps change the dict of the caller")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("form", ["gathered", "sharded"])
def test_the_callers_dict_is_not_changed(form: str) -> None:
    run = start()
    run.train(range(3), ALL)
    if form == "gathered":
        state = sharded_state.gather_optimizer_state_dict(run.model, run.optimizer)
        load = sharded_state.load_optimizer_state_dict
    else:
        state = copy.deepcopy(sharded_state.sharded_optimizer_state_dict(run.model, run.optimizer))
        load = sharded_state.load_sharded_optimizer_state_dict
    kept = copy.deepcopy(state)
    other = trained_copy(run)
    load(other.model, other.optimizer, state)
    for each in (run, other):
        each.train(range(3, 5), ALL)
    changed = differences(kept, state)
    assert not changed, f"the dict was changed: {changed[:3]}"

# SPDX-License-Identifier: Apache-2.0
"""Drawn runs: any optimizer, any parameters, gradients whenever, saved anywhere, loaded into anything."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    OptimizerStateError,
    load_optimizer_state,
    optimizer_state_dict,
)
from tests.shim.search import searched
from tests.support.optimizers import OPTIMIZERS, OTHERS
from tests.support.scenario import LOADED_INTO, MATRICES, SCHEDULERS, SHAPES, Party, Scenario, play, start
from tests.support.training import differences

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# A stepped LBFGS holds lists, which torch does not flatten: it is refused at the save, below.
SAVED = [name for name, kind in OPTIMIZERS.items() if kind.saved]


@st.composite
def scenarios(draw: st.DrawFn, name: str | None = None) -> Scenario:
    """Scenarios that torch itself can run without an interruption."""
    name = name or draw(st.sampled_from(SAVED))
    kind = OTHERS.get(name) or OPTIMIZERS[name]
    kinds = MATRICES if kind.matrices else tuple(shape for shape in SHAPES if not (kind.elements and shape == "rows-0"))
    shapes = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)))
    indices = range(len(shapes))
    single = kind.closure or draw(st.booleans())
    group_of = tuple(0 if single else draw(st.integers(0, 2)) for _ in indices)

    def steps(most: int) -> tuple[frozenset[int], ...]:
        if not kind.steps:
            return ()
        count = draw(st.integers(0, most))
        if kind.together:
            return (frozenset(indices),) * count
        return tuple(frozenset(draw(st.sets(st.sampled_from(list(indices)), max_size=4))) for _ in range(count))

    before, after = steps(3), steps(4)
    # LBFGS wants a gradient at its first step.
    if kind.closure:
        before, after = tuple(each | {0} for each in before), tuple(each | {0} for each in after)
    loaded_into = draw(st.sampled_from(LOADED_INTO if kind.steps else ("fresh", "gradients-waiting")))
    if kind.together and loaded_into == "partly-stepped":
        loaded_into = "stepped"
    scheduler = draw(st.sampled_from(sorted(SCHEDULERS)))
    return Scenario(
        optimizer=name,
        shapes=shapes,
        group_of=group_of,
        before=before,
        after=after,
        loaded_into=loaded_into,
        scheduler=scheduler,
        frozen=frozenset() if kind.together else frozenset(draw(st.sets(st.sampled_from(list(indices)), max_size=1))),
        empty_group=not kind.closure and draw(st.booleans()),
        tied=draw(st.booleans()),
        # A scheduler's own state goes by position.
        reversed_groups=scheduler == "none" and draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])),
    )


def resume(scenario: Scenario) -> list[str]:
    """Play the scenario through the shim's functions and DCP, in one process."""
    with tempfile.TemporaryDirectory() as path:

        def save(party: Party) -> None:
            state: dict[str, Any] = {"optim": optimizer_state_dict(party.model, party.optimizer)}
            if party.scheduler is not None:
                state["sched"] = party.scheduler.state_dict()
            dcp.save(state, checkpoint_id=path)

        def load(party: Party) -> None:
            schedulers = [] if party.scheduler is None else [party.scheduler]
            load_optimizer_state([party.model], [party.optimizer], schedulers, path)

        return play(scenario, save, load).differences


@searched(120)
@given(scenario=scenarios())
def test_any_resume_equals_the_uninterrupted_run(scenario: Scenario) -> None:
    assert resume(scenario) == []


@pytest.mark.parametrize("optimizer", SAVED)
@searched(1)
@given(data=st.data())
def test_every_optimizer_is_searched(optimizer: str, data: st.DataObject) -> None:
    assert resume(data.draw(scenarios(optimizer))) == []


@pytest.mark.parametrize("optimizer", [name for name in SAVED if OPTIMIZERS[name].steps and "-" not in name])
def test_a_new_parameter_starts_cold_with_its_groups_saved_options(optimizer: str) -> None:
    """Frozen and out of the optimizer until the save, then trained: as one that was in it and never updated (B7)."""
    used, later = frozenset({1}), frozenset({0, 1, 2})
    # The new parameter is the first of its group; the other group is built with other options too.
    scenario = Scenario(optimizer, ("matrix", "square", "transposed"), (0, 0, 1), (used,) * 2, (later,) * 3)
    if scenario.kind.sparse:
        scenario = dataclasses.replace(scenario, shapes=("matrix", "square", "matrix"))

    def without_the_first(party: Party, path: str) -> None:
        group = party.optimizer.param_groups[0]
        first, *group["params"] = group["params"]
        state = party.optimizer.state.pop(first, None)
        dcp.save({"optim": optimizer_state_dict(party.model, party.optimizer)}, checkpoint_id=path)
        group["params"].insert(0, first)
        if state is not None:
            party.optimizer.state[first] = state

    with tempfile.TemporaryDirectory() as path:

        def load(party: Party) -> None:
            with pytest.raises(OptimizerStateError, match=r"layer0\.weight.*allow_new_parameters=True"):
                load_optimizer_state([party.model], [party.optimizer], None, path)
            load_optimizer_state([party.model], [party.optimizer], None, path, allow_new_parameters=True)

        played = play(scenario, lambda party: without_the_first(party, path), load)
    # An optimizer that makes its state at the start (Adagrad) makes it at the first step here.
    found = [each for each in played.differences if not each.startswith(("saved", "resumed.state.layer0"))]
    assert found == []


def test_loading_into_another_run_leaves_the_first_alone() -> None:
    """Nothing of the file's or the saved run's is shared (C22)."""
    scenario = Scenario("adamw", ("matrix", "square"), (0, 0), (frozenset({0}),) * 2, ())
    saved, first, second = start(scenario), start(scenario), start(scenario)
    saved.step(0, frozenset({0}))
    with tempfile.TemporaryDirectory() as path:
        dcp.save({"optim": optimizer_state_dict(saved.model, saved.optimizer)}, checkpoint_id=path)
        for party in (first, second):
            load_optimizer_state([party.model], [party.optimizer], None, path)
    kept = [saved.snapshot(), first.snapshot()]
    second.step(1, frozenset({0, 1}))
    second.optimizer.param_groups[0]["lr"] = 9.0
    assert differences(kept, [saved.snapshot(), first.snapshot()]) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_parameters_of_another_dtype(dtype: torch.dtype) -> None:
    """Some state is fp32 whatever the parameter is."""
    used, late = frozenset({0}), frozenset({0, 1})
    wrong = {}
    for name in SAVED:
        scenario = Scenario(name, ("matrix", "square"), (0, 0), (used,) * 2, (late,) * 3, dtype=dtype)
        if scenario.kind.together:
            scenario = dataclasses.replace(scenario, before=(late,) * 2)
        if scenario.kind.steps and (found := resume(scenario)):
            wrong[name] = found
    assert wrong == {}


def test_lost_state_is_told_from_never_updated() -> None:
    """The file says which parameters were never updated; a file that does not is read as one of the release."""
    scenario = Scenario("adamw", ("matrix", "square", "vector"), (0, 0, 0), (), ())
    party = start(scenario)
    party.step(0, frozenset({0, 1}))
    flat = optimizer_state_dict(party.model, party.optimizer)
    lost = {key: value for key, value in flat.items() if not key.startswith("state.layer1.")}
    assert len(lost) == len(flat) - 3
    plain = {key: value for key, value in lost.items() if key.startswith(("state.", "param_groups."))}
    with tempfile.TemporaryDirectory() as path:
        dcp.save({"optim": lost}, checkpoint_id=f"{path}/said")
        dcp.save({"optim": plain}, checkpoint_id=f"{path}/unsaid")
        fresh = start(scenario)
        before = fresh.snapshot()
        with pytest.raises(OptimizerStateError, match=r"layer1\.weight"):
            load_optimizer_state([fresh.model], [fresh.optimizer], None, f"{path}/said")
        assert differences(before, fresh.snapshot()) == []
        load_optimizer_state([fresh.model], [fresh.optimizer], None, f"{path}/unsaid")
    assert list(fresh.optimizer.state) == [fresh.params[0]]


def test_a_cold_file_takes_back_what_a_group_counts() -> None:
    later = frozenset({0, 1})
    scenario = Scenario("step-in-group", ("matrix", "square"), (0, 0), (), (later,) * 3, loaded_into="stepped")
    assert resume(scenario) == []


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_groups_in_another_order_below_a_scheduler_are_right_or_refused(scheduler: str) -> None:
    """What a scheduler keeps by position must not fall to another group."""
    used, late = frozenset({0}), frozenset({0, 1})
    scenario = Scenario(
        "adamw", ("matrix", "square"), (0, 1), (used,) * 2, (late,) * 4, scheduler=scheduler, reversed_groups=True
    )
    try:
        found = [path for path in resume(scenario) if ".scheduler" not in path]
    except OptimizerStateError as refusal:
        found = [] if "group" in str(refusal) else [str(refusal)]
    assert found == []


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in SAVED])
def test_what_torch_cannot_flatten_is_refused_at_the_save(optimizer: str) -> None:
    party = start(Scenario(optimizer, ("square", "vector"), (0, 0), (), ()))
    party.step(0, frozenset({0, 1}))
    party.step(1, frozenset({0, 1}))
    before = party.snapshot()
    with pytest.raises((NotImplementedError, OptimizerStateError)):
        optimizer_state_dict(party.model, party.optimizer)
    assert differences(before, party.snapshot()) == []


@pytest.mark.parametrize("optimizer", OTHERS)
@searched(3)
@given(data=st.data())
def test_optimizers_that_are_not_torchs_own(optimizer: str, data: st.DataObject) -> None:
    scenario = data.draw(scenarios(optimizer))
    if optimizer == "nested-state" and TORCH < (2, 13) and any(scenario.before):
        with pytest.raises((NotImplementedError, OptimizerStateError)):  # torch does not flatten dicts there
            resume(scenario)
    else:
        assert resume(scenario) == []

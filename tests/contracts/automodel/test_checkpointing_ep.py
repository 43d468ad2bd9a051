# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism with activation checkpointing: it trains as without, or the set-up refuses it by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nemo_automodel.components.moe import parallelizer

from tests.contracts.automodel import checkpointing_ranks, hybridep
from tests.contracts.automodel.upstream import HAS_SELECTIVE_CHECKPOINTING, PRELOAD
from tests.support.world import run_world

WORLD = 2
FULL = {"activation_checkpointing": True}
SELECTIVE = {"activation_checkpointing": "selective"}
ROUTER_RECOMPUTED = {**FULL, "ignore_router_for_ac": False}
PLAIN: dict[str, object] = {}
RECOMPUTING = {
    "full": FULL,
    "router": ROUTER_RECOMPUTED,
    **({"selective": SELECTIVE} if HAS_SELECTIVE_CHECKPOINTING else {}),
}
ISSUE = "https://github.com/NVIDIA-NeMo/Automodel/issues/3325"


def same(found: dict, reference: dict) -> list[str]:
    """What of a pass is not bit for bit that of another."""
    pairs = {name: (found[name], reference[name]) for name in ("output", "hidden")}
    pairs |= {name: (grad, reference["grads"][name]) for name, grad in found["grads"].items()}
    return [name for name, (got, want) in pairs.items() if not (got is want is None or torch.equal(got, want))]


def trains_or_is_refused(tmp_path: Path, mode: str, options: dict[str, object]) -> None:
    """Hold a pass through HybridEP against the same pass without checkpointing, or its refusal against what it owes."""
    matrix = {name: value for name, value in options.items() if name == "experts"}
    cases = [("hybridep", matrix), ("hybridep", options)]
    ranks = run_world(checkpointing_ranks.train_each, WORLD, tmp_path, (cases,), preload=PRELOAD)
    refusals = [rank[1]["refused"] for rank in ranks]
    if any(refusals):
        assert len(set(refusals)) == 1, f"the ranks differ: {refusals}"
        owed = [f"ep_size={WORLD}", "hybridep", mode, "activation_checkpointing: false", "dispatcher: torch", ISSUE]
        assert [part for part in owed if part not in refusals[0]] == [], refusals[0]
    else:
        for plain, checkpointed in ranks:
            assert same(checkpointed, plain) == []


@pytest.mark.contract("checkpointing.full", meaning="HybridEP with full checkpointing trains, or is refused by name")
def test_full_checkpointing_trains_or_is_refused(tmp_path: Path) -> None:
    trains_or_is_refused(tmp_path, "full", FULL)


@pytest.mark.contract("checkpointing.selective", meaning="the same with selective checkpointing")
def test_selective_checkpointing_trains_or_is_refused(tmp_path: Path) -> None:
    trains_or_is_refused(tmp_path, "selective", SELECTIVE)


@pytest.mark.contract("checkpointing.selective-saved-products", meaning="the same where the products are saved")
def test_selective_checkpointing_of_plain_products_trains_or_is_refused(tmp_path: Path) -> None:
    trains_or_is_refused(tmp_path, "selective", {**SELECTIVE, "experts": "gmm"})


@pytest.mark.contract("checkpointing.router-recomputed", meaning="the same where the router is not saved")
def test_recomputed_router_trains_or_is_refused(tmp_path: Path) -> None:
    trains_or_is_refused(tmp_path, "full", ROUTER_RECOMPUTED)


@pytest.mark.contract("checkpointing.allowed", meaning="what works is not refused, and trains as without checkpointing")
def test_other_dispatchers_and_no_checkpointing_train(tmp_path: Path) -> None:
    cases = [("torch", options) for options in (PLAIN, *RECOMPUTING.values())]
    cases += [("hybridep", options) for options in (PLAIN, {"activation_checkpointing": False})]
    for world_size, chosen in ((WORLD, cases), (1, [case for case in cases if case[0] == "torch"])):
        ranks = run_world(checkpointing_ranks.train_each, world_size, tmp_path, (chosen,), preload=PRELOAD)
        for rank in ranks:
            assert [found["refused"] for found in rank] == [None] * len(chosen)
            first = {dispatcher: chosen.index((dispatcher, PLAIN)) for dispatcher, _ in chosen}
            for (dispatcher, options), found in zip(chosen, rank, strict=True):
                assert same(found, rank[first[dispatcher]]) == [], (dispatcher, options)


@pytest.mark.contract("checkpointing.deepep", meaning="DeepEP is not refused")
@pytest.mark.parametrize("options", RECOMPUTING.values(), ids=RECOMPUTING)
def test_deepep_is_accepted(options: dict[str, object]) -> None:
    model = checkpointing_ranks.Model("torch", "torch")
    for block in model.model.layers.values():
        # DeepEP itself needs its package: this is what its experts carry after the set-up.
        block.mlp.experts.dispatcher_backend, block.mlp.experts.ep_size = "deepep", WORLD
    parallelizer.apply_ac(
        model,
        ignore_router=options.get("ignore_router_for_ac", True),
        **({"selective": True} if options == SELECTIVE else {}),
    )
    assert checkpointing_ranks.checkpointed(model)


@pytest.mark.contract("checkpointing.drift", meaning="routing is the same on recompute, the layout below it is not")
def test_the_layout_drifts_below_an_identical_routing(tmp_path: Path) -> None:
    # That the routing is the same, indices, mask and tokens an expert, the ranks hold as a precondition.
    for found in run_world(checkpointing_ranks.drift, WORLD, tmp_path, preload=PRELOAD):
        assert set(found["differences"]) == {hybridep.SPARE_ROWS}
        *forward, again = found["built"]
        assert len(forward) == checkpointing_ranks.LAYERS
        assert again == forward[-1] - hybridep.SPARE_ROWS


@pytest.mark.contract("checkpointing.modes", meaning="a mode means what it says; a misspelt one is refused")
def test_modes_mean_what_they_say(tmp_path: Path) -> None:
    expected = {True: True, "full": True, "off": False, "none": False, False: False}
    if HAS_SELECTIVE_CHECKPOINTING:
        expected["selective"] = True
    values = [*expected, "selectiv"]
    [found] = run_world(checkpointing_ranks.modes, 1, tmp_path, (values,), preload=PRELOAD)
    *known, (checkpointed, error) = found
    wrong = [value for value, (got, _) in zip(expected, known, strict=True) if got != expected[value]]
    assert not wrong, f"checkpointed or not, contrary to what they say: {wrong}"
    assert [error for _, error in known if error] == []
    assert error is not None, "a misspelt mode is accepted"
    assert not checkpointed
    assert all(mode in error for mode in expected if isinstance(mode, str)), error

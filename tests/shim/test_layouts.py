# SPDX-License-Identifier: Apache-2.0
"""Saved in one layout and loaded into another, on real ranks, with parameters that were never updated."""

from __future__ import annotations

import random
import re
from pathlib import Path

from tests.shim import layout_ranks, uneven_ranks
from tests.shim.layout_ranks import LAYOUTS, ranks_of
from tests.shim.search import FACTOR
from tests.support.world import run_world

Pair = tuple[str, str, str, int]

# Every layout is saved and loaded, each into itself and into three others or more.
OPTIMIZERS = ("adamw", "sgd-momentum", "adam-amsgrad", "adagrad", "nadam", "rmsprop-centered")


def planned(factor: int) -> list[Pair]:
    """(saved layout, layout, optimizer, steps before the save): the same ones unless a search is asked for."""
    draw = random.Random(0 if factor == 1 else None)
    names = list(LAYOUTS)
    pairs: list[Pair] = []
    for number, name in enumerate(names):
        others = [names[(number + distance) % len(names)] for distance in (0, 1, 4, 7)]
        pairs += [(source, name, OPTIMIZERS[0], 2) for source in others]
        pairs.append((draw.choice(names), name, draw.choice(OPTIMIZERS[1:]), draw.choice([0, 2])))
    for _ in range((factor - 1) * 10):
        pairs.append((draw.choice(names), draw.choice(names), draw.choice(OPTIMIZERS), draw.choice([0, 1, 3])))
    return list(dict.fromkeys(pairs))


def test_any_layout_resumes_in_any_other(tmp_path: Path) -> None:
    pairs = planned(FACTOR)
    saved = tmp_path / "saved"
    for ranks, names in ranks_of(list(LAYOUTS)):
        plan = sorted({(source, optimizer, steps) for source, _, optimizer, steps in pairs if source in names})
        run_world(layout_ranks.save_all, ranks, tmp_path / f"save-{ranks}", args=(plan, str(saved)), deadline=120)
    wrong = {}
    count = 0
    for ranks, names in ranks_of(list(LAYOUTS)):
        plan = [pair for pair in pairs if pair[1] in names]
        by_rank = run_world(
            layout_ranks.load_all, ranks, tmp_path / f"load-{ranks}", args=(plan, str(saved)), deadline=120
        )
        for rank, found in enumerate(by_rank):
            assert [pair for pair, _ in found] == plan
            count += len(found)
            wrong |= {(rank, *pair): paths for pair, paths in found if paths}
    assert wrong == {}
    assert count >= len(pairs) > 0


def test_ranks_that_do_not_agree_are_never_saved_in_silence(tmp_path: Path) -> None:
    by_rank = run_world(uneven_ranks.save_unevenly, 2, tmp_path, args=(str(tmp_path / "saved"),))
    wrong = {}
    for case in uneven_ranks.CASES:
        found = [rank[case] for rank in by_rank]
        texts = {rank["text"] for rank in found}
        exact = all(rank.get("resumed") == [] for rank in found)
        # The same text on all ranks, and it names the parameter.
        refused = len(texts) == 1 and re.search(r"\b(used|late)\b", str(*texts)) is not None
        right = exact if case in uneven_ranks.EVEN else exact or refused
        if not right or any(rank["changed"] for rank in found):
            wrong[case] = found
    assert wrong == {}


def test_metadata_is_read_once_and_consensus_is_cheap(tmp_path: Path) -> None:
    by_rank = run_world(layout_ranks.costs_of_a_load, 4, tmp_path, args=(str(tmp_path / "saved"),))
    assert sum(opened for opened, _ in by_rank) == 1
    entered = by_rank[0][1]
    assert all(mine == entered for _, mine in by_rank)
    # Broadcasts hand the metadata on (size, bytes); two others reach consensus, before anything is touched and after.
    handing_on = [name for name in entered if name.startswith("broadcast")]
    assert 0 < len(handing_on) <= 2
    assert len(entered) - len(handing_on) == 2

# SPDX-License-Identifier: Apache-2.0
"""A resume that cannot work fails on every rank with one readable error, in bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.automodel import failure_ranks
from tests.contracts.automodel.upstream import PRELOAD
from tests.support.world import run_world


def last_line(text: str) -> str:
    """What DCP's nested tracebacks come to."""
    return text.strip().splitlines()[-1].strip()[-120:]


def one_text(found: list[dict]) -> str:
    """The text of the refusal; the same on all ranks, which are unchanged."""
    texts = {rank["text"] for rank in found}
    assert None not in texts, (
        f"the load went through on ranks {[i for i, rank in enumerate(found) if not rank['text']]}"
    )
    said = {rank: last_line(found[rank]["text"]) for rank in range(len(found))}
    assert len(texts) == 1, f"the ranks were told different things: {said}"
    changed = {number: rank["changed"][:2] for number, rank in enumerate(found) if rank["changed"]}
    assert not changed, f"the refused load changed the live run: {changed}"
    return texts.pop()


@pytest.mark.contract(
    "failure.names-parameters", meaning="a refused resume names file, parameters and remedy on all ranks"
)
def test_unlisted_parameters_are_named_on_every_rank(tmp_path: Path) -> None:
    found = run_world(failure_ranks.unlisted_parameters, 2, tmp_path, preload=PRELOAD)
    text = {rank["text"] for rank in found}.pop() or ""
    unnamed = [
        word
        for word in ("added.weight", "added.bias", "another.weight", "another.bias", "checkpoint/optim", "allow_new")
        if word not in text
    ]
    assert not unnamed, f"the refusal does not name {unnamed}: {last_line(text)}"
    one_text(found)


@pytest.mark.contract("failure.unpicklable", meaning="an error that cannot be pickled still reaches every rank")
def test_an_unpicklable_error_reaches_every_rank(tmp_path: Path) -> None:
    outcomes = run_world(
        failure_ranks.unpicklable_read, 2, tmp_path, preload=PRELOAD, pg_timeout=6.0, deadline=20.0, check=False
    )
    failed = [f"rank {o.rank} {o.kind}: {o.message}" for o in outcomes if o.kind != "ok"]
    assert not failed, "; ".join(" ".join(text.split())[:200] for text in failed)
    text = one_text([outcome.value for outcome in outcomes])
    for word in ("the disk went away", "rank 1", ".distcp"):
        assert word in text

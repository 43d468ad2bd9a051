# SPDX-License-Identifier: Apache-2.0
"""The peers: the page and the figures are what the data give, and a few outcomes come about again."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.ticker import NullFormatter

from ci.peers import DATA, FIGURES, PAGE, figures, measure, outcome, report, side
from ci.peers.loaders import OURS, PEERS, SIDES, STOCK
from ci.peers.rows import BY_NAME, ROWS
from ci.regress import PATCHES, REPOSITORY, manifest

FOUND = json.loads(DATA.read_text(encoding="utf-8"))
AGAIN = ["dense", "partial", "cold, SGD", "new parameter", "partly stepped", "half an entry", "foreign"]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[side.Sides]:
    """All sides, with this interpreter."""
    with side.running({}, SIDES, tmp_path_factory.mktemp("peers") / "log") as running:
        yield running


# ------------------------------------------------------------------------------------------- made of the data


def test_page_is_what_the_data_give() -> None:
    assert report.page(FOUND) == PAGE.read_text(encoding="utf-8")


def words(svg: str) -> list[str]:
    """All that a figure says."""
    elements = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [text for element in elements if (text := "".join(element.itertext()).strip())]


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figure_is_what_the_data_give(name: str) -> None:
    drawn, kept = figures.svg(name, FOUND), (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert words(drawn) == words(kept)
    assert drawn == figures.svg(name, FOUND)
    if matplotlib.__version__ == FOUND["matplotlib"]:  # others may lay out in another way
        assert drawn == kept


def test_every_figure_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(report.FIGURES) == set(figures.FIGURES) == {file.stem for file in FIGURES.iterdir()}
    for name in figures.FIGURES:
        assert f"](figures/{name}.svg)" in text


def test_data_cover_every_row_and_peer() -> None:
    assert list(FOUND["outcomes"]) == [peer.name for peer in PEERS]
    for outcomes in FOUND["outcomes"].values():
        assert list(outcomes) == [row.name for row in ROWS]
    assert FOUND["sizes"] == json.loads(json.dumps(measure.Sizes()._asdict()))


def test_no_path_of_the_machine() -> None:
    for text in (PAGE.read_text(encoding="utf-8"), DATA.read_text(encoding="utf-8")):
        assert "/tmp" not in text
        assert str(REPOSITORY) not in text


# ----------------------------------------------------------------------------------------------- what is due


def test_ours_is_as_is_due_in_every_row() -> None:
    found = FOUND["outcomes"][OURS]
    assert [row.name for row in ROWS if not report.right(row, found[row.name])] == []
    assert not any(each.get("zeros") for each in found.values())


def test_a_draw_has_its_reason_and_no_other_row_has_one() -> None:
    assert sorted(report.as_good(FOUND)) == sorted(row.name for row in ROWS if row.tie)


def test_no_peer_does_what_is_due_as_often() -> None:
    counts = {
        name: sum(report.right(row, found[row.name]) for row in ROWS) for name, found in FOUND["outcomes"].items()
    }
    assert counts[OURS] == len(ROWS)
    assert max(count for name, count in counts.items() if name != OURS) < len(ROWS)


def test_peers_have_an_origin() -> None:
    for peer in PEERS:
        if peer.name != OURS:
            assert peer.origins()
            assert all(link.startswith(("https://github.com/", "https://docs.pytorch.org/")) for link in peer.origins())


# --------------------------------------------------------------------------------------------------- run again


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_outcomes_come_about_again(peer: Any, sides: side.Sides) -> None:
    """Sizes of drifts depend on the processor."""

    def kinds(found: dict[str, Any]) -> dict[str, Any]:
        return {name: {key: each[key] for key in each if key != "drift"} for name, each in found.items()}

    found = sides.ask(peer.side, do="rows", peer=peer.name, names=AGAIN)
    assert kinds(found) == kinds({name: FOUND["outcomes"][peer.name][name] for name in AGAIN})
    partial = found["partial"]
    if peer.name == OURS:
        assert partial == {"class": "exact"}
    elif peer.name in ("stock 0.7.0", "zeros"):
        assert partial == {"class": "exact", "zeros": True}
    elif peer.name == STOCK:
        assert partial == {"class": "error", "error": "CheckpointException", "changed": True}
    else:
        assert partial["class"] == "drift"
        assert partial["drift"] > 1e-3


def test_drift_is_zero_where_no_step_is_made_up(sides: side.Sides) -> None:
    asked = [peer for peer in PEERS if peer.side != "newest"]
    found = {peer.name: sides.ask(peer.side, do="drift", peer=peer.name, steps=[1, 2]) for peer in asked}
    assert found[OURS] == found["zeros"] == [0.0, 0.0]
    assert found[STOCK] is None
    assert all(found[name][1] > 1e-3 for name in ("partial load", "back-fill", "empty dicts", "skip"))


def test_costs_are_taken(sides: side.Sides, tmp_path: Path) -> None:
    for name, loads in ((STOCK, False), (OURS, True)):
        request = {"peer": name, "path": str(tmp_path / name), "count": 12, "shape": [4, 4], "cold": 3}
        side_of = next(peer.side for peer in PEERS if peer.name == name)
        saved = sides.ask(side_of, do="cost", operation="save", **request)
        assert saved["bytes"] > 0
        assert saved["cpu"] > 0
        loaded = sides.ask(side_of, do="cost", operation="load", **request)
        assert (loaded is not None) is loads


def test_a_side_that_fails_is_told(sides: side.Sides) -> None:
    with pytest.raises(side.SideError, match="KeyError: 'no such row'"):
        sides.ask("stock", do="rows", peer=STOCK, names=["no such row"])


# ------------------------------------------------------------------------------------------- what a word means


@pytest.mark.parametrize(
    ("failure", "changed", "kind"),
    [
        (RuntimeError("layer0.weight lacks exp_avg"), False, "refused"),
        (RuntimeError("layer0.weight lacks exp_avg"), True, "error"),
        (RuntimeError("something is missing"), False, "error"),
        (KeyError("layer0.weight"), False, "error"),
    ],
)
def test_what_a_refusal_is(failure: Exception, changed: bool, kind: str) -> None:
    found = outcome._failed(BY_NAME["half an entry"], failure, changed)
    assert (found["class"], found["error"]) == (kind, type(failure).__name__)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"class": "exact"}, "exact"),
        ({"class": "exact", "zeros": True}, "exact †"),
        ({"class": "drift", "drift": 0.00512}, "drift 5e-03"),
        ({"class": "drift", "drift": 0.0}, "drift (state)"),
        ({"class": "error", "error": "KeyError", "changed": True}, "error ‡"),
        ({"class": "error", "error": "KeyError", "changed": False}, "error"),
        ({"class": "silent"}, "silent"),
    ],
)
def test_words_of_a_cell(found: dict[str, Any], text: str) -> None:
    assert report.cell(found) == text
    assert any(text.startswith(word.partition(" n")[0]) for word in report.CLASSES)


def test_moments_that_are_lost_are_no_zeros() -> None:
    """State on one side only means nothing where it is zeros; a run that has none at all has lost it."""
    from tests.support.scenario import start

    party = start(BY_NAME["partial"].scenario())
    path = ["resumed, later.state.layer0.weight (on one side only)"]
    assert not outcome._only_zeros(path, {"resumed": party})
    state = party.optimizer.state[party.params[0]]
    state["exp_avg"] = party.params[0].detach() * 0
    assert outcome._only_zeros(path, {"resumed": party})
    state["exp_avg"] = state["exp_avg"] + 1
    assert not outcome._only_zeros(path, {"resumed": party})


def test_a_reason_that_is_not_needed_is_found() -> None:
    """The page cannot call a draw a win: the rows in which a peer is as good come from the data alone."""
    data = json.loads(json.dumps(FOUND))
    data["outcomes"][STOCK]["half an entry"] = {"class": "refused", "error": "E", "changed": False}
    assert report.as_good(data)["half an entry"] == [STOCK]


# ---------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("name", figures.FIGURES)
def test_axes_are_labelled_with_units(name: str) -> None:
    figure = figures.draw(name, FOUND)
    assert figure.axes
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            label = axis.get_label_text()
            assert label
            # A unit in brackets; the names of the peers have none.
            assert label == "peer" or label.count("(") == label.count(")") == 1, label
            assert not isinstance(axis.get_major_formatter(), NullFormatter)
        assert axes.get_title(loc="left")


@pytest.mark.parametrize("name", figures.FIGURES)
def test_lines_are_told_apart_without_colour(name: str) -> None:
    for axes in figures.draw(name, FOUND).axes:
        looks = {line.get_label(): (line.get_marker(), str(figures.LINES[line.get_label()][2])) for line in axes.lines}
        for one, other in itertools.combinations(looks, 2):
            assert looks[one][0] != looks[other][0], (one, other)
            assert looks[one][1] != looks[other][1], (one, other)


def test_ours_is_a_flat_zero() -> None:
    (axes,) = figures.draw("drift", FOUND).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert set(lines[OURS]) == {0.0}
    assert min(lines["partial load"]) > 0
    assert axes.get_yscale() == "symlog"


def test_gathers_that_are_almost_right_are_seen() -> None:
    for name, found in FOUND["gradient"]["gathers"].items():
        for errors in found.values():
            if name in (OURS, "stock 0.7.0"):
                assert max(errors.values()) < 1e-6
            else:
                assert errors["hidden"] > 0.1
                assert errors["router"] is None or errors["router"] > 0.1
    assert set(FOUND["gradient"]["gathers"][STOCK]["2"]) == {"router", "hidden"}


# --------------------------------------------------------------------------------------------------- the session


def test_session_makes_the_environment_of_the_release_that_the_side_takes() -> None:
    text = (REPOSITORY / "noxfile.py").read_text(encoding="utf-8")
    assert f'NEWEST = "{side.RELEASES["newest"]}"' in text
    assert '"-m", "ci.peers", "--newest-python"' in text
    loaded = manifest.load(PATCHES)
    versions = {name: loaded.select(target)[1].wheel.version for name, target in side.RELEASES.items()}
    assert versions == {"stock": "0.5.0", "newest": "0.7.0", "ours": "0.5.0"}


def test_rows_are_told_apart() -> None:
    assert len(BY_NAME) == len(ROWS)
    inputs = [dataclasses.replace(row, name="", meaning="", tie="", group="") for row in ROWS]
    assert all(one != other for one, other in itertools.combinations(inputs, 2))

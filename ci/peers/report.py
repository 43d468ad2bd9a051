# SPDX-License-Identifier: Apache-2.0
"""The page, from the data."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from ci.bench.timing import Spread, ratio
from ci.peers import measure, outcome
from ci.peers.loaders import OURS, PEERS, STOCK
from ci.peers.rows import BY_NAME, ROWS, Row

ZEROS_MARK, CHANGED_MARK = "†", "‡"
CLASSES = {
    "exact": "each parameter and each tensor of optimizer state equals that of the uninterrupted run bit for bit, "
    "after four more steps; so do options and schedulers, and the save moved nothing",
    f"exact {ZEROS_MARK}": "the same, but for state of zeros at step 0 where the uninterrupted run has none. It means "
    "the same, so it counts as exact; its price is in the last column of the costs",
    "drift n": "it loads without a word, and parameters are off by up to n after four more steps",
    "drift (state)": "it loads without a word, parameters agree so far, and state, options or scheduler do not",
    "refused": "an error that names the parameter (or the file, or the optimizer), and the live run is as it was",
    "error": "any other error: a slip inside (`KeyError`), one that names nothing of use, or "
    f"{CHANGED_MARK}, one after which the live run has changed",
    "silent": "a refusal was due, and it goes on without a word, from state that is not the run's",
}
COLUMNS = {  # heading -> operation, figure, least value that counts
    "load time": ("load", "cpu", 0.0),
    "load memory": ("load", "extra", 2**20),
    "save time": ("save", "cpu", 0.0),
    "save memory": ("save", "extra", 2**20),
    "bytes": ("save", "bytes", 0.0),
}
FIGURES = {
    "drift": "How far a resumed run is off, by steps since the resume: {row}. Peers that do not load have no line.",
    "gradient": "What a gather's backward does to gradients under expert parallelism: relative norm of the difference "
    "to one process, fp32, the worst of the gather contracts' cases. Stock 0.5.0 gives its router no gradient at all.",
    "load-time": "What a load takes, by the number of small parameters, and by the share of them that was never "
    "updated. Stock 0.5.0 loads nothing of which a part is cold.",
    "memory": "Memory that a load takes beyond what there was before, and what lies on disk where half of the state "
    "was never made.",
}


def cell(found: dict[str, Any]) -> str:
    """An outcome in words."""
    kind = found["class"]
    if kind == outcome.DRIFT:
        return f"drift {found['drift']:.0e}" if found["drift"] else "drift (state)"
    mark = ZEROS_MARK if found.get("zeros") else CHANGED_MARK if kind == outcome.ERROR and found["changed"] else ""
    return f"{kind} {mark}".strip()


def right(row: Row, found: dict[str, Any]) -> bool:
    """Whether what is due came about."""
    return found["class"] == row.due


def as_good(data: dict[str, Any]) -> dict[str, list[str]]:
    """Rows in which ours is not ahead of every peer, with the peers that are as good, or all of them."""
    found = {}
    for row in ROWS:
        outcomes = {name: of[row.name] for name, of in data["outcomes"].items()}
        mine = right(row, outcomes.pop(OURS))
        same = [name for name, other in outcomes.items() if right(row, other) or not mine]
        if same:
            found[row.name] = same
    return found


def page(data: dict[str, Any]) -> str:
    """The page as Markdown."""
    names = [peer.name for peer in PEERS]
    lines = ["# Peers: ways to resume an optimizer, side by side", ""]
    lines += [
        "Made by `nox -s peers`; do not edit. One run, the same inputs for all; its data: [peers.json](peers.json).",
        "",
    ]
    lines += ["| peer | what it does | origin |", "|---|---|---|"]
    for peer in PEERS:
        links = "none: this project" if peer.name == OURS else ", ".join(_link(link) for link in peer.origins())
        lines.append(f"| {peer.name} | {peer.meaning} | {links} |")
    lines += ["", "All but stock 0.7.0 run on the release 0.5.0, and differ in nothing but what is named.", ""]
    lines += ["## How to read a cell", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {meaning} |" for name, meaning in CLASSES.items()]
    lines += [
        "",
        "What is due is *exact* where the file is whole, however sparse, and *refused* where it is not, or not this",
        "run's. **Bold** is what is due. A refusal of a whole file is not, nor is one after which the live run has",
        "changed: who catches it would go on from state that nobody made.",
        "",
        "## Outcomes",
        "",
        f"| row | due | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for group, members in groupby(ROWS, key=lambda row: row.group):
        lines.append(f"| **{group}** | | {' | '.join('' for _ in names)} |")
        for row in members:
            found = [data["outcomes"][name][row.name] for name in names]
            texts = [f"**{cell(each)}**" if right(row, each) else cell(each) for each in found]
            lines.append(f"| {row.name} | {row.due} | {' | '.join(texts)} |")
    counts = [sum(right(row, data["outcomes"][name][row.name]) for row in ROWS) for name in names]
    lines += [f"| **as is due**, of {len(ROWS)} | | {' | '.join(f'**{count}**' for count in counts)} |", ""]
    lines += ["| row | |", "|---|---|"]
    lines += [f"| {row.name} | {_optimizer(row)}{row.meaning} |" for row in ROWS]
    lines += ["", "## Where ours is not ahead", ""]
    lines += ["In every other row ours alone does what is due.", "", "| row | as good | why |", "|---|---|---|"]
    lines += [f"| {name} | {', '.join(same)} | {BY_NAME[name].tie} |" for name, same in as_good(data).items()]
    lines += ["", *_costs(data), "## Figures", ""]
    for name, text in FIGURES.items():
        lines += [f"![{_plain(text)}](figures/{name}.svg)", "", text.format(row=_drift_row(data)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _optimizer(row: Row) -> str:
    kind = row.optimizer
    return "" if row.group == "Other optimizers" or kind == "adamw" else f"{kind}: "


def _link(link: str) -> str:
    found = re.match(r"https://(?:github\.com/([^/]+/[^/]+)|docs\.pytorch\.org)(?:.*/([^/]+))?", link)
    return f"[{found[1] or 'torch'}{': ' + found[2] if found[2] else ''}]({link})"


def _drift_row(data: dict[str, Any]) -> str:
    return BY_NAME[data["drift"]["row"]].meaning


def _plain(text: str) -> str:
    return text.partition(":")[0].partition(". ")[0].rstrip(".")


def shares(data: dict[str, Any], case: measure.Case, peer: str) -> dict[str, Spread | None]:
    """A peer's costs as ratios to stock's, by column; of a load that stock refuses, to that of the dense file."""
    found: dict[str, Spread | None] = {}
    for heading, (operation, figure, least) in COLUMNS.items():
        mine = data["costs"][case.name][peer][operation]
        base = data["costs"][case.name][STOCK][operation] or data["costs"][case._replace(cold=0).name][STOCK][operation]
        found[heading] = mine and ratio(*([max(least, value) for value in values[figure]] for values in (mine, base)))
    return found


def _costs(data: dict[str, Any]) -> list[str]:
    sizes = measure.Sizes(**data["sizes"])
    by = measure.cases(sizes)
    small, (large, half) = by["number"][-1], by["large"]
    shared = by["share"][len(by["share"]) // 2]
    machine = data["machine"]
    lines = [
        "## Costs",
        "",
        "Ratios to stock 0.5.0, which is 1: the median of pairs taken in turns in one run, with the least and the",
        f"greatest, of {sizes.repeats} pairs, and of {sizes.repeats_of_large} where parameters are large. Time is",
        "processor time; a save of large ones hangs on the disk too, as its spread shows. Memory is the peak beyond",
        "what there was before, and at least 1 MiB. Where stock refuses a file, the ratio is to its load of a",
        "dense one of the same size. “–”: it does not load. Ours writes the name of each parameter that was",
        "never updated, which is what its files have more than stock's.",
        f"Taken with Python {machine['python']}, torch {machine['torch']}, {machine['cpus']} processors.",
        "",
    ]
    titles = {
        small: f"{small.count} small parameters, all updated",
        shared: f"{shared.count} small parameters, {shared.cold} never updated",
        large: f"{sizes.large} MiB of state in {large.count} parameters, all updated",
        half: f"The same {half.count} parameters, {half.cold} never updated",
    }
    for case, title in titles.items():
        lines += [f"### {title}", "", f"| peer | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
        for peer in PEERS:
            texts = ["–" if value is None else _spread(value) for value in shares(data, case, peer.name).values()]
            lines.append(f"| {peer.name} | {' | '.join(texts)} |")
        lines.append("")
    return lines


def _spread(value: Spread) -> str:
    middle, low, high = (f"{each:.2f}" for each in (value.median, value.low, value.high))
    return middle if low == high else f"{middle} ({low}–{high})"

# SPDX-License-Identifier: Apache-2.0
"""All that a run asks of the sides: outcomes, drift over steps, gradient errors, costs. What it returns is the data."""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from ci.peers.loaders import OURS, PEERS
from ci.peers.rows import DRIFT_ROW, ROWS
from ci.peers.side import Sides

# Gathers of the figure: the side, and the test double in its place, if any.
GATHERS = {
    "stock 0.5.0": ("stock", None),
    "stock 0.7.0": ("newest", None),
    "slice": ("newest", "slices"),
    "mean": ("newest", "averages"),
    OURS: ("ours", None),
}


class Sizes(NamedTuple):
    """How much is measured."""

    steps: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    degrees: tuple[int, ...] = (2, 4, 8)
    every: int = 1  # of the gather's cases
    counts: tuple[int, ...] = (250, 1000, 4000)
    shared: int = 1000  # parameters, where the share of the cold ones varies
    shares: tuple[int, ...] = (0, 3, 10, 25, 50, 75)
    large: int = 256  # MiB of state in eight tensors, half of them cold
    repeats: int = 3
    repeats_of_large: int = 9  # short, and at the mercy of the disk


FAST = Sizes(
    steps=(1, 4),
    degrees=(2,),
    every=5,
    counts=(20, 40),
    shared=20,
    shares=(0, 50),
    large=8,
    repeats=2,
    repeats_of_large=2,
)


class Case(NamedTuple):
    """One model of the cost measurements: small parameters, or few large ones."""

    count: int
    shape: tuple[int, int] = (4, 4)
    cold: int = 0

    @property
    def name(self) -> str:
        """Number, shape, cold."""
        return f"{self.count} of {self.shape[0]}x{self.shape[1]}, {self.cold} cold"


def cases(sizes: Sizes) -> dict[str, list[Case]]:
    """By what they show; the first of each list is dense."""
    rows = sizes.large * 2**20 // (8 * 2 * 4 * 256)
    return {
        "number": [Case(count) for count in sizes.counts],
        "share": [Case(sizes.shared, cold=sizes.shared * share // 100) for share in sizes.shares],
        "large": [Case(8, (rows, 256), cold) for cold in (0, 4)],
    }


def run(sides: Sides, sizes: Sizes) -> dict[str, Any]:
    """Everything, in one run."""
    _say("outcomes")
    outcomes = {
        peer.name: sides.ask(peer.side, do="rows", peer=peer.name, names=[row.name for row in ROWS]) for peer in PEERS
    }
    _say("drift over steps")
    drift = {
        peer.name: _rounded(sides.ask(peer.side, do="drift", peer=peer.name, steps=list(sizes.steps))) for peer in PEERS
    }
    gradient: dict[str, dict[str, Any]] = {}
    for name, (side, impostor) in GATHERS.items():
        _say(f"gradient: {name}")
        gradient[name] = {
            str(size): _rounded(sides.ask(side, do="gradient", size=size, impostor=impostor, every=sizes.every))
            for size in sizes.degrees
        }
    return {
        "sizes": sizes._asdict(),
        "outcomes": _rounded(outcomes),
        "drift": {"row": DRIFT_ROW.name, "steps": list(sizes.steps), "peers": drift},
        "gradient": {"degrees": list(sizes.degrees), "gathers": gradient},
        "costs": costs(sides, sizes),
    }


def costs(sides: Sides, sizes: Sizes) -> dict[str, Any]:
    """Case -> peer -> operation -> figure -> one value a repeat; ``None`` for a load that is refused."""
    taken: dict[str, Any] = {}
    chosen = dict.fromkeys(case for several in cases(sizes).values() for case in several)
    with tempfile.TemporaryDirectory(prefix="peers-") as place:
        for case in chosen:
            _say(case.name)
            found: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
            large = case in cases(sizes)["large"]
            for repeat in range(sizes.repeats_of_large if large else sizes.repeats):
                turn = repeat % len(PEERS)
                for peer in PEERS[turn:] + PEERS[:turn]:
                    for operation in ("save", "load"):
                        request = {"count": case.count, "shape": case.shape, "cold": case.cold, "peer": peer.name}
                        path = str(Path(place) / peer.name.replace(" ", "-"))
                        answer = sides.ask(peer.side, do="cost", operation=operation, path=path, **request)
                        if answer is None:
                            found[peer.name][operation] = None
                            continue
                        for figure, value in answer.items():
                            found[peer.name][operation][figure].append(value)
            taken[case.name] = {name: dict(operations) for name, operations in found.items()}
    return _rounded(taken)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

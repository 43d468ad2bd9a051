# SPDX-License-Identifier: Apache-2.0
"""The figures, from the data: the same bytes each time with the same matplotlib.

Peers differ in marker and line style, and their colours in lightness, so that a print in grey can be read.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ci.peers import measure
from ci.peers.loaders import OURS, PEERS, STOCK

STYLE = {
    "svg.hashsalt": "peers",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "0.85",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# colour, marker, dashes
LINES: dict[str, tuple[str, str, Any]] = {
    "stock 0.5.0": ("#000000", "s", (0, (1, 1))),
    "stock 0.7.0": ("#7a5195", "D", (0, (4, 1, 1, 1))),
    "partial load": ("#c8553d", "^", (0, (5, 2))),
    "zeros": ("#4c9f70", "v", (0, (2, 2))),
    "back-fill": ("#d98e04", "P", (0, (7, 1, 1, 1, 1, 1))),
    "empty dicts": ("#5aa9d6", "X", (0, (3, 1, 1, 1))),
    "skip": ("#8c8c8c", "*", (0, (1, 3))),
    "slice": ("#c8553d", "^", (0, (5, 2))),
    "mean": ("#d98e04", "v", (0, (2, 2))),
    OURS: ("#003f5c", "o", "-"),
}
MIB = 2**20


def _line(axes: Axes, name: str, x: list[float], y: list[float], place: int) -> None:
    colour, marker, dashes = LINES[name]
    mine = {"linewidth": 2.0, "markersize": 5} if name == OURS else {"linewidth": 1.2, "markersize": 8, "zorder": 3}
    every = len(x) // 3 if len(x) > 6 else 1
    axes.plot(
        x,
        y,
        label=name,
        color=colour,
        marker=marker,
        linestyle=dashes,
        markerfacecolor=colour if name == OURS else "none",
        markevery=(place % every, every),  # lines that coincide keep their markers apart
        clip_on=False,
        **mine,
    )


def _zero_log(axes: Axes, least: float, top: float) -> None:
    """A log scale with zero below it."""
    axes.set_yscale("symlog", linthresh=least, linscale=0.6)
    axes.set_ylim(0, top)
    exponent = round(_log10(least))
    places = [0.0, *(10.0**power for power in range(exponent, 2) if 10.0**power <= top)]
    axes.yaxis.set_major_locator(FixedLocator(places))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$10^{{{round(_log10(value))}}}$" if value else "0"))


def _log10(value: float) -> float:
    from math import log10

    return log10(value)


def drift(data: dict[str, Any]) -> Figure:
    """Drift over steps."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    steps = data["drift"]["steps"]
    absent = []
    for place, (name, values) in enumerate(data["drift"]["peers"].items()):
        if values is None:
            absent.append(name)
            continue
        _line(axes, name, steps, values, place)
    values = [value for found in data["drift"]["peers"].values() for value in found or ()]
    _zero_log(axes, 1e-4, max([1e-3, *values]) * 2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([step for step in steps if step & (step - 1) == 0]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("steps since the resume (optimizer steps)")
    axes.set_ylabel("largest difference of a parameter\n(absolute, parameters of size 1)")
    title = "Drift after a resume, AdamW, lr 0.01"
    axes.set_title(title + (f"; does not load: {', '.join(absent)}" if absent else ""), fontsize=9, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, handlelength=4)
    return figure


def gradient(data: dict[str, Any]) -> Figure:
    """Gradient error by EP degree."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    degrees = data["gradient"]["degrees"]
    panels = figure.subplots(1, 2, sharey=True)
    kinds = {"router": "router weights", "hidden": "hidden states"}
    for axes, (kind, title) in zip(panels, kinds.items(), strict=True):
        for name, found in data["gradient"]["gathers"].items():
            values = [found[str(degree)][kind] for degree in degrees]
            # No gradient at all is off by all of it.
            _line(axes, name, degrees, [1.0 if value is None else value for value in values], 0)
        axes.set_yscale("log")
        axes.set_ylim(1e-8, 10)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(degrees))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("EP degree (ranks)")
        axes.set_ylabel("relative error of the gradient\n(ratio of norms)")
        axes.set_title(f"Gradient of the {title}", fontsize=9, loc="left")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, handlelength=3.5)
    return figure


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def load_time(data: dict[str, Any]) -> Figure:
    """Load time by number and by share of cold ones."""
    sizes = measure.Sizes(**data["sizes"])
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    by = measure.cases(sizes)
    xs = {"number": list(sizes.counts), "share": list(sizes.shares)}
    for axes, (kind, x) in zip(panels, xs.items(), strict=True):
        for place, peer in enumerate(PEERS):
            if peer.name == "skip":
                continue
            found = [data["costs"][case.name][peer.name]["load"] for case in by[kind]]
            points = [(at, _median(value["cpu"])) for at, value in zip(x, found, strict=True) if value]
            _line(axes, peer.name, *map(list, zip(*points, strict=True)), place)
        axes.set_ylabel("processor time of a load (s)")
    panels[0].set_xscale("log")
    panels[0].set_yscale("log")
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panels[0].xaxis.set_major_locator(FixedLocator(list(sizes.counts)))
    panels[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    panels[0].xaxis.set_minor_locator(NullLocator())
    panels[0].set_xlabel("parameters, all updated (count)")
    panels[0].set_title("By number of parameters", fontsize=9, loc="left")
    panels[1].set_ylim(bottom=0)
    panels[1].set_xlabel(f"never updated (% of {sizes.shared} parameters)")
    panels[1].set_title("By share of cold ones", fontsize=9, loc="left")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, handlelength=3.5)
    return figure


def memory(data: dict[str, Any]) -> Figure:
    """Memory of a load, bytes of a file."""
    sizes = measure.Sizes(**data["sizes"])
    by = measure.cases(sizes)
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    small, half = by["number"][-1], by["large"][1]
    shown = {
        "extra": (small, "load", f"Load of {small.count} small parameters", "memory beyond what there was (MiB)"),
        "bytes": (half, "save", f"{half.count} large parameters, {half.cold} never updated", "file on disk (MiB)"),
    }
    peers = [peer.name for peer in PEERS][::-1]
    for axes, (key, (case, operation, title, label)) in zip(panels, shown.items(), strict=True):
        values = [_median(data["costs"][case.name][name][operation][key]) / MIB for name in peers]
        bars = axes.barh(peers, values, color="0.75", edgecolor="black", linewidth=0.8)
        bars[peers.index(OURS)].set(facecolor=LINES[OURS][0], hatch="//", edgecolor="white")
        bars[peers.index(STOCK)].set(facecolor="white")
        labels = [f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in values]
        axes.bar_label(bars, labels=labels, padding=2, fontsize=8)
        axes.margins(x=0.15)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(label)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_ylabel("peer")
    return figure


FIGURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "drift": drift,
    "gradient": gradient,
    "load-time": load_time,
    "memory": memory,
}


def draw(name: str, data: dict[str, Any]) -> Figure:
    """The figure of that name."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        return FIGURES[name](data)


def svg(name: str, data: dict[str, Any]) -> str:
    """Its SVG: no date, and ids that depend on nothing else."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure, buffer = FIGURES[name](data), io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"

# SPDX-License-Identifier: Apache-2.0
"""Say what a run showed: a table for people, ``report.json`` and ``junit.xml`` for machines.

``python -m ci.regress.report`` prints the JSON schema, which is kept as ``ci/regress/report.schema.json``.
"""

from __future__ import annotations

import json
import signal
import sys
import textwrap
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ci.regress.manifest import Expectation, Status
from ci.regress.records import Number, Record, SideRecord, TestRecord
from ci.regress.verdict import State, Verdict, headline

FILES = ("report.json", "junit.xml", "summary.txt", "report.html")
TITLES = {"stock": "stock", "patched": "patched", "installed": "shim", "as-is": "as it stands"}
_WIDTH = 140
_HEADLINE = 200  # characters of a failure's first line in the table
_STYLES = {
    "green": "green",
    "fixed": "green",
    "guard": "green",
    "red": "red",
    "open": "yellow",
    "not run": "cyan",
    "regression": "bold red",
    "broken": "bold red",
}


class Source(Record):
    """Where the tree under test comes from."""

    kind: Literal["wheel", "git", "tree"]
    location: str
    commit: str
    describe: str


class PatchRecord(Record):
    """A patch of the series in this run."""

    file: str
    status: Status
    outcome: Literal["applied", "absent", "already there", "not applied"]


class ContractSide(Record):
    """A contract on one side."""

    state: State
    tests: int
    not_run: int
    duration_s: float
    headline: str = ""
    measured: dict[str, list[Number]] = Field(default_factory=dict)


class ContractRecord(Record):
    """A contract and its verdict.  ``ok``: whether it lets the run pass."""

    id: str
    meaning: str
    expectation: Expectation | None
    verdict: Verdict
    as_declared: bool
    ok: bool
    notes: list[str] = Field(default_factory=list)
    sides: dict[str, ContractSide]


class Report(Record):
    """A whole run."""

    schema_version: Literal[1] = 1
    target: str
    source: Source
    patches: list[PatchRecord]
    warnings: list[str]
    contracts: list[ContractRecord]
    counts: dict[Verdict, int]
    tests_not_run: int
    sides: list[SideRecord]
    duration_s: float
    exit_status: int


def contract_side(tests: Sequence[TestRecord], state: State) -> ContractSide:
    """Sum a contract's tests on one side up."""
    measured: dict[str, list[float]] = {}
    for test in tests:
        for name, value in test.measured.items():
            measured.setdefault(name, []).append(value)
    first = next((test for test in tests if test.outcome in ("failed", "error", "skipped")), None)
    if first is None:
        first = next((test for test in tests if test.outcome == "not-run"), None)
    return ContractSide(
        state=state,
        tests=len(tests),
        not_run=sum(test.outcome == "not-run" for test in tests),
        duration_s=sum(test.duration_s for test in tests),
        headline=headline(first, with_type=first.outcome != "not-run") if first is not None else "",
        measured=measured,
    )


def table(report: Report) -> Table:
    """Return the table of verdicts."""
    columns = [side.side for side in report.sides]
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    result.add_column("contract", overflow="fold", min_width=12)
    for side in columns:
        result.add_column(TITLES[side], no_wrap=True)
    result.add_column("verdict", no_wrap=True)
    result.add_column("what it means", overflow="fold", ratio=1)
    for row in report.contracts:
        cells = [Text(row.id)]
        for side in columns:
            state = row.sides[side].state.value
            cells.append(Text(state, style=_STYLES.get(state, "magenta")))
        flag = "" if row.ok else " ✗"
        cells.append(Text(row.verdict.value + flag, style=_STYLES[row.verdict.value]))
        meaning = Text(row.meaning)
        for note in row.notes:
            meaning.append(f"\n{'•' if row.ok else '✗'} {_cut(note)}", style="yellow" if row.ok else "bold red")
        # What is open fails on all sides in the same, declared way: once is enough.
        for side in columns[:1] if row.verdict is Verdict.OPEN else columns:
            line = row.sides[side].headline
            if line and not any(line in note for note in row.notes):
                meaning.append(f"\n{TITLES[side]}: {_cut(line)}", style="dim")
        result.add_row(*cells, meaning)
    return result


def summary(report: Report) -> list[str]:
    """Return the lines beneath the table."""
    counts = Counter({verdict.value: number for verdict, number in report.counts.items()})
    undeclared = [row.id for row in report.contracts if not row.as_declared]
    red = [row.id for row in report.contracts if row.as_declared and not row.ok]
    lines = [
        f"{counted(len(report.contracts), 'contract')}: "
        + ", ".join(f"{counts[verdict.value]} {verdict.value}" for verdict in Verdict if counts[verdict.value])
        + (f"; {counted(report.tests_not_run, 'test')} not run" if report.tests_not_run else "")
    ]
    if undeclared:
        lines.append(f"not as declared: {', '.join(undeclared)}")
    if red:
        lines.append(f"red, which --require-green does not admit: {', '.join(red)}")
    for warning in report.warnings:
        lines.append(f"warning: {warning}")
    lines.append(f"tree: {report.source.describe}")
    torches = sorted({side.torch or "not imported" for side in report.sides})
    pythons = sorted({side.python for side in report.sides})
    lines.append(f"torch {', '.join(torches)}; Python {', '.join(pythons)}")
    per_side = ", ".join(f"{TITLES[side.side]} {side.duration_s:.1f} s" for side in report.sides)
    lines.append(f"time: {report.duration_s:.1f} s ({per_side})")
    spent = Counter({row.id: sum(side.duration_s for side in row.sides.values()) for row in report.contracts})
    slowest = [f"{name} {seconds:.1f} s" for name, seconds in spent.most_common(3)]
    if slowest:
        lines.append(f"slowest: {', '.join(slowest)}")
    return lines


class _Console(Console):
    """A console whose reader may go away: that is no verdict, and has the status that a shell gives it."""

    def on_broken_pipe(self) -> None:
        """Redirect what is still to come, and end the run."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(128 + signal.SIGPIPE) from None


def console_for(stream: object = None, color: bool = True) -> Console:
    """Return a console; away from a terminal it is wide enough for the table, whatever the default."""
    console = _Console(file=stream or sys.stdout, highlight=False, no_color=None if color else True)
    if not console.is_terminal:
        console = _Console(file=stream or sys.stdout, highlight=False, no_color=True, width=_WIDTH)
    return console


def write(report: Report, directory: Path) -> None:
    """Write ``report.json``, ``junit.xml`` and ``summary.txt``.  Raises ``OSError``."""
    text = report.model_dump_json(indent=2, by_alias=True)
    (directory / "report.json").write_text(text + "\n", encoding="utf-8")
    tree = junit(report)
    ET.indent(tree)
    tree.write(directory / "junit.xml", encoding="utf-8", xml_declaration=True)
    with (directory / "summary.txt").open("w", encoding="utf-8") as stream:
        lines = [Text(line) for line in ("", *summary(report))]
        console_for(stream, color=False).print(Group(table(report), *lines))


def record(report: Report, path: Path) -> None:
    """Keep what a run came to in a data file, beside the last run of each other target.  Raises ``OSError``."""
    kept = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept[report.target] = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": report.source.commit,
        "torch": report.sides[0].torch or "",
        "python": report.sides[0].python,
        "exit_status": report.exit_status,
        **{verdict.value.replace(" ", "_"): number for verdict, number in report.counts.items() if number},
    }
    lines = ["# The last run of each target, written by `python -m ci.regress --record`."]
    for target in sorted(kept):
        lines += [
            "",
            f"[{json.dumps(target)}]",
            *(f"{key} = {json.dumps(value)}" for key, value in kept[target].items()),
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def junit(report: Report) -> ET.ElementTree:
    """Return the verdicts as JUnit XML: one test case per contract, a failure unless it is as declared."""
    failures = [row for row in report.contracts if not row.ok]
    skipped = [row for row in report.contracts if row.ok and row.verdict is Verdict.NOT_RUN]
    suite = ET.Element(
        "testsuite",
        name=f"regress {report.target}",
        tests=str(len(report.contracts)),
        failures=str(len(failures)),
        errors="0",
        skipped=str(len(skipped)),
        time=f"{report.duration_s:.3f}",
    )
    for row in report.contracts:
        seconds = sum(side.duration_s for side in row.sides.values())
        case = ET.SubElement(suite, "testcase", classname=report.target, name=row.id, time=f"{seconds:.3f}")
        states = ", ".join(f"{TITLES[name]} {side.state.value}" for name, side in row.sides.items())
        message = xml_safe(f"{row.verdict.value} ({states}): {'; '.join(row.notes) or row.meaning}")
        if not row.ok:
            ET.SubElement(case, "failure", message=message).text = xml_safe(_texts(report, row))
        elif row.verdict is Verdict.NOT_RUN:
            ET.SubElement(case, "skipped", message=message)
        else:
            ET.SubElement(case, "system-out").text = message
    root = ET.Element("testsuites")
    root.append(suite)
    return ET.ElementTree(root)


def schema() -> dict[str, object]:
    """Return the JSON schema of ``report.json``."""
    return Report.model_json_schema(mode="serialization")


def _texts(report: Report, row: ContractRecord) -> str:
    parts = []
    for side in report.sides:
        for test in side.tests:
            if test.contract == row.id and test.text:
                parts.append(f"--- {TITLES[side.side]}: {test.nodeid}\n{test.text}")
    return "\n".join(parts)


def _cut(line: str) -> str:
    return textwrap.shorten(line, _HEADLINE, placeholder=" …")


def xml_safe(text: str) -> str:
    """Return a text with a question mark for each character that XML and HTML do not admit."""
    return "".join(char if char in "\n\t" or (char >= " " and char not in "\ufffe\uffff") else "?" for char in text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2, sort_keys=True))

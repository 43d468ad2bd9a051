# SPDX-License-Identifier: Apache-2.0
"""The report as a page to look at: one HTML file without scripts that asks for nothing else, on disk or from a server.

What the page says comes from the report; what it says about the patches, from ``series.toml`` and the series.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email import message_from_string, policy
from importlib import metadata
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import ValidationError

from ci.regress.manifest import Patch, Target
from ci.regress.records import Outcome, TestRecord
from ci.regress.report import TITLES, ContractRecord, ContractSide, Report, counted, xml_safe
from ci.regress.verdict import Verdict

FILE = "report.html"
INDEX = "index.html"

# What a verdict says, where there are two sides; and of one tree as it stands.
MEANINGS = {
    Verdict.FIXED: "fails on the release as declared, holds with the patches",
    Verdict.GUARD: "holds on the release, and still does with the patches",
    Verdict.OPEN: "fails on both as declared; no patch cures it yet",
    Verdict.REGRESSION: "holds on the release, fails with the patches",
    Verdict.BROKEN: "does not fail as declared, so it shows nothing",
    Verdict.NOT_RUN: "does not apply to this tree",
}
MEANINGS_AS_IS = MEANINGS | {
    Verdict.GUARD: "holds in this tree",
    Verdict.OPEN: "the defect is in this tree",
}
# Beside the word, never instead of it.
SYMBOLS = {
    "green": "✓",
    "fixed": "✓",
    "guard": "✓",
    "open": "○",
    "not run": "–",
    "skipped": "–",
    "absent": "–",
    "mixed": "◐",
    "red": "✗",
    "error": "✗",
    "regression": "✗",
    "broken": "✗",
}
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True)
class Line:
    """A line of a diff, with its sign.  ``kind``: ``hunk``, ``same``, ``add`` or ``del``."""

    kind: str
    text: str


@dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file."""

    name: str
    is_new: bool
    lines: list[Line]

    @property
    def added(self) -> int:
        """Return the number of lines that are added."""
        return sum(line.kind == "add" for line in self.lines)

    @property
    def removed(self) -> int:
        """Return the number of lines that are removed."""
        return sum(line.kind == "del" for line in self.lines)


@dataclass(frozen=True)
class PatchView:
    """A patch of the series as the page shows it.  ``subject`` is empty where the file is absent."""

    declared: Patch
    outcome: str
    subject: str
    message: str
    files: list[FileDiff]

    @property
    def number(self) -> str:
        """Return the four digits that the file's name starts with."""
        return self.declared.file[:4]


@dataclass(frozen=True)
class SideView:
    """A contract on one side.  ``failures``: the tests whose whole message is worth a look."""

    title: str
    record: ContractSide
    failures: list[TestRecord]


@dataclass(frozen=True)
class ContractView:
    """A contract as the page shows it."""

    record: ContractRecord
    declared: str  # how it is to fail on the release, in words; empty where it must hold
    cures: list[PatchView]
    sides: list[SideView]

    @property
    def seconds(self) -> float:
        """Return the time that its tests took on all sides."""
        return sum(side.record.duration_s for side in self.sides)


def write(report: Report, target: Target, patches: Path, directory: Path) -> None:
    """Write the page beside the other reports.

    Args:
        report: the run.
        target: what series.toml says about its target.
        patches: the directory that holds ``series.toml`` and the series.
        directory: where the reports lie.

    Raises:
        OSError: the page cannot be written, or a patch cannot be read.
    """
    text = render(report, target, patches / target.series, datetime.now(UTC))
    (directory / FILE).write_text(text, encoding="utf-8")


def render(report: Report, target: Target, series: Path, written: datetime) -> str:
    """Return the page as text.  Raises ``OSError`` if a patch of the series cannot be read."""
    outcomes = {patch.file: patch.outcome for patch in report.patches}
    shown = [_patch(patch, series, outcomes.get(patch.file, "not applied")) for patch in target.patches]
    contracts = [_contract(row, report, target, shown) for row in report.contracts]
    as_is = any(side.side == "as-is" for side in report.sides)
    return (
        _templates()
        .get_template("report.html.jinja")
        .render(
            report=report,
            target=target,
            contracts=contracts,
            slowest=sorted(contracts, key=lambda contract: -contract.seconds),
            patches=shown,
            sides=report.sides,
            anchors={row.id: _anchor(number, row.id) for number, row in enumerate(report.contracts, start=1)},
            amiss=[row for row in report.contracts if not row.ok],
            meanings=MEANINGS_AS_IS if as_is else MEANINGS,
            environment=_environment(report, target),
            written=written,
        )
    )


def write_index(output: Path) -> None:
    """Write a page that leads to the last run of each target.

    Args:
        output: the directory that holds the targets' directories; what is no report of this version is left out.

    Raises:
        OSError: the page cannot be written.
    """
    found = []
    for file in sorted(output.glob("*/report.json")):
        try:
            report = Report.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            continue
        if (file.parent / FILE).is_file():
            when = datetime.fromtimestamp(file.stat().st_mtime, UTC)
            found.append((report, f"{file.parent.name}/{FILE}", when))
    verdicts = [verdict for verdict in Verdict if any(report.counts.get(verdict) for report, _, _ in found)]
    text = _templates().get_template("index.html.jinja").render(runs=found, verdicts=verdicts)
    (output / INDEX).write_text(text, encoding="utf-8")


def read_diff(text: str) -> list[FileDiff]:
    """Return what a patch does, file by file.

    Args:
        text: a patch as ``git format-patch`` writes it.
    """
    files: list[FileDiff] = []
    old = new = 0  # lines of the hunk that are still to come; outside one nothing is taken for a change
    for line in text.split("\n"):
        hunk = _HUNK.match(line)
        if old > 0 or new > 0:
            kind = {"+": "add", "-": "del"}.get(line[:1], "same")
            old -= kind in ("same", "del") and not line.startswith("\\")
            new -= kind in ("same", "add") and not line.startswith("\\")
            files[-1].lines.append(Line(kind, line))
        elif line.startswith("diff --git "):
            files.append(FileDiff(line.rpartition(" b/")[2], False, []))
        elif line.startswith("new file mode ") and files:
            files[-1] = FileDiff(files[-1].name, True, [])
        elif hunk is not None and files:
            old, new = (int(count) if count is not None else 1 for count in hunk.groups())
            files[-1].lines.append(Line("hunk", line))
    return files


def _patch(declared: Patch, series: Path, outcome: str) -> PatchView:
    file = series / declared.file
    if not file.is_file():
        return PatchView(declared, outcome, "", "", [])
    text = file.read_text(encoding="utf-8", errors="replace")
    mail = message_from_string(text, policy=policy.default)
    subject = re.sub(r"^\[PATCH[^]]*\]\s*", "", " ".join(mail["Subject"].split()))
    message = text.partition("\n\n")[2].partition("\n---\n")[0]
    return PatchView(declared, outcome, subject, message.strip(), read_diff(text))


def _contract(row: ContractRecord, report: Report, target: Target, shown: Sequence[PatchView]) -> ContractView:
    sides = []
    for number, side in enumerate(report.sides):
        # What is open fails on all sides in the same, declared way: once is enough.
        repeats = number > 0 and row.verdict is Verdict.OPEN
        failures = [
            test
            for test in side.tests
            if test.contract == row.id and test.text and test.outcome is not Outcome.NOT_RUN and not repeats
        ]
        sides.append(SideView(TITLES[side.side], row.sides[side.side], failures))
    declared = target.contracts.get(row.id)
    signature = declared.signature if declared is not None else None
    cures = [patch for patch in shown if row.id in patch.declared.cures]
    return ContractView(row, signature.describe() if signature is not None else "", cures, sides)


def _environment(report: Report, target: Target) -> list[tuple[str, str]]:
    """Return what the run ran on, as names and values."""
    versions = {}
    for requirement in target.requirements:
        name = re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0]
        try:
            versions[name] = f"{metadata.version(name)} (required: {requirement})"
        except metadata.PackageNotFoundError:
            continue
    versions.pop("torch", None)  # the sides say which one they imported
    wheel = []
    if report.source.kind == "wheel" and target.wheel is not None:
        wheel = [("wheel", f"{target.wheel.filename}, sha256 {target.wheel.sha256}")]
    return [
        ("tree", report.source.describe),
        ("repository", f"{target.repository}, {target.tag}"),
        ("commit", report.source.commit or "not known"),
        *wheel,
        ("Python", ", ".join(sorted({side.python for side in report.sides}))),
        ("torch", ", ".join(sorted({side.torch or "not imported" for side in report.sides}))),
        *sorted(versions.items()),
        ("system", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        ("exit status", str(report.exit_status)),
    ]


def _anchor(number: int, contract: str) -> str:
    """Return where a contract stands on the page; a file that could not be imported may have any name."""
    plain = re.sub(r"[^a-z0-9._-]", "-", contract.lower())
    return f"contract-{plain}" if plain == contract else f"contract-{number}-{plain}"


def _numbers(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high or low != low else f"{low:.4g} to {high:.4g}"


def _pieces(name: str) -> Iterator[str]:
    """Yield a name in pieces after which a line may be broken."""
    return iter(re.findall(r"[^./_-]+[./_-]?|[./_-]", name))


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: xml_safe(value) if type(value) is str else value,
    )
    environment.filters |= {"numbers": _numbers, "pieces": _pieces}
    environment.globals |= {"symbols": SYMBOLS, "titles": TITLES, "counted": counted}
    return environment

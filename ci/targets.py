# SPDX-License-Identifier: Apache-2.0
"""The README's table of targets, from ``patches/series.toml`` and the last results in ``patches/results.toml``.

``python -m ci.targets`` writes it; a test holds the page against it.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ci.regress import PATCHES, REPOSITORY, manifest
from ci.regress.verdict import Verdict

PAGE = REPOSITORY / "README.md"
RESULTS = PATCHES / "results.toml"
BEGIN, END = "<!-- targets: written by python -m ci.targets -->\n", "<!-- end of targets -->\n"
COUNTED = (Verdict.FIXED, Verdict.GUARD, Verdict.OPEN, Verdict.NOT_RUN)


def table(loaded: manifest.Manifest, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table in Markdown: a line a target, by project and then as ``series.toml`` has them."""
    columns = ("target", "from", "pin", "patches", *(verdict.value for verdict in COUNTED), "last run")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * 3 + "---:|" * (1 + len(COUNTED)) + "---|"]
    for name, target in sorted(loaded.targets.items(), key=lambda item: item[1].project):
        last = results.get(name, {})
        numbers = [str(last.get(verdict.value.replace(" ", "_"), 0)) if last else "–" for verdict in COUNTED]
        source = "wheel" if target.wheel is not None else "git"
        state = "never" if not last else last["date"] if last["exit_status"] == 0 else f"{last['date']}, failed"
        lines.append(
            "| " + " | ".join((f"`{name}`", source, target.pin, str(len(target.patches)), *numbers, state)) + " |"
        )
    return "\n".join(lines) + "\n"


def replaced(page: str, text: str) -> str:
    """Return the page with the table between its two marks replaced.

    Raises:
        ValueError: The page does not have each mark once, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(
            f"{PAGE.name} must have the lines {BEGIN.strip()!r} and {END.strip()!r} once each, in this order"
        )
    return f"{before}{begin}{text}{end}{after}"


def read_results(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the last result of each target that has one."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def main() -> int:
    """Write the table into the page."""
    made = table(manifest.load(PATCHES), read_results())
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Run the peers and write ``docs/peers.md``, its data and its figures; ``--fast`` prints the page of a short run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

from ci.bench.timing import machine
from ci.peers import DATA, FIGURES, PAGE, figures, measure, report
from ci.peers.loaders import SIDES
from ci.peers.side import running
from ci.regress import OUTPUT


def write(data: dict[str, Any], page: Path, file: Path, directory: Path) -> None:
    """The data, and what is made of them."""
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page.write_text(report.page(data), encoding="utf-8")
    for name in figures.FIGURES:
        (directory / f"{name}.svg").write_text(figures.svg(name, data), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.peers", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="small sizes; writes to .regress/peers, not to docs")
    parser.add_argument("--redraw", action="store_true", help="page and figures again, from the data as they are")
    parser.add_argument("--newest-python", metavar="PATH", help="interpreter of 0.7.0's environment (default: this)")
    options = parser.parse_args(arguments)
    place = OUTPUT / "peers"
    places = (place / "peers.md", place / "peers.json", place / "figures") if options.fast else (PAGE, DATA, FIGURES)
    if options.redraw:
        write(json.loads(places[1].read_text(encoding="utf-8")), *places)
        return 0
    place.mkdir(parents=True, exist_ok=True)
    interpreters = {"newest": options.newest_python} if options.newest_python else {}
    with running(interpreters, SIDES, place / "sides.log") as sides:
        data = measure.run(sides, measure.FAST if options.fast else measure.Sizes())
    facts = {key: value for key, value in machine().items() if key != "load"}
    write({"machine": facts, "matplotlib": matplotlib.__version__, **data}, *places)
    if options.fast:
        print(places[0].read_text(encoding="utf-8"))
    wrong = [name for name, same in report.as_good(data).items() if len(same) == len(data["outcomes"]) - 1]
    wrong = [name for name in wrong if not report.right(report.BY_NAME[name], data["outcomes"][report.OURS][name])]
    print("\n".join(f"not as is due: {name}" for name in wrong), file=sys.stderr, end="\n" * bool(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Which contract catches which almost-right gather: ``python -m ci.impostors``.

The gather contracts run on the patched default release once as it is, and once for each test double of
``tests/contracts/automodel/impostors.py``. Exit status 0: without one all are green, and each is caught.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest, sides, worktree
from ci.regress.errors import RegressError
from ci.regress.records import Outcome, SideRecord

_VARIABLE = "GATHER_IMPOSTORS"
_NAME = re.compile(r"impostor=([a-z-]*)\.")
_TABLE = re.compile(r"^IMPOSTORS.*?^\}", re.MULTILINE | re.DOTALL)


def names() -> list[str]:
    """Names of the test doubles, read from their file: this process has no tree to import it with."""
    text = (REPOSITORY / "tests/contracts/automodel/impostors.py").read_text(encoding="utf-8")
    return re.findall(r'^    "([a-z-]+)":', _TABLE.search(text).group(), re.MULTILINE)


def run(only: Sequence[str], work: Path) -> SideRecord:
    """Run gather contracts on the patched release, with each impostor and without.

    Args:
        only: Contracts.
        work: An empty directory.

    Raises:
        RegressError: The tree could not be made, or the contracts could not run.
    """
    loaded = manifest.load(PATCHES)
    _, target = loaded.select(None)
    git = worktree.Git(work / "home", loaded.identity)
    tree = work / "tree"
    fetch.unpack_wheel(fetch.fetch_wheel(target.wheel, WHEEL_CACHE, lambda line: None), tree)
    commit = worktree.commit_all(git, tree, target.wheel.filename)
    files = [PATCHES / target.series / patch.file for patch in target.patches]
    worktree.apply_series(git, tree, files, False, lambda line: None)
    (work / "artifacts").mkdir()
    os.environ[_VARIABLE] = ",".join(["", *names()])
    os.environ.setdefault("GATHER_DEGREES", "2,4")
    side = sides.Side(
        name="patched",
        tree=tree,
        commit=commit,
        package=target.package,
        contracts=REPOSITORY / target.suite,
        run_dir=work / "sides",
        artifacts=work / "artifacts",
        log=work / "log",
        timeout_s=900.0,
        only=tuple(only),
    )
    try:
        nothing = sides.Progress(lambda *_: None, lambda *_: None, lambda *_: None)
        return sides.run_side(side, nothing)
    finally:
        del os.environ[_VARIABLE]


def caught(record: SideRecord) -> dict[str, dict[str, str]]:
    """By contract and impostor (empty: none): ``-`` green, ``caught`` red by an assertion, or what else came of it."""
    table: dict[str, dict[str, str]] = {}
    for test in record.tests:
        found = _NAME.search(test.nodeid)
        cell = "?"
        if test.outcome is Outcome.PASSED:
            cell = "-"
        elif test.outcome is Outcome.NOT_RUN:
            cell = "not run"
        elif test.outcome is Outcome.FAILED and "builtins.AssertionError" in test.exception.lineage:
            cell = "caught"
        row = table.setdefault(test.contract, {})
        name = found.group(1) if found else "?"
        # A contract has several tests; one that catches is enough, and anything odd must show.
        order = ["-", "not run", "caught", "?"]
        row[name] = max(row.get(name, "-"), cell, key=order.index)
    return table


def problems(table: dict[str, dict[str, str]]) -> list[str]:
    """What is wrong: a contract that is red without an impostor or odd with one, an impostor that none catches."""
    found = [f"{contract} is {row['']} without an impostor" for contract, row in table.items() if row[""] == "caught"]
    found += [
        f"{contract} did not run as it should with {name or 'no impostor'}"
        for contract, row in table.items()
        for name, cell in row.items()
        if cell == "?"
    ]
    found += [f"no contract catches {name}" for name in names() if all(row[name] != "caught" for row in table.values())]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if each impostor is caught, 1 if not, 2 if it could not run."""
    parser = argparse.ArgumentParser(prog="python -m ci.impostors", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="CONTRACT", help="gather contracts (default: all)")
    options = parser.parse_args(arguments)
    _, target = manifest.load(PATCHES).select(None)
    only = options.only or [name for name in target.contracts if name.startswith("gather.")]
    try:
        with tempfile.TemporaryDirectory(prefix="impostors-") as work:
            table = caught(run(only, Path(work)))
    except RegressError as exc:
        print(exc, file=sys.stderr)
        return 2
    shown = Table("contract", *names(), title="patched release, with the gather of the routing weights replaced")
    for contract, row in table.items():
        shown.add_row(contract, *(row[name] for name in names()))
    Console(width=180).print(shown)
    idle = [contract for contract, row in table.items() if "caught" not in row.values()]
    print(f"tripped by no impostor: {', '.join(idle) or 'none'}")
    found = problems(table)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Upstream's own unit tests, before and after the series: ``python -m ci.upstream --git PATH``.

The tests lie in git only, so a clone is needed; it is only read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ci.regress import OUTPUT, PATCHES, fetch, manifest, worktree
from ci.regress.errors import RegressError, UsageError

TESTS = ("tests/unit_tests/checkpoint", "tests/unit_tests/moe", "tests/unit_tests/models/deepseek_v4")
_EPILOG = """\
exit status: 0  what passed before passes after, and what the series adds passes
             1  something does not
             2  the tests could not run
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.upstream",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--git", required=True, metavar="PATH", help="a clone that holds the pinned commit")
    parser.add_argument("--target", metavar="NAME", help="which release (default: the default target)")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest (default: 2)")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="paths in upstream's tree")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except RegressError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    loaded = manifest.load(PATCHES)
    name, target = loaded.select(options.target)
    if target.commit is None:
        raise UsageError(f"the commit of {name} is not known, and the wheel holds no tests")
    reports = OUTPUT / name.replace("/", "-")
    reports.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="upstream-", ignore_cleanup_errors=True) as place:
        work = Path(place)
        git = worktree.Git(work / "home", loaded.identity)
        stock, patched = work / "stock", work / "patched"
        fetch.fetch_git(options.git, target, stock, git, print)
        worktree.second_tree(git, stock, patched)
        files = [PATCHES / target.series / patch.file for patch in target.patches]
        worktree.apply_series(git, patched, files, False, print)
        before = _outcomes(stock, options, reports / "upstream-before")
        after = _outcomes(patched, options, reports / "upstream-after")
    for title, found in (("before", before), ("after", after)):
        counts = Counter(found.values())
        print(f"{title}: " + ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "skipped", "failed")))
    broken = [test for test, outcome in before.items() if outcome != "failed" and after.get(test) != outcome]
    added = [test for test in after if test not in before]
    bad = broken + [test for test in added if after[test] != "passed"]
    print(f"added by the series: {len(added)}")
    for test in bad:
        print(f"✗ {test}: {before.get(test, 'not there')} before, {after.get(test, 'not there')} after")
    print(f"logs: {reports}/upstream-*.log")
    return 1 if bad else 0


def _outcomes(tree: Path, options: argparse.Namespace, report: Path) -> dict[str, str]:
    """Run the tests in upstream's own layout, and return what became of each."""
    junit, log = report.with_suffix(".xml"), report.with_suffix(".log")
    junit.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.workers), "-p", "no:cacheprovider"]
    with log.open("wb") as stream:
        done = subprocess.run(
            [*command, f"--junitxml={junit}", *options.tests],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    if done.returncode not in (0, 1) or not junit.is_file():
        raise UsageError(f"pytest ended with exit status {done.returncode} in {tree.name}", f"its log: {log}")
    found = {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Try a series on another commit, and write a new series for it: ``python -m ci.rebase --git PATH --commit SHA``."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ci import porting
from ci.regress import OUTPUT, PATCHES, fetch, manifest, worktree
from ci.regress.errors import RegressError, UsageError
from ci.series import exported

_EPILOG = """\
Each patch is said to be one of: applies; applies with offset; merges (three-way); taken (the tree holds all of it, it
is left out); conflict (file, place, both sides).  PATH is only read.

exit status: 0  a new series was written, or nothing is left to apply
             1  some patch conflicts; nothing was written
             2  it could not be tried
"""
_MAX_LINES = 30  # of one side of a conflict


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.rebase",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--git", required=True, metavar="PATH", help="a clone that holds the commit")
    parser.add_argument("--commit", required=True, metavar="SHA", help="the commit to apply the series to")
    parser.add_argument("--target", metavar="NAME", help="whose series (default: the default target's)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="where the series goes (default: .regress/rebase/<commit>)"
    )
    options = parser.parse_args(arguments)
    try:
        return _rebase(options)
    except RegressError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2


def _rebase(options: argparse.Namespace) -> int:
    loaded = manifest.load(PATCHES)
    _, target = loaded.select(options.target)
    with tempfile.TemporaryDirectory(prefix="rebase-") as name:
        work = Path(name)
        git = worktree.Git(work / "home", loaded.identity)
        commit = _commit(git, options)
        porting.base_tree(target, work / "source", git, options.git)
        files = [PATCHES / target.series / patch.file for patch in target.patches]
        commits = porting.series_commits(git, work / "source", files)
        fetch.fetch_git(
            options.git, target.model_copy(update={"commit": commit}), work / "tree", git, lambda line: None
        )
        port = porting.Port(git, work / "tree", work / "source", None)
        results = porting.port_series(port, commits, files, set(), _say)
        if any(result.outcome == "conflict" for result in results):
            print("nothing was written")
            return 1
        made = exported(git, work / "tree", commit, work)
        if not made:
            print("nothing to apply: the tree holds all of it")
            return 0
        out = (options.out or OUTPUT / "rebase" / commit[:9]).resolve()
        if out.exists():
            shutil.rmtree(out) if options.out is None else _refuse(out)
        out.mkdir(parents=True)
        for file, data in made.items():
            (out / file).write_bytes(data)
        print(f"written: {out}/*.patch\nto apply them, in a checkout of {commit[:9]}: git am {out}/*.patch")
    return 0


def _refuse(out: Path) -> None:
    raise UsageError(f"--out {out} is there already", "name a directory that is not")


def _commit(git: worktree.Git, options: argparse.Namespace) -> str:
    path = Path(options.git).expanduser()
    if path.is_dir():
        try:
            return git.run("rev-parse", "--verify", "--quiet", f"{options.commit}^{{commit}}", cwd=path).strip()
        except worktree.GitFailure as exc:
            raise UsageError(f"--commit {options.commit}: {options.git} does not hold it", "fetch it first") from exc
    if len(options.commit) != 40:
        raise UsageError("--commit: all 40 digits are needed, unless --git is a path")
    return options.commit


def _say(result: porting.Ported) -> None:
    print(f"{result.outcome:20} {result.slug}")
    for file in result.absent:
        print(f"    {file}: the tree has no such file")
    for file, places in result.conflicts.items():
        for number, (ours, theirs) in enumerate(places, start=1):
            print(f"    {file}, place {number} of {len(places)}; the tree has:")
            _side(ours)
            print("    the patch makes it:")
            _side(theirs)


def _side(text: str) -> None:
    lines = text.splitlines()
    for line in lines[:_MAX_LINES]:
        print(f"        {line}")
    if len(lines) > _MAX_LINES:
        print(f"        ({len(lines) - _MAX_LINES} more lines)")


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Throw-away git trees: commit what was fetched, and put the series on top with plain ``git am``."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ci.regress.errors import PatchError, TreeError
from ci.regress.manifest import Identity

# Fixed, so that the commits of two runs are the same commits.
_DATE = "2000-01-01T00:00:00+00:00"
_KEPT_VARIABLES = (
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "GIT_ASKPASS",
    "GIT_SSL_CAINFO",
    "GIT_SSL_NO_VERIFY",
    "GIT_PROXY_COMMAND",
)
_ATTRIBUTES = "* -text -eol -filter -ident -working-tree-encoding\n"
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_MAX_LINES = 40  # of a hunk that are shown


class GitFailure(Exception):
    """A git command failed; ``output`` holds what it said."""

    def __init__(self, command: str, output: str) -> None:
        super().__init__(f"{command} failed:\n{output}")
        self.output = output

    def tail(self, lines: int) -> str:
        """Return the last lines, indented."""
        return "\n".join(f"    {line}" for line in self.output.strip().splitlines()[-lines:])


class Git:
    """git without the user's, the machine's or the surrounding repository's settings.

    Args:
        home: an empty directory for the configuration.
        identity: committer of everything.

    Raises:
        TreeError: git is absent.
    """

    def __init__(self, home: Path, identity: Identity) -> None:
        program = shutil.which("git")
        if program is None:
            raise TreeError("git is not on PATH", "install git; the patches are put on a tree with `git am`")
        self.program = program
        home.mkdir(parents=True, exist_ok=True)
        config = home / "gitconfig"
        config.write_text(
            "[core]\n\thooksPath = /dev/null\n\tautocrlf = false\n\tfsmonitor = false\n\texcludesFile = /dev/null\n"
            "[commit]\n\tgpgsign = false\n[init]\n\tdefaultBranch = main\n[gc]\n\tauto = 0\n"
            "[advice]\n\tdetachedHead = false\n[safe]\n\tdirectory = *\n",
            encoding="utf-8",
        )
        outside = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        outside |= {key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ}
        outside |= {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        self._outside = outside
        self._inside = outside | {
            "GIT_CONFIG_GLOBAL": str(config),
            "GIT_CONFIG_NOSYSTEM": "1",
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home),
            "GIT_AUTHOR_NAME": identity.name,
            "GIT_AUTHOR_EMAIL": identity.email,
            "GIT_AUTHOR_DATE": _DATE,
            "GIT_COMMITTER_NAME": identity.name,
            "GIT_COMMITTER_EMAIL": identity.email,
            "GIT_COMMITTER_DATE": _DATE,
        }
        self.environment: Mapping[str, str] = self._inside

    def with_user_config(self) -> Git:
        """Return a git that reads the user's configuration: for access to remote repositories, and nothing else."""
        other = object.__new__(Git)
        other.__dict__ |= self.__dict__
        other.environment = self._outside
        return other

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run git and return its standard output.  Raises ``GitFailure`` if it fails."""
        done = self._start(arguments, cwd)
        if done.returncode != 0:
            raise GitFailure(f"git {arguments[0]}", done.stdout + done.stderr)
        return done.stdout

    def run_both(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run git and return what it says on both streams.  Raises ``GitFailure`` if it fails."""
        done = self._start(arguments, cwd)
        if done.returncode != 0:
            raise GitFailure(f"git {arguments[0]}", done.stdout + done.stderr)
        return done.stdout + done.stderr

    def status(self, *arguments: str, cwd: Path | None = None) -> int:
        """Run git and return its exit status."""
        return self._start(arguments, cwd).returncode

    def isolate(self, tree: Path) -> None:
        """Make a repository hand out files byte by byte, whatever its .gitattributes ask for."""
        info = Path(self.run("rev-parse", "--path-format=absolute", "--git-path", "info", cwd=tree).strip())
        info.mkdir(parents=True, exist_ok=True)
        (info / "attributes").write_text(_ATTRIBUTES, encoding="utf-8")

    def _start(self, arguments: tuple[str, ...], cwd: Path | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *arguments],
            cwd=cwd,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )


@dataclass
class Applied:
    """What became of the series: names of patches."""

    applied: list[str] = field(default_factory=list)
    already_there: list[str] = field(default_factory=list)


def commit_all(git: Git, tree: Path, subject: str) -> str:
    """Make a directory a repository with one commit of all its files, and return the commit.

    Raises:
        TreeError: git refuses.
    """
    try:
        git.run("init", "--quiet", cwd=tree)
        git.isolate(tree)
        git.run("add", "--all", "--force", ".", cwd=tree)
        git.run("commit", "--quiet", "--no-verify", "--message", subject, cwd=tree)
        return head_of(git, tree)
    except GitFailure as exc:
        raise TreeError(f"the throw-away tree {tree} could not be made: {exc}") from exc


def head_of(git: Git, tree: Path) -> str:
    """Return the commit that a tree stands at.  Raises ``GitFailure`` if there is none."""
    return git.run("rev-parse", "HEAD", cwd=tree).strip()


def second_tree(git: Git, tree: Path, place: Path) -> None:
    """Make a second work tree of the same commit.

    Raises:
        TreeError: git refuses.
    """
    try:
        git.run("worktree", "add", "--quiet", "--detach", str(place), cwd=tree)
    except GitFailure as exc:
        raise TreeError(f"the throw-away tree {place} could not be made: {exc}") from exc


def apply_series(git: Git, tree: Path, patches: list[Path], skip_present: bool, say: Callable[[str], None]) -> Applied:
    """Apply patches with plain ``git am``: no three-way merge, no fuzz.

    Args:
        skip_present: leave out a patch that does not apply because the tree already holds all of it.

    Raises:
        PatchError: a patch does not apply; the message shows the rejected hunks and the tree's own lines.
    """
    result = Applied()
    for patch in patches:
        try:
            git.run("am", "--quiet", "--committer-date-is-author-date", str(patch), cwd=tree)
        except GitFailure as exc:
            present = git.status("apply", "--reverse", "--check", str(patch), cwd=tree) == 0
            if not (present and skip_present):
                raise PatchError(_explain(git, tree, patch, exc.output, present), _hint(present)) from exc
            git.run("am", "--abort", cwd=tree)
            say(f"{patch.name}: already in this tree, left out")
            result.already_there.append(patch.name)
        else:
            result.applied.append(patch.name)
    return result


def touched_files(patch: Path) -> dict[str, bool]:
    """Return the files that a patch touches, and for each whether the patch creates it."""
    touched: dict[str, bool] = {}
    old, left, right = "", 0, 0
    for line in patch.read_text(encoding="utf-8", errors="replace").splitlines():
        if left > 0 or right > 0:  # inside a hunk, where a removed line may look like a header
            left -= line[:1] in (" ", "-", "")
            right -= line[:1] in (" ", "+", "")
        elif found := _HUNK.match(line):
            left, right = int(found.group(2) or 1), int(found.group(4) or 1)
        elif line.startswith("--- "):
            old = line[4:].split("\t")[0]
        elif line.startswith("+++ ") and old:
            new = line[4:].split("\t")[0]
            if new == "/dev/null":
                touched[old.removeprefix("a/")] = False
            else:
                touched.setdefault(new.removeprefix("b/"), old == "/dev/null")
            old = ""
        elif line.startswith(("rename from ", "rename to ")):
            _, direction, name = line.split(" ", 2)
            touched[name] = direction == "to"
    return touched


def _hint(present: bool) -> str:
    if present:
        return "drop the patch from the series of this release, or set its status to `taken`"
    return "make the patch for this tree anew (git format-patch), or choose the target that it was made for"


def _explain(git: Git, tree: Path, patch: Path, said: str, present: bool) -> str:
    lines = [f"{patch.name} does not apply with `git am`:"]
    lines += [
        f"    {line}"
        for line in said.strip().splitlines()
        if line.startswith(("error:", "fatal:", "Patch is empty", "Patch format"))
    ]
    if present:
        lines.append("    the tree already holds all of what this patch does")
        return "\n".join(lines)
    return "\n".join([*lines, *rejected_hunks(git, tree, patch)])


def rejected_hunks(git: Git, tree: Path, patch: Path) -> list[str]:
    """Apply what fits of a patch, and return the hunks that do not, each with what the tree has in its place.

    A .rej file beside each target holds exactly those hunks, as git writes it.
    """
    lines = []
    git.status("apply", "--reject", "--whitespace=nowarn", str(patch), cwd=tree)
    for reject in sorted(tree.rglob("*.rej")):
        target = reject.with_suffix("")
        name = target.relative_to(tree).as_posix()
        actual = target.read_text(encoding="utf-8", errors="replace").splitlines() if target.is_file() else []
        for header, hunk in _hunks(reject.read_text(encoding="utf-8", errors="replace")):
            lines += ["", f"  {name}  {header}", "  the rejected hunk:"]
            lines += [f"    {line}" for line in hunk[:_MAX_LINES]]
            lines += ["  the tree has there:"]
            lines += _nearest(header, hunk, actual)
    return lines


def _hunks(reject: str) -> list[tuple[str, list[str]]]:
    hunks: list[tuple[str, list[str]]] = []
    for line in reject.splitlines():
        if _HUNK.match(line):
            hunks.append((line, []))
        elif hunks:
            hunks[-1][1].append(line)
    return hunks


def _nearest(header: str, hunk: list[str], actual: list[str]) -> list[str]:
    """Return the lines of the tree that look most like what the hunk expects, near where it expects them."""
    found = _HUNK.match(header)
    first = max(int(found.group(1)) - 1, 0) if found else 0
    expected = [line[1:] for line in hunk if line[:1] in (" ", "-")]
    if not actual:
        return ["    (no such file, or an empty one)"]
    size = max(len(expected), 1)

    def likeness(start: int) -> tuple[float, int]:
        equal = sum(a == b for a, b in zip(expected, actual[start : start + size], strict=False))
        return equal, -abs(start - first)

    start = max(range(max(len(actual) - size, 0) + 1), key=likeness)
    if likeness(start)[0] * 3 < size:  # nothing alike: show the place that the hunk names
        ratio = difflib.SequenceMatcher(a=expected, b=actual, autojunk=False).find_longest_match()
        start = max(ratio.b - ratio.a, 0) if ratio.size > 1 else min(first, max(len(actual) - size, 0))
    shown = actual[start : start + min(size, _MAX_LINES)]
    return [f"    {number:5d}  {line}" for number, line in enumerate(shown, start=start + 1)]

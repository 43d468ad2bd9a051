# SPDX-License-Identifier: Apache-2.0
"""Put a series that was made for one release on another one, three-way, and say what became of each patch.

What no merge can know stands in an adaptation: ``patches/<series>/adaptations/<patch>.diff``, the difference between
what the merge gives (conflict marks included) and what it should be.  So a change of the first series reaches the
others by itself, unless it touches the very lines that were resolved by hand; then the adaptation no longer applies,
and that is said.  Before the differences stand ``left out: FILE`` for what the other release does not have, and a
commit message where the patch does something else there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ci.regress import WHEEL_CACHE, fetch, worktree
from ci.regress.errors import UsageError
from ci.regress.manifest import Target

_MARK = re.compile(r"^(<{7}|>{7}) .*$", re.MULTILINE)
_CONFLICT = re.compile(r"^<{7} this tree\n(.*?)^={7}\n(.*?)^>{7} the patch\n", re.MULTILINE | re.DOTALL)
_LEFT_OUT = re.compile(r"^left out: (\S+)$", re.MULTILINE)
_OFFSET = re.compile(r"\(offset -?\d+ lines?\)")


@dataclass
class Ported:
    """What became of one patch on another tree.

    ``conflicts``: by file, the two sides of each place that could not be merged.  ``absent``: files that the patch
    changes and that the tree does not have.  ``stale``: the hunks of the adaptation that do not apply, in words.
    """

    slug: str
    outcome: str = ""  # applies, applies with offset, merges, adapted, taken, conflict, stale
    conflicts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    stale: str = ""


def slug_of(name: str) -> str:
    """Return the name of a patch file without its number and suffix."""
    return name[5:].removesuffix(".patch")


def base_tree(target: Target, tree: Path, git: worktree.Git, clone: str | None) -> None:
    """Fill ``tree`` with a release as a repository of one commit, from its wheel or from a clone.

    Raises:
        UsageError: the release is in git only, and no clone is given.
        FetchError: it cannot be had.
    """
    if target.wheel is not None:
        fetch.unpack_wheel(fetch.fetch_wheel(target.wheel, WHEEL_CACHE, lambda line: None), tree)
        worktree.commit_all(git, tree, f"{target.project} {target.tag}")
    elif clone is None:
        raise UsageError(f"{target.series} is for a commit that is in git only", "give a clone with --git PATH")
    else:
        fetch.fetch_git(clone, target, tree, git, lambda line: None)


def series_commits(git: worktree.Git, tree: Path, files: list[Path]) -> list[str]:
    """Apply a series to its own release, and return the commit of each patch.

    Raises:
        PatchError: a patch does not apply.
    """
    commits = []
    for file in files:
        worktree.apply_series(git, tree, [file], False, lambda line: None)
        commits.append(worktree.head_of(git, tree))
    return commits


class Port:
    """A tree onto which patches of another one are put, one after the other.

    Args:
        git: runs git without the user's configuration.
        tree: a repository at the commit to build on.
        source: a repository whose ``HEAD`` carries the series for its own release.
        adaptations: where the adaptations lie; None for none.
        edit: slug of the patch at which to stop, with the adaptation's rejected hunks left in .rej files.
    """

    def __init__(
        self, git: worktree.Git, tree: Path, source: Path, adaptations: Path | None, edit: str | None = None
    ) -> None:
        self.git, self.tree, self.adaptations, self.edit = git, tree, adaptations, edit
        self.merged, self.absent = "", [""]  # of the last patch: the tree's id before its adaptation, and absent files
        git.run("fetch", "--quiet", "--update-shallow", str(source), "HEAD", cwd=tree)

    def put(self, commit: str, file: Path) -> Ported:
        """Put one patch on the tree and commit it, unless it is taken, conflicts, or is the one to be edited.

        Args:
            commit: the patch as a commit of the source.
            file: the same as a file.
        """
        result = Ported(slug_of(file.name))
        if result.slug != self.edit and self._plainly(file, result):
            return result
        self._merge(commit, result)
        clean = not result.conflicts and not result.absent
        if clean and self.git.status("diff", "--cached", "--quiet", "HEAD", cwd=self.tree) == 0:
            result.outcome = "taken"
            return result
        adapted = self._adapt(result)
        if result.slug == self.edit:
            return result
        if result.stale or result.conflicts or result.absent:
            result.outcome = "stale" if result.stale else "conflict"
            self.git.run("reset", "--quiet", "--hard", cwd=self.tree)
            self.git.run("clean", "--quiet", "--force", "-d", "-x", cwd=self.tree)
            return result
        result.outcome = "adapted" if adapted else "merges"
        self.git.run("commit", "--quiet", "--no-verify", "--reuse-message", commit, cwd=self.tree)
        if adapted and (message := message_of(self._adaptation(result.slug))):
            self.git.run("commit", "--quiet", "--no-verify", "--amend", "--message", message, cwd=self.tree)
        return result

    def _plainly(self, file: Path, result: Ported) -> bool:
        """Apply with ``git am`` if that works, and nothing is to be adapted."""
        if self._adaptation(result.slug) is not None:
            return False
        if self.git.status("apply", "--reverse", "--check", str(file), cwd=self.tree) == 0:
            result.outcome = "taken"
            return True
        try:
            said = self.git.run_both("apply", "--check", "--verbose", str(file), cwd=self.tree)
            self.git.run("am", "--quiet", "--committer-date-is-author-date", str(file), cwd=self.tree)
        except worktree.GitFailure:
            self.git.status("am", "--abort", cwd=self.tree)
            return False
        result.outcome = "applies with offset" if _OFFSET.search(said) else "applies"
        return True

    def _merge(self, commit: str, result: Ported) -> None:
        """Merge a commit into the tree and the index; where it conflicts, marks stay in the files."""
        options = ("-c", "merge.conflictStyle=merge", "-c", "merge.renames=false", "-c", "merge.directoryRenames=false")
        options += ("-c", "rerere.enabled=false")
        self.git.status(*options, "cherry-pick", "--no-commit", "--strategy=ort", commit, cwd=self.tree)
        unmerged = self.git.run("diff", "--name-only", "--diff-filter=U", cwd=self.tree).splitlines()
        held = set(self.git.run("ls-tree", "-r", "--name-only", "HEAD", cwd=self.tree).splitlines())
        for name in unmerged:
            path = self.tree / name
            if name not in held:
                path.unlink(missing_ok=True)
                result.absent.append(name)
                continue
            text = path.read_text(encoding="utf-8")
            # The labels name commits, which are others each time.
            text = _MARK.sub(lambda mark: mark[1] + (" this tree" if mark[1][0] == "<" else " the patch"), text)
            path.write_text(text, encoding="utf-8")
            result.conflicts[name] = _CONFLICT.findall(text)
        self.git.run("add", "--all", "--force", ".", cwd=self.tree)
        self.git.status("cherry-pick", "--quit", cwd=self.tree)

    def _adaptation(self, slug: str) -> Path | None:
        file = self.adaptations / f"{slug}.diff" if self.adaptations is not None else None
        return file if file is not None and file.is_file() else None

    def _adapt(self, result: Ported) -> bool:
        """Apply the adaptation, and take what it resolves out of the result."""
        file = self._adaptation(result.slug)
        self.absent = list(result.absent)
        self.merged = self.git.run("write-tree", cwd=self.tree).strip()
        if file is None:
            return False
        text = file.read_text(encoding="utf-8")
        if "\n--- " in text:
            try:
                self.git.run("apply", "--whitespace=nowarn", "--index", str(file), cwd=self.tree)
            except worktree.GitFailure as exc:
                hunks = worktree.rejected_hunks(self.git, self.tree, file)
                result.stale = "\n".join(hunks) or exc.tail(12)
        left_out = set(_LEFT_OUT.findall(text))
        result.absent = [name for name in result.absent if name not in left_out]
        remaining = {name: _CONFLICT.findall((self.tree / name).read_text("utf-8")) for name in result.conflicts}
        result.conflicts = {name: places for name, places in remaining.items() if places}
        return True


def message_of(file: Path) -> str:
    """Return the commit message that stands before an adaptation's differences; empty if there is none."""
    head = file.read_text(encoding="utf-8").partition("diff --git ")[0] if file.is_file() else ""
    return _LEFT_OUT.sub("", head).strip()


def adaptation_of(git: worktree.Git, tree: Path, merged: str, absent: list[str]) -> str:
    """Return the adaptation that leads from a merged tree to the files as they stand now.

    Args:
        git: runs git without the user's configuration.
        tree: the repository.
        merged: id of the merged tree, conflict marks included.
        absent: files that the patch changes and that this release does not have.

    Raises:
        UsageError: conflict marks are left.
    """
    for reject in tree.rglob("*.rej"):
        reject.unlink()
    git.run("add", "--all", ".", cwd=tree)
    changed = git.run("diff", "--cached", "--name-only", "--no-renames", "HEAD", cwd=tree).splitlines()
    marked = [name for name in changed if (tree / name).is_file() and _MARK.search((tree / name).read_text("utf-8"))]
    if marked:
        raise UsageError(f"conflict marks are left in {', '.join(marked)}", "put these files in order first")
    difference = git.run("diff", "--cached", "--no-renames", "--no-color", merged, cwd=tree)
    lines = [line for line in difference.splitlines(keepends=True) if not line.startswith("index ")]
    return "".join([*(f"left out: {name}\n" for name in absent), *lines])


def port_series(
    port: Port, commits: list[str], files: list[Path], without: set[str], say: Callable[[Ported], None]
) -> list[Ported]:
    """Put a series on a tree; a patch that conflicts is left out, and the others are tried without it.

    Args:
        port: the tree.
        commits: the patches as commits of the source, in order.
        files: the same as files.
        without: slugs of patches that are left out from the start.
        say: called with each result.
    """
    results = []
    for commit, file in zip(commits, files, strict=True):
        if slug_of(file.name) in without:
            continue
        results.append(port.put(commit, file))
        say(results[-1])
        if results[-1].slug == port.edit:
            break
    return results

# SPDX-License-Identifier: Apache-2.0
"""Make the series of one target from that of another: ``like`` in series.toml says which, ``ci.porting`` how.

What cannot be made is told all at once: which patch, which file, the hunk and what the release has there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ci import porting
from ci.regress import report, worktree
from ci.regress.errors import PatchError, UsageError
from ci.regress.manifest import Manifest, Target

_STATE = "adapt.json"
_MAX_LINES = 12  # of one side of a conflict


@dataclass(frozen=True)
class Ports:
    """A target's release with the other series put on it."""

    port: porting.Port
    results: list[porting.Ported]
    base: str  # the commit that the tree started from


def derived(loaded: Manifest) -> list[str]:
    """Return the targets with a derived series, each after the one that it is derived from."""
    names = [
        name
        for name, target in loaded.targets.items()
        if target.like is not None and target.series != loaded.targets[target.like].series
    ]
    return sorted(names, key=lambda name: len(_ancestors(loaded, name)))


def roots(loaded: Manifest) -> list[str]:
    """Return the targets that others are derived from and that are derived from none."""
    return list(dict.fromkeys(_ancestors(loaded, name)[-1] for name in derived(loaded)))


def _ancestors(loaded: Manifest, name: str) -> list[str]:
    found = []
    while (name := loaded.targets[name].like) is not None:
        found.append(name)
    return found


def derive(loaded: Manifest, name: str, patches: Path, work: Path, clone: str | None = None) -> Ports:
    """Put the series that a target is derived from on the target's release, and its own patches on top.

    Args:
        loaded: the manifest.
        name: a target with ``like``.
        patches: directory of ``series.toml``.
        work: an empty directory.
        clone: a repository that holds the target's commit, if it has no wheel.

    Raises:
        PatchError: a patch conflicts, is in the release already, or has an adaptation that no longer applies; or an
            adaptation is for no patch.  All of them are named.
    """
    target = loaded.targets[name]
    ports = _start(loaded, target, patches, work, clone, None)
    problems = [_problem(result) for result in ports.results if result.outcome in _HINTS]
    hints = {_HINTS[result.outcome] for result in ports.results if result.outcome in _HINTS}
    slugs = {porting.slug_of(patch.file) for patch in loaded.targets[target.like].patches} - set(target.without)
    for file in sorted((patches / target.series / "adaptations").glob("*.diff")):
        if file.stem not in slugs:
            problems.append(f"  adaptations/{file.name}: {target.like} has no patch of this name for {name}")
            hints.add("rename or remove that file")
    if problems:
        raise PatchError("\n".join([f"{name} is left as it is:", *problems]), "; ".join(sorted(hints)).format(name))
    kept = slugs | {revision.name for revision in target.revised.values()}
    own = [patch.file for patch in target.patches if porting.slug_of(patch.file) not in kept]
    files = [patches / target.series / file for file in own]
    worktree.apply_series(ports.port.git, ports.port.tree, files, False, lambda line: None)
    return ports


_ADAPT = "`python -m ci.series adapt --target {0} --patch NAME --work DIR` makes an adaptation, or puts it in order"
_HINTS = {"taken": "name a patch that the release holds in `without`", "conflict": _ADAPT, "stale": _ADAPT}


def _problem(result: porting.Ported) -> str:
    if result.outcome == "taken":
        return f"  {result.slug}: the release holds all of it"
    if result.outcome == "stale":
        return f"  {result.slug}: its adaptation no longer applies\n{result.stale}"
    lines = [f"  {result.slug}: cannot be merged"]
    lines += [f"    {file}: the release has no such file" for file in result.absent]
    for file, places in result.conflicts.items():
        for ours, theirs in places:
            lines.append(f"    {file}")
            for mark, side in (("-", ours), ("+", theirs)):
                lines += [f"      {mark}{line}" for line in side.splitlines()[:_MAX_LINES]]
    return "\n".join(lines)


def _start(loaded: Manifest, target: Target, patches: Path, work: Path, clone: str | None, edit: str | None) -> Ports:
    source = loaded.targets[target.like]
    git = worktree.Git(work / "home", loaded.identity)
    porting.base_tree(source, work / "source", git, clone)
    files = [patches / source.series / patch.file for patch in source.patches]
    commits = porting.series_commits(git, work / "source", files)
    porting.base_tree(target, work / "tree", git, clone)
    base = worktree.head_of(git, work / "tree")
    port = porting.Port(git, work / "tree", work / "source", patches / target.series / "adaptations", edit)
    return Ports(port, porting.port_series(port, commits, files, set(target.without), lambda result: None), base)


def start_adapting(
    loaded: Manifest, name: str, slug: str, patches: Path, work: Path, clone: str | None = None
) -> list[str]:
    """Make a tree in which one patch stands as it was merged, for somebody to put in order.

    Args:
        loaded: the manifest.
        name: a target with ``like``.
        slug: the patch.
        patches: directory of ``series.toml``.
        work: a directory that does not exist yet.
        clone: a repository that holds the target's commit, if it has no wheel.

    Returns:
        What there is to do, in words.

    Raises:
        UsageError: the target is not derived, or there is no such patch.
    """
    target = loaded.targets[name]
    if target.like is None:
        raise UsageError(f"{name} is not derived from another target")
    work.mkdir(parents=True)
    ports = _start(loaded, target, patches, work, clone, slug)
    if not ports.results or ports.results[-1].slug != slug:
        raise UsageError(f"--patch {slug}: {target.like} has no such patch for {name}")
    last = ports.results[-1]
    state = {"merged": ports.port.merged, "absent": ports.port.absent}
    (work / _STATE).write_text(json.dumps(state), encoding="utf-8")
    lines = [
        f"{work / 'tree' / file}: {report.counted(len(places), 'place')} with conflict marks"
        for file, places in last.conflicts.items()
    ]
    lines += [f"{file}: hunks of the adaptation that do not apply" for file in sorted((work / "tree").rglob("*.rej"))]
    lines += [f"{file}: the release has no such file; it goes elsewhere, or is left out" for file in last.absent]
    return lines


def finish_adapting(loaded: Manifest, name: str, slug: str, patches: Path, work: Path) -> Path | None:
    """Write the adaptation of a tree made by ``start_adapting``; None if there is no such tree yet."""
    if not (work / _STATE).is_file():
        return None
    state = json.loads((work / _STATE).read_text(encoding="utf-8"))
    git = worktree.Git(work / "home", loaded.identity)
    place = patches / loaded.targets[name].series / "adaptations"
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{slug}.diff"
    message = porting.message_of(file)
    text = porting.adaptation_of(git, work / "tree", state["merged"], state["absent"])
    file.write_text(f"{message}\n\n{text}" if message else text, encoding="utf-8")
    return file

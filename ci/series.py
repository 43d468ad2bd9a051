# SPDX-License-Identifier: Apache-2.0
"""Keep the series, the shim and the pins the same: export commits as patch files, derive one series from another.

``check`` applies each series to its release, exports it again, and compares byte by byte.  The modules that a series
adds are held against the shim's; one that is derived (``like`` in series.toml) is derived anew instead, and may adapt
them.  ``derive`` writes what ``check`` would ask for: first the series that others are derived from, then those, and
for each the blob ids in series.toml.  ``adapt`` prepares what no merge can know (see ``ci.porting``), and takes it over
when it is called again.  ``lint`` holds every patch against the rules of ``ci.lint``.  ``export --from CLONE`` makes
the files from commits on top of the pinned one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ci import deriving, lint, porting
from ci.regress import PATCHES, REPOSITORY, fetch, manifest, worktree
from ci.regress.errors import PatchError, RegressError, UsageError


def export(git: worktree.Git, tree: Path, base: str, place: Path) -> list[Path]:
    """Write the commits after ``base`` as numbered patch files, the same bytes on every machine.

    Args:
        git: Runs git without the user's configuration.
        tree: A repository whose ``HEAD`` carries the series.
        base: The commit that the series starts from.
        place: Directory for the files.

    Returns:
        The files, in order.
    """
    git.run(
        *(
            "-c",
            "diff.algorithm=myers",
            "-c",
            "diff.context=3",
            "-c",
            "core.quotePath=true",
            "-c",
            "format.thread=false",
        ),
        *("format-patch", "--quiet", "--no-numbered", "--no-signature", "--zero-commit", "--full-index"),
        *("--no-renames", "--output-directory", str(place), f"{base}..HEAD"),
        cwd=tree,
    )
    return sorted(place.glob("*.patch"))


def body_of(text: str) -> str:
    """A module as upstream has it: importing from its package, less the leading comments (its licence header)."""
    lines = text.splitlines(keepends=True)
    while lines and (lines[0].startswith("#") or not lines[0].strip()):
        del lines[0]
    return "".join(lines).replace("nemo_automodel_shim.", "nemo_automodel.")


def with_body(text: str, body: str) -> str:
    """``text`` with its leading comments kept and the rest replaced by ``body``."""
    head = []
    for line in text.splitlines(keepends=True):
        if not line.startswith("#"):
            break
        head.append(line)
    return "".join(head) + "\n" + body


def rebuild(
    target: manifest.Target,
    patches: Path,
    identity: manifest.Identity,
    work: Path,
    clone: str | None = None,
    derived: bool = False,
) -> dict[str, bytes]:
    """Apply the series to its release, with the shim's modules put in unless it is derived, and export it.

    Args:
        target: The release.
        patches: Directory of ``series.toml``.
        identity: Author of exported patches.
        work: An empty directory.
        clone: A repository that holds the commit, for a release without a wheel.
        derived: Whether the series is made from another one, shim's modules included.

    Returns:
        Bytes of each patch file, by name.

    Raises:
        RegressError: If the release cannot be had, or a patch does not apply.
    """
    git = worktree.Git(work / "home", identity)
    tree = work / "tree"
    porting.base_tree(target, tree, git, clone)
    base = worktree.head_of(git, tree)
    fetch.check_blobs(tree, target, target.wheel.filename if target.wheel else f"--git {clone}")
    for patch in target.patches:
        file = patches / target.series / patch.file
        try:
            said = git.run_both("apply", "--check", "--verbose", str(file), cwd=tree)
        except worktree.GitFailure:
            said = ""  # told below, with the hunks
        worktree.apply_series(git, tree, [file], False, lambda line: None)
        if "offset" in said:
            raise PatchError(f"{target.series}/{patch.file} applies with an offset:\n{said.strip()}")
        for added, source in ({} if derived else patch.adds).items():
            file = tree / added
            if not file.is_file():
                raise PatchError(f"{patch.file} does not add {added}, as `adds` in {manifest.FILE} says")
            file.write_text(
                with_body(file.read_text(encoding="utf-8"), body_of((REPOSITORY / source).read_text(encoding="utf-8"))),
                encoding="utf-8",
            )
        git.run("add", "--all", "--force", ".", cwd=tree)
        git.run("commit", "--quiet", "--amend", "--no-edit", "--no-verify", cwd=tree)
    return exported(git, tree, base, work)


def exported(git: worktree.Git, tree: Path, base: str, work: Path) -> dict[str, bytes]:
    """Return the bytes of each patch file that the commits after ``base`` make, by name."""
    place = work / "exported"
    place.mkdir()
    return {file.name: file.read_bytes() for file in export(git, tree, base, place)}


def write(target_name: str, target: manifest.Target, patches: Path, rebuilt: dict[str, bytes]) -> None:
    """Write a series, and the blob ids of the files that it touches to series.toml."""
    place = patches / target.series
    place.mkdir(parents=True, exist_ok=True)
    for file in place.glob("*.patch"):
        if file.name not in rebuilt:
            file.unlink()
    for name, data in rebuilt.items():
        (place / name).write_bytes(data)
        print(f"{target.series}/{name}")
    blobs: dict[str, str] = {}
    for name in rebuilt:
        blobs |= {file: blob for file, blob in blobs_before(place / name).items() if file not in blobs}
    file = patches / manifest.FILE
    text = file.read_text(encoding="utf-8")
    header = re.search(rf'^\[targets\."{re.escape(target_name)}"\.blobs\].*\n', text, re.MULTILINE)
    if header is None:
        raise UsageError(f'{manifest.FILE} has no table [targets."{target_name}".blobs]')
    rest = re.compile(r'^(?:[ \t]*|".*)\n', re.MULTILINE)
    end = header.end()
    while found := rest.match(text, end):
        end = found.end()
    known = {name: blob for name, blob in sorted(blobs.items()) if blob is not None}
    lines = "".join(f'"{name}" = "{blob}"\n' for name, blob in known.items())
    file.write_text(f"{text[: header.end()]}{lines}\n{text[end:]}".rstrip("\n") + "\n", encoding="utf-8")


def blobs_before(patch: Path) -> dict[str, str | None]:
    """Return the files that a patch touches, each with its blob id before; None for one that the patch makes."""
    text = patch.read_text(encoding="utf-8")
    found = re.findall(r"^diff --git a/(\S+) b/\1\n(?:\S.*\n)*?index ([0-9a-f]{40})\.\.", text, re.MULTILINE)
    return {name: None if blob == "0" * 40 else blob for name, blob in found}


def difference(target: manifest.Target, patches: Path, rebuilt: dict[str, bytes]) -> list[str]:
    """What the patch directory has that ``rebuilt`` has not, and the other way round, in words."""
    listed = [patch.file for patch in target.patches]
    found = [f"{name} would be exported, but is not listed" for name in rebuilt if name not in listed]
    for name in listed:
        file = patches / target.series / name
        if not file.is_file():
            found.append(f"{name} is listed, but not there")
        elif file.read_bytes() != rebuilt.get(name):
            found.append(f"{name} is not what applying and exporting it gives (or the shim has moved on)")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if all is well, 1 if a check failed, 2 if it could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.series", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=sorted(_ACTIONS))
    parser.add_argument("--target", help="a target of patches/series.toml (default: all; export: the default one)")
    parser.add_argument(
        "--git", action="append", default=[], help="a clone, for commits that are in git only; once a project"
    )
    parser.add_argument("--patch", help="adapt: name of the patch, without number and suffix")
    parser.add_argument("--work", type=Path, help="adapt: a directory that does not exist yet; then the same again")
    parser.add_argument("--from", dest="clone", type=Path, help="export: a clone whose HEAD carries the series")
    parser.add_argument("--base", help="export: the commit that the series starts from (default: the pinned one)")
    options = parser.parse_args(arguments)
    try:
        # What is about to be made may be listed, and what lies there need not be.
        loaded = manifest.load(PATCHES, unlisted=options.action in ("derive", "adapt", "export"))
        loaded.select(options.target)
        return _ACTIONS[options.action](parser, options, loaded)
    except RegressError as exc:
        print(exc, file=sys.stderr)
        return 2


def _each(options: argparse.Namespace, loaded: manifest.Manifest, names: list[str]) -> list[str]:
    """Return the targets to do: the one that is given, or all of ``names`` that can be had."""
    if options.target is not None:
        return [options.target]
    absent = [
        name for name in names if loaded.targets[name].wheel is None and _clone(options, loaded.targets[name]) is None
    ]
    for name in absent:
        print(f"{name}: in git only, left out (give a clone that holds it with --git)", file=sys.stderr)
    return [name for name in names if name not in absent]


def _clone(options: argparse.Namespace, target: manifest.Target) -> str | None:
    """Return the clone that holds a target's commit, the only one where a single target is asked for, or None."""
    for clone in options.git:
        ask = ["git", "-C", clone, "cat-file", "-e", f"{target.commit}^{{commit}}"]
        if subprocess.run(ask, capture_output=True).returncode == 0:
            return clone
    return options.git[0] if options.git and options.target is not None else None


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, loaded: manifest.Manifest) -> int:
    status = 0
    for name in _each(options, loaded, [name for name, target in loaded.targets.items() if target.patches]):
        with tempfile.TemporaryDirectory(prefix="series-") as place:
            try:
                problems = _check_one(options, loaded, name, Path(place))
            except PatchError as exc:
                problems = [str(exc)]
        for line in dict.fromkeys(problems):
            print(line, file=sys.stderr)
        print(f"{name}: {'differs, `python -m ci.series derive` writes it anew' if problems else 'as it should be'}")
        status = status or int(bool(problems))
    return status


def _check_one(options: argparse.Namespace, loaded: manifest.Manifest, name: str, work: Path) -> list[str]:
    target = loaded.targets[name]
    for part in ("a", "b", "c"):
        (work / part).mkdir()
    derived, clone = name in deriving.derived(loaded), _clone(options, target)
    problems = difference(target, PATCHES, rebuild(target, PATCHES, loaded.identity, work / "a", clone, derived))
    if derived:
        ports = deriving.derive(loaded, name, PATCHES, work / "b", clone)
        made = exported(ports.port.git, ports.port.tree, ports.base, work / "c")
        problems += difference(target, PATCHES, made)
    return problems


def _derive(parser: argparse.ArgumentParser, options: argparse.Namespace, loaded: manifest.Manifest) -> int:
    derived, roots = deriving.derived(loaded), deriving.roots(loaded)
    failed: set[str] = set()
    for name in _each(options, loaded, [*roots, *derived]):
        target = loaded.targets[name]
        if target.like in failed:
            print(f"{name}: not tried, since {target.like} failed", file=sys.stderr)
            failed.add(name)
            continue
        with tempfile.TemporaryDirectory(prefix="series-") as place:
            work, clone = Path(place), _clone(options, target)
            try:
                if name in derived:
                    (work / "b").mkdir()
                    ports = deriving.derive(loaded, name, PATCHES, work / "b", clone)
                    made = exported(ports.port.git, ports.port.tree, ports.base, work)
                else:
                    made = rebuild(target, PATCHES, loaded.identity, work, clone)
            except PatchError as exc:
                print(exc, file=sys.stderr)
                failed.add(name)
            else:
                write(name, target, PATCHES, made)
    return 1 if failed else 0


def _adapt(parser: argparse.ArgumentParser, options: argparse.Namespace, loaded: manifest.Manifest) -> int:
    if options.target is None or options.patch is None or options.work is None:
        parser.error("adapt needs --target, --patch and --work")
    work = options.work.resolve()
    file = deriving.finish_adapting(loaded, options.target, options.patch, PATCHES, work)
    if file is not None:
        print(f"{file.relative_to(REPOSITORY)}; now `python -m ci.series derive`")
        return 0
    clone = _clone(options, loaded.targets[options.target])
    for line in deriving.start_adapting(loaded, options.target, options.patch, PATCHES, work, clone):
        print(line)
    print("put the files in order, then give the same command again")
    return 0


def _export(parser: argparse.ArgumentParser, options: argparse.Namespace, loaded: manifest.Manifest) -> int:
    if options.clone is None:
        parser.error("export needs --from")
    name, target = loaded.select(options.target)
    with tempfile.TemporaryDirectory(prefix="series-") as place:
        git = worktree.Git(Path(place) / "home", loaded.identity)
        write(name, target, PATCHES, exported(git, options.clone, options.base or target.commit, Path(place)))
    return 0


def _lint(parser: argparse.ArgumentParser, options: argparse.Namespace, loaded: manifest.Manifest) -> int:
    names = [options.target] if options.target is not None else list(loaded.targets)
    problems = [
        line
        for name in names
        if loaded.select(name)[1].project == loaded.select(None)[1].project
        for line in lint.check_series(loaded.targets[name], PATCHES, loaded.identity)
    ]
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


_ACTIONS = {"adapt": _adapt, "check": _check, "derive": _derive, "export": _export, "lint": _lint}


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Keep a series and the shim the same: export commits as patch files, put the shim's modules in, check both.

``python -m ci.series check`` applies the series to the release's wheel, holds the modules that it adds against the
shim's, exports it again, and compares byte by byte. ``python -m ci.series refresh`` writes what ``check`` would ask
for. ``python -m ci.series export --from CLONE`` makes the files from commits on top of the pinned one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest, worktree
from ci.regress.errors import PatchError, RegressError


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


def rebuild(target: manifest.Target, patches: Path, identity: manifest.Identity, work: Path) -> dict[str, bytes]:
    """Apply the series to the release's wheel with the shim's modules put in, and export it.

    Args:
        target: The release.
        patches: Directory of ``series.toml``.
        identity: Author of exported patches.
        work: An empty directory.

    Returns:
        Bytes of each patch file, by name.

    Raises:
        RegressError: If the wheel cannot be had, or a patch does not apply.
    """
    git = worktree.Git(work / "home", identity)
    tree = work / "tree"
    fetch.unpack_wheel(fetch.fetch_wheel(target.wheel, WHEEL_CACHE, lambda line: None), tree)
    base = worktree.commit_all(git, tree, f"{target.wheel.filename}, standing for {target.commit}")
    fetch.check_blobs(tree, target, target.wheel.filename)
    for patch in target.patches:
        worktree.apply_series(git, tree, [patches / target.series / patch.file], False, lambda line: None)
        for added, source in patch.adds.items():
            file = tree / added
            if not file.is_file():
                raise PatchError(f"{patch.file} does not add {added}, as `adds` in {manifest.FILE} says")
            file.write_text(
                with_body(file.read_text(encoding="utf-8"), body_of((REPOSITORY / source).read_text(encoding="utf-8"))),
                encoding="utf-8",
            )
        git.run("add", "--all", "--force", ".", cwd=tree)
        git.run("commit", "--quiet", "--amend", "--no-edit", "--no-verify", cwd=tree)
    place = work / "exported"
    place.mkdir()
    return {file.name: file.read_bytes() for file in export(git, tree, base, place)}


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
    parser = argparse.ArgumentParser(prog="python -m ci.series", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["check", "refresh", "export"])
    parser.add_argument("--target", help="a target of patches/series.toml (default: the default one)")
    parser.add_argument("--from", dest="clone", type=Path, help="export: a clone whose HEAD carries the series")
    parser.add_argument("--base", help="export: the commit that the series starts from (default: the pinned one)")
    options = parser.parse_args(arguments)
    try:
        loaded = manifest.load(PATCHES)
        _, target = loaded.select(options.target)
        with tempfile.TemporaryDirectory(prefix="series-") as place:
            if options.action == "export":
                if options.clone is None:
                    parser.error("export needs --from")
                git = worktree.Git(Path(place) / "home", loaded.identity)
                out = Path(place) / "exported"
                out.mkdir()
                files = export(git, options.clone, options.base or target.commit, out)
                rebuilt = {file.name: file.read_bytes() for file in files}
            else:
                rebuilt = rebuild(target, PATCHES, loaded.identity, Path(place))
        if options.action == "check":
            problems = difference(target, PATCHES, rebuilt)
            for line in problems:
                print(line, file=sys.stderr)
            if problems:
                print("→ `python -m ci.series refresh` writes the patches anew", file=sys.stderr)
            return 1 if problems else 0
        for name, data in rebuilt.items():
            (PATCHES / target.series / name).write_bytes(data)
            print(f"{target.series}/{name}")
    except RegressError as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

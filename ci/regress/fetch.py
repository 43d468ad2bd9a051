# SPDX-License-Identifier: Apache-2.0
"""Obtain a target: the release's wheel, a commit of a git repository, or a copy of a fork's tree."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from ci.regress.errors import FetchError, TreeError
from ci.regress.manifest import Target, Wheel
from ci.regress.worktree import Git, GitFailure

Say = Callable[[str], None]
_OTHER_WAYS = "a clone serves as well (--git PATH-or-URL), and so does an unpacked tree (--tree PATH --apply)"
_TAIL = 12  # lines of pip's or git's output that are shown


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch_wheel(wheel: Wheel, cache: Path, say: Say) -> Path:
    """Return the release's wheel, from the cache or the package registry that pip is set up for.

    The hash is checked on every use; a cached file that is damaged is removed and fetched again.

    Raises:
        FetchError: pip is absent, finds no such wheel, or what it finds has another hash.
    """
    directory = cache / wheel.sha256
    path = directory / wheel.filename
    if path.is_file():
        found = sha256_of(path)
        if found == wheel.sha256:
            say(f"{wheel.filename}: in the cache, sha256 verified")
            return path
        say(f"{wheel.filename}: the cached file is damaged (sha256 {found}); it is removed and fetched again")
        path.unlink()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that the move is atomic: a run that is interrupted leaves no half of a wheel.
        with tempfile.TemporaryDirectory(prefix=".part-", dir=directory) as part:
            fetched = _download(wheel, Path(part), path)
            os.replace(fetched, path)
    except OSError as exc:
        raise FetchError(
            f"{directory}: cannot keep the wheel there: {exc}",
            "name another place with --wheel-cache (and one for the reports with --report-dir)",
        ) from exc
    say(f"{wheel.filename}: fetched, sha256 verified")
    return path


def _download(wheel: Wheel, part: Path, place: Path) -> Path:
    pin = f"{wheel.distribution}=={wheel.version}"
    requirements = part / "requirements.txt"
    requirements.write_text(f"{pin} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    command += ["--dest", str(part / "wheel"), "--requirement", str(requirements)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    tail = "\n".join(f"    {line}" for line in done.stdout.strip().splitlines()[-_TAIL:])
    if done.returncode != 0:
        if "No module named pip" in done.stdout or "No module named 'pip'" in done.stdout:
            raise FetchError(
                f"{sys.executable} has no pip to fetch {pin} with",
                f"install pip, or put {wheel.filename} at {place} yourself; {_OTHER_WAYS}",
            )
        if "DO NOT MATCH THE HASHES" in done.stdout:
            raise FetchError(
                f"wrong hash: the registry's {pin} is not the wheel that series.toml pins (sha256 {wheel.sha256}); "
                f"pip says:\n{tail}",
                "nothing was kept; find out which of the two is right before going on",
            )
        raise FetchError(f"{pin} could not be fetched: registry out of reach? pip says:\n{tail}", _OTHER_WAYS)
    fetched = part / "wheel" / wheel.filename
    if not fetched.is_file():
        names = sorted(file.name for file in (part / "wheel").iterdir())
        raise FetchError(f"pip fetched {', '.join(names)} for {pin}, not {wheel.filename} as series.toml pins")
    found = sha256_of(fetched)
    if found != wheel.sha256:
        raise FetchError(f"wrong hash: {wheel.filename} has sha256 {found}, series.toml pins {wheel.sha256}")
    return fetched


def unpack_wheel(path: Path, tree: Path) -> None:
    """Unpack a wheel into an empty directory.

    Raises:
        FetchError: it is no zip archive, or a member would land elsewhere.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                parts = PurePosixPath(name)
                if parts.is_absolute() or ".." in parts.parts:
                    raise FetchError(f"{path.name}: member {name!r} would land outside the tree")
            archive.extractall(tree)
    except zipfile.BadZipFile as exc:
        raise FetchError(f"{path.name}: not a wheel: {exc}") from exc


def fetch_git(where: str, target: Target, tree: Path, git: Git, say: Say) -> None:
    """Check the pinned commit of a repository out into a throw-away clone; the repository itself is only read.

    Args:
        where: a path, or a URL.

    Raises:
        FetchError: the repository is out of reach, or does not hold the commit.
    """
    local = Path(where).expanduser()
    is_path = local.exists()
    source = str(local.resolve()) if is_path else where
    # A URL may need the proxy and credentials of the user's own git configuration; nothing else does.
    reader = git if is_path else git.with_user_config()
    git.run("init", "--quiet", str(tree))
    say(f"fetching {target.commit[:9]} from {where}")
    try:
        reader.run("fetch", "--quiet", "--depth=1", "--no-tags", source, target.commit, cwd=tree)
    except GitFailure as first:
        if is_path and not _is_repository(git, local):
            raise FetchError(f"--git {where}: not a git repository:\n{first.tail(_TAIL)}") from first
        say("the commit cannot be fetched alone; fetching all branches and tags")
        try:
            reader.run("fetch", "--quiet", "--tags", source, "+refs/*:refs/fetched/*", cwd=tree)
        except GitFailure as second:
            raise FetchError(f"--git {where}: cannot be fetched; git says:\n{second.tail(_TAIL)}") from second
        if git.status("cat-file", "-e", f"{target.commit}^{{commit}}", cwd=tree) != 0:
            raise FetchError(
                f"--git {where}: does not hold commit {target.commit} ({target.tag} of {target.repository})",
                "fetch that tag into the repository first, or name another one",
            ) from first
    git.isolate(tree)
    try:
        git.run("checkout", "--quiet", "--detach", target.commit, cwd=tree)
    except GitFailure as exc:
        raise FetchError(f"--git {where}: cannot check out {target.commit}; git says:\n{exc.tail(_TAIL)}") from exc


def _is_repository(git: Git, path: Path) -> bool:
    return path.is_dir() and git.status("rev-parse", "--git-dir", cwd=path) == 0


def check_tree(path: Path, target: Target) -> None:
    """Refuse a directory that holds something else than the project.

    Raises:
        TreeError: it does not exist, or lacks the files that tell the project.
    """
    if not path.is_dir():
        raise TreeError(f"--tree {path}: no such directory")
    landmark = target.landmark or f"{target.package}/__init__.py"
    if not (path / landmark).is_file():
        raise TreeError(
            f"--tree {path}: not a tree of {target.project}: looked for {landmark} in it and found no such file",
            f"give the directory that contains {target.package}/",
        )


def copy_tree(source: Path, tree: Path, target: Target, touched: Iterable[str]) -> None:
    """Copy the package of a fork's tree, and whatever else the patches touch; the fork's tree is only read.

    Raises:
        TreeError: a file cannot be read.
    """
    try:
        _copy_directory(source / target.package, tree / target.package, ())
        for name in touched:
            if (source / name).is_file() and not (tree / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, tree / name)
    except OSError as exc:
        raise TreeError(f"--tree {source}: cannot be copied: {exc}") from exc


def _copy_directory(source: Path, destination: Path, above: tuple[Path, ...]) -> None:
    real = source.resolve()
    if real in above:
        return  # a symbolic link that leads back up
    destination.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        if entry.name in (".git", "__pycache__"):
            continue
        if entry.is_dir():
            _copy_directory(entry, destination / entry.name, (*above, real))
        elif entry.is_file():
            shutil.copy2(entry, destination / entry.name)


def check_blobs(tree: Path, target: Target, what: str) -> None:
    """Compare each file that the series touches with the git blob id that series.toml pins.

    Raises:
        FetchError: a file is absent or differs.
    """
    wrong = []
    for name, expected in target.blobs.items():
        path = tree / name
        found = blob_id(path.read_bytes()) if path.is_file() else "absent"
        if found != expected:
            wrong.append(f"    {name}: blob {found}, series.toml pins {expected}")
    if wrong:
        raise FetchError(
            f"{what} is not {target.tag} ({target.pin}):\n" + "\n".join(wrong),
            "correct `blobs` in series.toml if the pin is wrong; the patches are made for exactly these files",
        )


def blob_id(data: bytes) -> str:
    """Return what ``git hash-object --no-filters`` says."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()

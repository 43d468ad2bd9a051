# SPDX-License-Identifier: Apache-2.0
"""What a patch file must be before it is sent: rules that a machine can check, each with one owner.

The rules are upstream's (its contribution guide and its reviewers' checklist) and those of this repository's series.
"""

from __future__ import annotations

import re
from email import message_from_string
from pathlib import Path

from ci.regress.manifest import Identity, Target

_SUBJECT = re.compile(
    r"(build|chore|ci|docs|feat|fix|perf|refactor|revert|style|test)(\([a-z0-9_./-]+\))?!?: [^A-Z\s].*[^.\s]"
)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_FORBIDDEN = re.compile(r"(^|/)(uv\.lock|poetry\.lock|requirements[^/]*\.txt|pyproject\.toml|setup\.cfg)$|^\.github/")
_ADDED = (
    (re.compile(r"[ \t]+$"), "trailing blanks"),
    (re.compile(r"^\s*print\("), "print; use the module's logger"),
    (re.compile(r"^\s*except\s*:"), "bare except"),
    (re.compile(r"\.data\s*=[^=]"), "write to .data"),
    (re.compile(r"#\s*(noqa|type:\s*ignore)"), "new noqa or type: ignore"),
    (re.compile(r"\b(Optional|Union)\["), "Optional or Union; write X | None"),
    (re.compile(r"^\s*breakpoint\(|\bpdb\b"), "debugger"),
)
_ASSERT = re.compile(r"^\s*assert\b")
_NVIDIA = "# Copyright (c) "
_WIDTH = 120


def check_patch(text: str, name: str, identity: Identity) -> list[str]:
    """Return what is wrong with one patch, a line each.

    Args:
        text: the file.
        name: its name.
        identity: whose name it must bear.
    """
    mail = message_from_string(text)
    problems = []
    author = " ".join((mail["From"] or "").split())
    if author != f"{identity.name} <{identity.email}>":
        problems.append(f"From is {author or 'missing'}, not {identity.name}")
    subject = re.sub(r"^\[PATCH[^\]]*\] ?", "", " ".join((mail["Subject"] or "").split()))
    if not (mail["Subject"] or "").startswith("[PATCH]"):
        problems.append("Subject does not start with [PATCH] (export with --no-numbered)")
    if not _SUBJECT.fullmatch(subject):
        problems.append(f"subject is not `type(scope): text`: {subject!r}")
    if len(subject) > 80:
        problems.append(f"subject has {len(subject)} characters, 80 are allowed")
    if not text.partition("\n---\n")[0].partition("\n\n")[2].strip():
        problems.append("no message says why")
    for trailer in ("Signed-off-by", "Co-authored-by", "Change-Id"):
        if re.search(rf"^{trailer}:", text.partition("\n---\n")[0], re.MULTILINE | re.IGNORECASE):
            problems.append(f"bears {trailer}: who submits it adds that")
    files = _added(text)
    if not files:
        problems.append("changes nothing")
    for file, (new, added) in files.items():
        problems += [f"{file}: {problem}" for problem in _check_file(file, new, added)]
    code = any(file.startswith("nemo_automodel/") for file in files)
    if code and not any(re.fullmatch(r"tests/unit_tests/.+/test_\w+\.py", file) for file in files):
        problems.append("no unit test under tests/unit_tests/<domain>/test_<name>.py")
    return [f"{name}: {problem}" for problem in problems]


def check_series(target: Target, patches: Path, identity: Identity) -> list[str]:
    """Return what is wrong with the patches of a target."""
    place = patches / target.series
    problems = []
    for patch in target.patches:
        file = place / patch.file
        if not file.is_file():
            problems.append(f"{patch.file}: is not there")
        else:
            problems += check_patch(file.read_text(encoding="utf-8"), f"{target.series}/{patch.file}", identity)
    return problems


def _check_file(file: str, new: bool, added: list[tuple[int, str]]) -> list[str]:
    if _FORBIDDEN.search(file):
        return ["lock files, workflows and packaging are not for patches"]
    problems = []
    if new and file.endswith(".py"):
        head = [line for _, line in added[:15]]
        if not head or not head[0].startswith(_NVIDIA) or not any("Apache License" in line for line in head):
            problems.append("new file without upstream's licence header")
    if not file.endswith(".py"):
        return [*problems, *(f"line {at}: trailing blanks" for at, line in added if re.search(r"[ \t]+$", line))]
    for number, line in added:
        problems += [f"line {number}: {what}" for pattern, what in _ADDED if pattern.search(line)]
        if len(line) > _WIDTH:
            problems.append(f"line {number}: {len(line)} characters, {_WIDTH} are allowed")
        if _ASSERT.match(line) and not file.startswith("tests/"):
            problems.append(f"line {number}: validation by assert")
    return problems


def _added(text: str) -> dict[str, tuple[bool, list[tuple[int, str]]]]:
    """Return for each file whether it is new, and the added lines with their numbers."""
    found: dict[str, tuple[bool, list[tuple[int, str]]]] = {}
    old, lines, left, right, number = "", [], 0, 0, 0
    for line in text.splitlines():
        if left > 0 or right > 0:
            if line.startswith("+"):
                lines.append((number, line[1:]))
            left -= line[:1] in (" ", "-", "")
            right -= line[:1] in (" ", "+", "")
            number += line[:1] in (" ", "+", "")
        elif hunk := _HUNK.match(line):
            left, right, number = int(hunk[2] or 1), int(hunk[4] or 1), int(hunk[3])
        elif line.startswith("--- "):
            old = line[4:]
        elif line.startswith("+++ ") and old:
            name = (line[4:] if line[4:] != "/dev/null" else old)[2:]
            lines = []
            found[name] = (old == "/dev/null", lines)
            old = ""
    return found

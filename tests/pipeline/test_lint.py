# SPDX-License-Identifier: Apache-2.0
"""What a patch file must be: each rule with an example that breaks it."""

from __future__ import annotations

import pytest

from ci import lint
from ci.regress import PATCHES, manifest
from ci.regress.manifest import Identity

LOADED = manifest.load(PATCHES)
IDENTITY = Identity(name="A Tester", email="tester@example.invalid")
HEADER = "".join(
    f"+{line}\n"
    for line in ("# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.", "#", "# Apache License", "", "X = 1")
)
GOOD = f"""\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A Tester <tester@example.invalid>
Date: Tue, 1 Dec 2026 17:47:56 +0000
Subject: [PATCH] fix(moe): keep what is needed

It was lost.
---
 nemo_automodel/a.py | 2 +-

diff --git a/nemo_automodel/a.py b/nemo_automodel/a.py
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222 100644
--- a/nemo_automodel/a.py
+++ b/nemo_automodel/a.py
@@ -1,2 +1,2 @@
 kept: Optional[int] = None
-old = 1
+new = 2
diff --git a/tests/unit_tests/moe/test_a.py b/tests/unit_tests/moe/test_a.py
new file mode 100644
index 0000000000000000000000000000000000000000..3333333333333333333333333333333333333333
--- /dev/null
+++ b/tests/unit_tests/moe/test_a.py
@@ -0,0 +1,5 @@
{HEADER}"""


def problems(old: str = "", new: str = "") -> list[str]:
    """What is said about the good patch after a replacement."""
    assert old in GOOD
    return lint.check_patch(GOOD.replace(old, new), "0001-x.patch", IDENTITY)


def test_good_patch() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("From: A Tester", "From: Somebody", "From is Somebody"),
        ("[PATCH]", "[PATCH 1/3]", "does not start with [PATCH]"),
        ("fix(moe): keep", "Keep", "subject is not `type(scope): text`"),
        ("fix(moe): keep", "fix(moe): Keep", "subject is not `type(scope): text`"),
        ("fix(moe): keep", "bug(moe): keep", "subject is not `type(scope): text`"),
        ("is needed", "is needed " + "x" * 60, "80 are allowed"),
        ("It was lost.\n", "", "no message says why"),
        ("It was lost.", "It was lost.\n\nSigned-off-by: A <a@example.invalid>", "bears Signed-off-by"),
        ("nemo_automodel/a.py", "uv.lock", "are not for patches"),
        ("nemo_automodel/a.py", "pyproject.toml", "are not for patches"),
        ("nemo_automodel/a.py", ".github/workflows/ci.yml", "are not for patches"),
        ("tests/unit_tests/moe/test_a.py", "tests/unit_tests/moe/a.py", "no unit test under"),
        ("# Copyright (c) 2026, NVIDIA", "# Copyright Somebody", "without upstream's licence header"),
        ("+new = 2", "+new = 2 ", "line 2: trailing blanks"),
        ("+new = 2", "+print(2)", "line 2: print"),
        ("+new = 2", "+except:", "line 2: bare except"),
        ("+new = 2", "+param.data = 2", "line 2: write to .data"),
        ("+new = 2", "+new = 2  # noqa: E501", "line 2: new noqa"),
        ("+new = 2", "+new: Optional[int] = 2", "line 2: Optional or Union"),
        ("+new = 2", "+assert new", "line 2: validation by assert"),
        ("+new = 2", "+new = " + "2" * 120, "120 are allowed"),
        ("+new = 2", "+breakpoint()", "line 2: debugger"),
    ],
)
def test_broken_rule(old: str, new: str, said: str) -> None:
    found = problems(old, new)
    assert any(said in problem for problem in found), found
    assert all(problem.startswith("0001-x.patch: ") for problem in found)


def test_context_and_removed_lines_are_upstreams_own() -> None:
    assert problems("-old = 1", "-print(old) ") == []


@pytest.mark.parametrize(
    "name", [name for name, target in LOADED.targets.items() if target.project == LOADED.select(None)[1].project]
)
def test_series(name: str) -> None:
    assert lint.check_series(LOADED.targets[name], PATCHES, LOADED.identity) == []

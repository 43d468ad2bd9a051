# SPDX-License-Identifier: Apache-2.0
"""Show that defects are real in a pinned release of NeMo Automodel, and gone after ``git am`` of a patch series.

Data flows one way: ``fetch`` (a release, a commit or a fork's tree) → ``worktree`` (throw-away git trees) → ``sides``
(the contracts, each side in its own process) → ``verdict`` → ``report``.
"""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = REPOSITORY / "patches"  # series.toml and the series
OUTPUT = REPOSITORY / ".regress"  # reports, by target, and what is kept between runs
WHEEL_CACHE = OUTPUT / "cache"

# SPDX-License-Identifier: Apache-2.0
"""How far the searches go: the same few examples at every run, or as many new ones as are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

# Set by `nox -s search`: how many times as many examples, drawn anew.
FACTOR = int(os.environ.get("SEARCH_FACTOR", "1"))


def searched(examples: int) -> Callable[[Any], Any]:
    """Draw ``examples`` examples, always the same ones unless a search is asked for."""
    return settings(
        max_examples=examples * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )

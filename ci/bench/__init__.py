# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, the release beside the fixes in one run; each a nox session, none of them runs in CI."""

from __future__ import annotations

from ci.regress import OUTPUT

BENCH = OUTPUT / "bench"  # results: one JSON file and one table a benchmark

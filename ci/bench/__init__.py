# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, each a nox session; none of them runs in CI."""

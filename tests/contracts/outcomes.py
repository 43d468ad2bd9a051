# SPDX-License-Identifier: Apache-2.0
"""Exceptions with which a contract says why it has nothing to say."""

from __future__ import annotations


class ContractNotApplicable(Exception):
    """This test cannot apply on this side or machine: it is reported as "not run" and counted, never as passed."""


class PreconditionError(Exception):
    """What the contract builds upon does not hold; its own type, so that it never matches a declared signature."""

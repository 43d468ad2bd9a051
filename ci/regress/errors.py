# SPDX-License-Identifier: Apache-2.0
"""Why a run could not take place; each message names the file or thing at fault and what to do next."""

from __future__ import annotations


class RegressError(Exception):
    """The run could not take place: exit status 2.

    Args:
        message: what is wrong, and where.
        hint: what to do next, if there is something to do.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n→ {self.hint}"


class UsageError(RegressError):
    """Options that contradict each other, or name something that does not exist."""


class ManifestError(RegressError):
    """``series.toml`` cannot be read, breaks its schema, or contradicts itself or the patch directory."""


class FetchError(RegressError):
    """The target could not be obtained, or is not what ``series.toml`` pins."""


class TreeError(RegressError):
    """git is absent, a tree is not what it should be, or a throw-away tree could not be made."""


class PatchError(RegressError):
    """A patch of the series does not apply."""


class SideError(RegressError):
    """The contracts could not run on a side."""

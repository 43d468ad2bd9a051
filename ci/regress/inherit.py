# SPDX-License-Identifier: Apache-2.0
"""What a target of ``series.toml`` takes over from the one that its ``like`` names; the standard library alone.

Used on the file's own tables, before their schema is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Any]
OWN = ("default", "like", "without", "revised", "fallback")  # never taken over
PINNED = ("commit", "tag", "wheel", "blobs", "series")  # taken over all together, or not at all
_SHOWN = 'targets."{}".like'


class InheritanceError(ValueError):
    """``like`` names no target, leads back to where it started, or contradicts the target's own keys."""


def resolve(targets: Mapping[str, Table], name: str) -> dict[str, Any]:
    """Return a target's table with everything that it takes over.

    Contracts are taken over one by one, and a table of the target's own replaces the whole contract.  A target with
    pins of its own has a series of its own: the patches of the other one less those that `without` names, numbered
    anew, then its own.  A patch cures what it cures there, less what is green or does not apply here, unless `revised`
    says what its form here is about.

    Raises:
        InheritanceError: ``like`` names no target, leads back, or contradicts the target's own keys.
    """
    return _resolve(targets, name, ())


def _resolve(targets: Mapping[str, Table], name: str, below: tuple[str, ...]) -> dict[str, Any]:
    own = dict(targets[name])
    parent = own.get("like")
    if parent is None:
        return own
    if parent not in targets:
        raise InheritanceError(f"{_SHOWN.format(name)}: there is no target {parent!r}")
    if parent in (*below, name):
        raise InheritanceError(f"{_SHOWN.format(name)}: leads back to {parent!r}")
    base = _resolve(targets, parent, (*below, name))
    repinned = any(key in own for key in PINNED)
    if own.get("patches") and not repinned:
        raise InheritanceError(f'targets."{name}".patches: the series is that of {parent!r}, with its patches')
    dropped = (*OWN, *PINNED) if repinned else OWN
    merged = {key: value for key, value in base.items() if key not in dropped} | own
    merged["contracts"] = {**base.get("contracts", {}), **own.get("contracts", {})}
    merged["patches"] = [_taken_over(patch, merged, own) for patch in base.get("patches", [])]
    if repinned:
        kept = [patch for patch in merged["patches"] if slug(patch) not in own.get("without", {})]
        merged["patches"] = _numbered([*kept, *own.get("patches", [])], own.get("revised", {}))
    return merged


def slug(patch: Table) -> str:
    """Return the name of a patch without its number and suffix: what stays the same from series to series."""
    return str(patch.get("file", ""))[5:].removesuffix(".patch")


def _taken_over(patch: Table, target: Table, own: Table) -> dict[str, Any]:
    revised = own.get("revised", {}).get(slug(patch), {})
    patch = {**patch, **{key: value for key, value in revised.items() if key != "name"}}
    cures = [
        contract
        for contract in patch.get("cures", [])
        if target["contracts"].get(contract, {}).get("stock") != "green"
        and not any(contract in entry.get("contracts", []) for entry in target.get("not_applicable", []))
    ]
    return {**patch, "cures": cures}


def _numbered(patches: list[dict[str, Any]], revised: Mapping[str, Table]) -> list[dict[str, Any]]:
    names = [revised.get(slug(patch), {}).get("name", slug(patch)) for patch in patches]
    return [
        {**patch, "file": f"{number:04d}-{name}.patch"}
        for number, (patch, name) in enumerate(zip(patches, names, strict=True), start=1)
    ]

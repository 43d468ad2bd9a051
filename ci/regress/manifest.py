# SPDX-License-Identifier: Apache-2.0
"""``patches/series.toml``: the one file that says what is pinned, which patches there are, and what each contract does.

Nothing else is machine-read.  Unknown keys are refused, so that a misspelt key never counts as an absent one.
"""

from __future__ import annotations

import re
import tomllib
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)

from ci.regress import inherit
from ci.regress.errors import ManifestError, UsageError

FILE = "series.toml"
_PATCH_NAME = re.compile(r"^(\d{4})-[A-Za-z0-9._+-]+\.patch$")


def _relative(value: str) -> str:
    path = PurePosixPath(value)
    if not value or path.is_absolute() or ".." in path.parts or "\\" in value:
        raise ValueError("must be a relative path with forward slashes, without '..'")
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as exc:
        raise ValueError(f"is not a regular expression: {exc}") from exc
    return value


def _specifier(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier as exc:
        raise ValueError(f"is no range of versions: {exc}") from exc
    return value


def _requirement(value: str) -> str:
    try:
        Requirement(value)
    except InvalidRequirement as exc:
        raise ValueError(f"is no requirement: {exc}") from exc
    return value


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ObjectId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
RelativePath = Annotated[str, AfterValidator(_relative)]
ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
ContractId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Status(StrEnum):
    """Where a patch stands with upstream."""

    PROPOSED = "proposed"
    SUBMITTED = "submitted"
    TAKEN = "taken"
    INAPPROPRIATE = "inappropriate"


class Expectation(StrEnum):
    """What a run must show for a contract; derived, never written down."""

    FIXED = "fixed"
    GUARD = "guard"
    OPEN = "open"


class Identity(_Model):
    """Author of exported patches, and of the commits in throw-away trees."""

    name: Text
    email: Text


class Wheel(_Model):
    """The release's wheel."""

    distribution: Text
    version: Text
    filename: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]+\.whl$")]
    sha256: Digest


class Signature(_Model):
    """How a contract fails where the defect is present.  All the parts that are given must hold."""

    raises: Text | None = None
    match: Annotated[str, StringConstraints(min_length=1), AfterValidator(_pattern)] | None = None
    measured: Text | None = None
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _parts(self) -> Signature:
        if self.raises is None and self.measured is None:
            raise ValueError("needs `raises` or `measured`")
        if self.match is not None and self.raises is None:
            raise ValueError("`match` needs `raises`")
        if self.raises is not None and self.match is None and self.measured is None:
            raise ValueError("`raises` needs `match` or `measured`: alone it fits any exception of that type")
        bounds = [bound for bound in (self.min, self.max) if bound is not None]
        if self.measured is None and bounds:
            raise ValueError("`min` and `max` need `measured`")
        if self.measured is not None and not bounds:
            raise ValueError("`measured` needs `min` or `max`")
        if len(bounds) == 2 and bounds[0] > bounds[1]:
            raise ValueError("`min` is greater than `max`")
        return self

    def describe(self) -> str:
        """Return the signature in words."""
        parts = []
        if self.raises is not None:
            parts.append(f"{self.raises}" + (f" matching {self.match!r}" if self.match else ""))
        if self.measured is not None:
            low = "" if self.min is None else f"{self.min:g} ≤ "
            high = "" if self.max is None else f" ≤ {self.max:g}"
            parts.append(f"{low}{self.measured}{high}")
        return " and ".join(parts)


def _stock_kind(value: Any) -> str:
    return "signature" if isinstance(value, (dict, Signature)) else "green"


class Contract(_Model):
    """What the release itself does with a contract."""

    stock: Annotated[
        Annotated[Literal["green"], Tag("green")] | Annotated[Signature, Tag("signature")], Discriminator(_stock_kind)
    ]

    @property
    def signature(self) -> Signature | None:
        """The declared signature, or None where the contract is declared green."""
        return self.stock if isinstance(self.stock, Signature) else None


class Patch(_Model):
    """One file of the series."""

    file: Annotated[str, StringConstraints(pattern=_PATCH_NAME.pattern)]
    status: Status
    reason: Text
    upstream: Annotated[str, StringConstraints(pattern=r"^https://\S+$")] | None = None
    cures: tuple[ContractId, ...] = ()
    adds: dict[RelativePath, RelativePath] = {}


class Revision(_Model):
    """What is different about a patch that does something else on another release; what is None stays."""

    name: Text | None = None  # the subject as the file has it
    status: Status | None = None
    reason: Text | None = None
    cures: tuple[ContractId, ...] | None = None


class ExtraWheel(Wheel):
    """Another project's wheel, unpacked beside the target for its imports; what it requires is not installed."""

    package: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$")]


class NotApplicable(_Model):
    """Contracts that say nothing about a target, and why."""

    reason: Text
    contracts: tuple[ContractId, ...] = Field(min_length=1)


class Target(_Model):
    """A release: where it comes from, what its contracts need, and the series made for it.

    What a target with ``like`` takes over stands in ``ci.regress.inherit``; here everything is in place.
    """

    default: bool = False
    like: Text | None = None
    without: dict[str, Text] = {}  # patches of the other series that this one lacks (number and suffix left out): why
    revised: dict[str, Revision] = {}  # patches of the other series that do something else here
    fallback: Text | None = None  # the target that runs where no interpreter of the range `python` is found
    project: Text
    repository: Annotated[str, StringConstraints(pattern=r"^https://\S+$")]
    commit: ObjectId | None = None  # None: only the wheel is known
    tag: Text
    package: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$")]
    landmark: RelativePath | None = None
    shim: ModuleName | None = None
    series: RelativePath
    suite: RelativePath  # the folder of its contracts, from the root of this repository
    python: Annotated[str, AfterValidator(_specifier)] = ""  # a range of versions; empty: whatever runs this project
    requirements: tuple[Annotated[str, AfterValidator(_requirement)], ...] = ()
    imports: tuple[ModuleName, ...] = ()
    wheel: Wheel | None = None  # None: the commit is in git only
    extra_wheels: tuple[ExtraWheel, ...] = ()
    blobs: dict[RelativePath, ObjectId] = {}
    patches: tuple[Patch, ...] = ()
    contracts: dict[ContractId, Contract] = {}
    not_applicable: tuple[NotApplicable, ...] = ()

    @property
    def pin(self) -> str:
        """What identifies the release in a line of text."""
        return f"commit {self.commit[:9]}" if self.commit is not None else f"sha256 {self.wheel.sha256[:9]}"

    def inapplicable(self) -> dict[str, str]:
        """Return the contracts that say nothing about this target, each with the reason."""
        return {contract: entry.reason for entry in self.not_applicable for contract in entry.contracts}

    def suits_python(self, version: str) -> bool:
        """Return whether a version of Python is in the target's range."""
        return SpecifierSet(self.python).contains(version, prereleases=True)

    def expectation(self, contract: str) -> Expectation:
        """Return what a run must show for a declared contract.  Raises ``KeyError`` for an undeclared one."""
        declared = self.contracts[contract]
        if self.curing(contract):
            return Expectation.FIXED
        return Expectation.GUARD if declared.stock == "green" else Expectation.OPEN

    def curing(self, contract: str) -> list[Patch]:
        """Return the patches that claim to cure a contract."""
        return [patch for patch in self.patches if contract in patch.cures]


class Manifest(_Model):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema")
    identity: Identity
    targets: dict[Text, Target] = Field(min_length=1)

    def select(self, name: str | None) -> tuple[str, Target]:
        """Return a target by name, or the default one.

        Raises:
            UsageError: there is no such target, or no default.
        """
        if name is None:
            for key, target in self.targets.items():
                if target.default:
                    return key, target
            raise UsageError(f"{FILE}: no target has `default = true`", "name one with --target")
        if name not in self.targets:
            raise UsageError(f"--target {name}: not in {FILE}; known: {', '.join(sorted(self.targets))}")
        return name, self.targets[name]


def load(patches: Path, unlisted: bool = False) -> Manifest:
    """Read and check ``series.toml``, and the patch directories against it.

    A listed patch that is absent is no error here: the run goes on without it, and the verdicts say what is amiss.

    Args:
        patches: the directory that holds ``series.toml``.
        unlisted: let patch files lie there that no target lists, for whoever is about to write them anew.

    Raises:
        ManifestError: the file is absent, is no TOML, breaks the schema, contradicts itself, or leaves out a patch
            that lies in the directory of a series.
    """
    path = patches / FILE
    shown = f"{patches.name}/{FILE}"
    try:
        with path.open("rb") as stream:
            data = tomllib.load(stream)
    except OSError as exc:
        raise ManifestError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ManifestError(f"{shown}: not TOML: {exc}") from exc
    try:
        manifest = Manifest.model_validate(_resolved(data))
    except inherit.InheritanceError as exc:
        raise ManifestError(f"{shown}: {exc}") from exc
    except ValidationError as exc:
        raise ManifestError("\n".join(f"{shown}: {line}" for line in _explain(exc))) from exc
    problems = [*_contradictions(manifest), *([] if unlisted else _unlisted(manifest, patches))]
    if problems:
        raise ManifestError("\n".join(f"{shown}: {line}" for line in problems))
    return manifest


def _resolved(data: dict[str, Any]) -> dict[str, Any]:
    """Return the file with every target's ``like`` followed; what is no table is left to the schema."""
    targets = data.get("targets")
    if not isinstance(targets, dict) or not all(isinstance(table, dict) for table in targets.values()):
        return data
    return {**data, "targets": {name: inherit.resolve(targets, name) for name in targets}}


def absent_patches(target: Target, patches: Path) -> list[Patch]:
    """Return the listed patches that are not on disk."""
    return [patch for patch in target.patches if not (patches / target.series / patch.file).is_file()]


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        where = _key_path(item["loc"])
        if item["type"] == "extra_forbidden":
            text = "unknown key"
        elif item["type"] == "missing":
            text = "missing"
        else:
            text = item["msg"].removeprefix("Value error, ")
            if isinstance(item["input"], (str, int, float, bool)):
                text += f" (it is {item['input']!r})"
        lines.append(f"{where}: {text}")
    return lines


def _key_path(location: tuple[int | str, ...]) -> str:
    path = ""
    for position, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif part == "[key]":
            path += " (the key itself)"
        elif part in ("green", "signature") and position and location[position - 1] == "stock":
            continue  # the branch of the union, not a key of the file
        else:
            key = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"'
            path += f".{key}" if path else key
    return path


def _contradictions(manifest: Manifest) -> list[str]:
    problems = []
    defaults = [name for name, target in manifest.targets.items() if target.default]
    if len(defaults) > 1:
        problems.append(f"more than one default target: {', '.join(defaults)}")
    for name, target in manifest.targets.items():
        where = f'targets."{name}"'
        problems += _target_contradictions(manifest, where, target)
        for number, patch in enumerate(target.patches, start=1):
            found = int(patch.file[:4])
            if found != number:
                problems.append(
                    f"{where}.patches[{number - 1}]: {patch.file} is number {found:04d} but stands in place "
                    f"{number:04d}; patches are numbered from 0001 without gaps, in the order of `git am`"
                )
            if len(set(patch.cures)) != len(patch.cures):
                problems.append(f"{where}.patches[{number - 1}].cures: a contract is named twice")
            for contract in patch.cures:
                if contract not in target.contracts:
                    problems.append(
                        f"{where}.patches[{number - 1}].cures: contract {contract!r} is not declared in "
                        f"{where}.contracts"
                    )
                elif target.contracts[contract].stock == "green":
                    problems.append(
                        f'{where}.contracts."{contract}".stock: "green", yet {patch.file} claims to cure it; '
                        "declare how it fails, or take it out of `cures`"
                    )
    return problems


def _target_contradictions(manifest: Manifest, where: str, target: Target) -> list[str]:
    problems = []
    if target.wheel is None and target.commit is None:
        problems.append(f"{where}: needs `wheel` or `commit`")
    if target.fallback is not None and target.fallback not in manifest.targets:
        problems.append(f"{where}.fallback: there is no target {target.fallback!r}")
    if (target.without or target.revised) and target.like is None:
        problems.append(f"{where}: `without` and `revised` need `like`")
    elif target.like is not None:
        theirs = {inherit.slug({"file": patch.file}) for patch in manifest.targets[target.like].patches}
        for key in ("without", "revised"):
            unknown = sorted(set(getattr(target, key)) - theirs)
            if unknown:
                problems.append(f"{where}.{key}: {target.like} has no patch {', '.join(unknown)}")
    for index, entry in enumerate(target.not_applicable):
        undeclared = [contract for contract in entry.contracts if contract not in target.contracts]
        if undeclared:
            problems.append(f"{where}.not_applicable[{index}]: not declared: {', '.join(undeclared)}")
    if len(target.inapplicable()) != sum(len(entry.contracts) for entry in target.not_applicable):
        problems.append(f"{where}.not_applicable: a contract is named twice")
    for number, patch in enumerate(target.patches):
        curing = [contract for contract in patch.cures if contract in target.inapplicable()]
        if curing:
            problems.append(f"{where}.patches[{number}].cures: not applicable here: {', '.join(curing)}")
    return problems


def _unlisted(manifest: Manifest, patches: Path) -> list[str]:
    problems = []
    listed: dict[str, set[str]] = {}
    for target in manifest.targets.values():
        listed.setdefault(target.series, set()).update(patch.file for patch in target.patches)
    for file in sorted(patches.rglob("*.patch")):
        series = file.parent.relative_to(patches).as_posix()
        if file.name not in listed.get(series, set()):
            problems.append(
                f"{file.relative_to(patches).as_posix()} lies there but no target lists it; "
                "add it to `patches`, or remove the file"
            )
    return problems

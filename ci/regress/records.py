# SPDX-License-Identifier: Apache-2.0
"""What a side reports: the shapes that ``plugin`` writes and that ``verdict`` and ``report`` read."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

# JSON has no such numbers: they are written as text.
Number = Annotated[
    float,
    Field(allow_inf_nan=True),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]


class Record(BaseModel):
    """Base of the records; numbers that JSON lacks travel as strings."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, ser_json_inf_nan="strings")


class Outcome(StrEnum):
    """What became of one test."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    NOT_RUN = "not-run"
    SKIPPED = "skipped"


class Raised(Record):
    """An exception; names are qualified."""

    type: str
    lineage: list[str] = Field(alias="mro")  # every class has an `mro` already
    message: str


class ExceptionRecord(Raised):
    """The exception that a test ended with, and that of the process it reports on (a rank), if it names one."""

    root_cause: Raised | None = None


class TestRecord(Record):
    """One test of a contract on one side."""

    __test__ = False  # not for pytest to collect

    nodeid: str
    contract: str
    meaning: str
    outcome: Outcome
    phase: str
    exception: ExceptionRecord | None = None
    measured: dict[str, Number] = {}
    duration_s: float = 0.0
    text: str = ""


class CollectedTest(Record):
    """A test that was found and selected."""

    nodeid: str
    contract: str
    meaning: str


class CollectionError(Record):
    """A contract file that could not be collected."""

    file: str
    exception: ExceptionRecord | None = None
    text: str = ""


class SideRecord(Record):
    """Everything that one side reports."""

    side: str
    tree: str
    commit: str
    python: str = ""
    torch: str | None = None
    torch_file: str | None = None
    package_file: str | None = None
    exit_status: int | None = None
    duration_s: float = 0.0
    died: str | None = None
    log: str = ""
    collection_errors: list[CollectionError] = []
    tests: list[TestRecord] = []

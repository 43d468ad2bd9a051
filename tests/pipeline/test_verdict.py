# SPDX-License-Identifier: Apache-2.0
"""The table of verdicts, without running anything."""

from __future__ import annotations

import math

import pytest

from ci.regress.manifest import Contract, Expectation, Signature
from ci.regress.records import ExceptionRecord, Outcome, Raised, TestRecord
from ci.regress.verdict import Declared, State, Verdict, headline, judge, judge_as_is, mismatch, state_of

SIGNATURE = Signature(raises="AssertionError", match="half")
RED = Contract(stock=SIGNATURE)
GREEN = Contract(stock="green")
CURED = Declared(RED, Expectation.FIXED, ("0001-cure.patch",))
GUARDED = Declared(GREEN, Expectation.GUARD)
OPEN = Declared(RED, Expectation.OPEN)


def record(
    outcome: str, message: str = "half", kind: str = "builtins.AssertionError", phase: str = "call", **measured: float
) -> TestRecord:
    exception = None
    if outcome != "passed":
        lineage = [kind, "builtins.Exception", "builtins.BaseException", "builtins.object"]
        exception = ExceptionRecord(type=kind, lineage=lineage, message=message)
    return TestRecord(
        nodeid="test_it.py::test_it",
        contract="a.b",
        meaning="it works",
        outcome=Outcome(outcome),
        phase=phase,
        exception=exception,
        measured=measured,
    )


PASS, FAIL = record("passed"), record("failed")
OTHER = record("failed", "No module named 'x'", "builtins.ImportError")
SETUP = record("error", phase="setup")
SKIP = record("skipped")
AWAY = record("not-run", "needs the other side's checkpoint", "tests.contracts.outcomes.ContractNotApplicable")


@pytest.mark.parametrize(
    ("tests", "state"),
    [
        ([], State.ABSENT),
        ([PASS, PASS], State.GREEN),
        ([FAIL, FAIL], State.RED),
        ([PASS, FAIL], State.MIXED),
        ([PASS, SETUP], State.ERROR),
        ([PASS, SKIP], State.SKIPPED),
        ([AWAY], State.NOT_RUN),
        ([AWAY, PASS], State.GREEN),
        ([AWAY, FAIL], State.RED),
    ],
)
def test_state(tests: list[TestRecord], state: State) -> None:
    assert state_of(tests) is state


@pytest.mark.parametrize(
    ("declared", "stock", "patched", "verdict", "as_declared", "note"),
    [
        (CURED, [FAIL], [PASS], Verdict.FIXED, True, ""),
        (GUARDED, [PASS], [PASS], Verdict.GUARD, True, ""),
        (OPEN, [FAIL], [FAIL], Verdict.OPEN, True, ""),
        (GUARDED, [PASS], [FAIL], Verdict.REGRESSION, False, "patched: AssertionError: half"),
        (GUARDED, [PASS], [OTHER], Verdict.REGRESSION, False, "No module named 'x'"),
        (GUARDED, [PASS], [SETUP], Verdict.REGRESSION, False, "error in setup"),
        (GUARDED, [PASS, PASS], [PASS, FAIL], Verdict.REGRESSION, False, "1 of 2 tests red"),
        # not what was expected
        (CURED, [FAIL], [FAIL], Verdict.OPEN, False, "0001-cure.patch claims to cure it"),
        (CURED, [PASS], [PASS], Verdict.GUARD, False, "0001-cure.patch can go"),
        (CURED, [PASS], [FAIL], Verdict.REGRESSION, False, "patched: AssertionError"),
        (OPEN, [FAIL], [PASS], Verdict.FIXED, False, "no patch names it"),
        (OPEN, [PASS], [PASS], Verdict.GUARD, False, "declared red, yet green on stock"),
        # broken
        (CURED, [OTHER], [PASS], Verdict.BROKEN, False, "raised ImportError: No module named 'x'"),
        (CURED, [SETUP], [PASS], Verdict.BROKEN, False, "stock: error in setup"),
        (CURED, [SKIP], [PASS], Verdict.BROKEN, False, "was skipped"),
        (CURED, [FAIL], [SKIP], Verdict.BROKEN, False, "patched: test_it was skipped"),
        (CURED, [PASS, FAIL], [PASS, PASS], Verdict.BROKEN, False, "stock: 1 of 2 tests red"),
        (CURED, [FAIL, FAIL], [PASS, FAIL], Verdict.BROKEN, False, "patched: 1 of 2 tests red"),
        (CURED, [FAIL], [SETUP], Verdict.BROKEN, False, "patched: error in setup"),
        (OPEN, [FAIL], [OTHER], Verdict.BROKEN, False, "patched fails in another way than stock"),
        (GUARDED, [FAIL], [PASS], Verdict.BROKEN, False, "declared green, but red"),
        (CURED, [], [PASS], Verdict.BROKEN, False, "stock: no test of it"),
        (CURED, [FAIL], [], Verdict.BROKEN, False, "patched: no test of it"),
        (None, [PASS], [PASS], Verdict.BROKEN, False, "undeclared"),
        # not run: on neither side is what this machine cannot do; on one side shows nothing
        (CURED, [AWAY], [AWAY], Verdict.NOT_RUN, True, "needs the other side's checkpoint"),
        (CURED, [AWAY], [PASS], Verdict.NOT_RUN, False, "not run on stock"),
        (CURED, [FAIL], [AWAY], Verdict.NOT_RUN, False, "not run on patched"),
        (CURED, [FAIL, AWAY], [PASS, PASS], Verdict.FIXED, True, ""),
    ],
)
def test_both_sides(
    declared: Declared | None,
    stock: list[TestRecord],
    patched: list[TestRecord],
    verdict: Verdict,
    as_declared: bool,
    note: str,
) -> None:
    judgement = judge(declared, stock, patched)
    assert (judgement.verdict, judgement.as_declared) == (verdict, as_declared)
    notes = "\n".join(judgement.notes)
    assert note in notes
    assert bool(note) == bool(notes)


def test_fork_may_hold_a_cure_of_its_own() -> None:
    judgement = judge(CURED, [PASS], [PASS], fork=True)
    assert (judgement.verdict, judgement.as_declared) == (Verdict.GUARD, True)
    assert "0001-cure.patch can go" in judgement.notes[0]
    assert not judge(GUARDED, [PASS], [FAIL], fork=True).as_declared
    assert not judge(OPEN, [FAIL], [PASS], fork=True).as_declared


@pytest.mark.parametrize(
    ("declared", "sides", "shim", "as_declared"),
    [
        (CURED, ([FAIL], [PASS]), [PASS], True),
        (CURED, ([FAIL], [PASS]), [FAIL], False),
        (CURED, ([FAIL], [PASS]), [AWAY], False),
        (CURED, ([AWAY], [AWAY]), [AWAY], True),
        (GUARDED, ([PASS], [PASS]), [PASS], True),
        (GUARDED, ([PASS], [PASS]), [SETUP], False),
        (OPEN, ([FAIL], [FAIL]), [FAIL], True),
        (OPEN, ([FAIL], [FAIL]), [PASS], False),
        (OPEN, ([FAIL], [FAIL]), [OTHER], False),
        (CURED, ([FAIL], [PASS]), [], False),
    ],
)
def test_shim(
    declared: Declared, sides: tuple[list[TestRecord], list[TestRecord]], shim: list[TestRecord], as_declared: bool
) -> None:
    without = judge(declared, *sides)
    judgement = judge(declared, *sides, shim=shim)
    assert judgement.verdict is without.verdict
    assert judgement.as_declared is as_declared
    assert any(note.startswith("shim") for note in judgement.notes) is not as_declared


@pytest.mark.parametrize(
    ("declared", "tests", "verdict", "as_declared", "note"),
    [
        (CURED, [FAIL], Verdict.OPEN, True, "in this tree"),
        (CURED, [PASS], Verdict.GUARD, True, "not in this tree"),
        (GUARDED, [PASS], Verdict.GUARD, True, ""),
        (GUARDED, [FAIL], Verdict.BROKEN, False, "declared green, but red"),
        (CURED, [OTHER], Verdict.BROKEN, False, "ImportError"),
        (CURED, [SETUP], Verdict.BROKEN, False, "error in setup"),
        (CURED, [PASS, FAIL], Verdict.BROKEN, False, "1 of 2"),
        (CURED, [SKIP], Verdict.BROKEN, False, "skipped"),
        (CURED, [], Verdict.BROKEN, False, "no test"),
        (CURED, [AWAY], Verdict.NOT_RUN, True, "checkpoint"),
        (None, [PASS], Verdict.BROKEN, False, "undeclared"),
    ],
)
def test_as_it_stands(
    declared: Declared | None, tests: list[TestRecord], verdict: Verdict, as_declared: bool, note: str
) -> None:
    judgement = judge_as_is(declared, tests)
    assert (judgement.verdict, judgement.as_declared) == (verdict, as_declared)
    assert note in "\n".join(judgement.notes)


@pytest.mark.parametrize(
    ("raises", "fits"),
    [
        ("AssertionError", True),
        ("builtins.AssertionError", True),
        ("Exception", True),
        ("other.AssertionError", False),
        ("Error", False),
        ("ValueError", False),
    ],
)
def test_type_by_any_name_of_its_lineage(raises: str, fits: bool) -> None:
    assert (mismatch(Signature(raises=raises, match="."), [FAIL]) is None) is fits


def test_exception_of_another_process() -> None:
    cause = Raised(type="builtins.ValueError", lineage=["builtins.ValueError", "builtins.Exception"], message="rank")
    outer = ExceptionRecord(type="w.WorldFailure", lineage=["w.WorldFailure"], message="outer", root_cause=cause)
    test = record("failed").model_copy(update={"exception": outer})
    assert mismatch(Signature(raises="ValueError", match="^rank$"), [test]) is None
    assert mismatch(Signature(raises="WorldFailure", match="^outer$"), [test]) is None
    # the type of one and the message of the other make no signature
    assert mismatch(Signature(raises="ValueError", match="outer"), [test]) is not None


@pytest.mark.parametrize(
    ("kind", "message", "line"),
    [
        ("builtins.AssertionError", "half\nassert 0.5 == 1.0", "AssertionError: half"),
        ("t.CheckpointException", "ranks [0]\ntrace\nKeyError: x\n", "CheckpointException: ranks [0] … KeyError: x"),
        ("builtins.ValueError", "one line", "ValueError: one line"),
        ("builtins.ValueError", "", "ValueError: "),
    ],
)
def test_headline(kind: str, message: str, line: str) -> None:
    assert headline(record("failed", message, kind)) == line


def test_headline_names_the_cause_in_another_process() -> None:
    cause = Raised(type="builtins.ValueError", lineage=["builtins.ValueError"], message="several\nlines")
    outer = ExceptionRecord(type="w.Failure", lineage=["w.Failure"], message="rank 1\nof 2\nlogs", root_cause=cause)
    test = record("failed").model_copy(update={"exception": outer})
    assert headline(test) == "Failure: rank 1 … lines"


@pytest.mark.parametrize(
    ("value", "fits"), [(0.1, True), (0.25, True), (0.4, True), (0.05, False), (0.5, False), (math.nan, False)]
)
def test_measured_within_bounds(value: float, fits: bool) -> None:
    signature = Signature(measured="error", min=0.1, max=0.4)
    assert (mismatch(signature, [record("failed", error=value)]) is None) is fits


def test_measured_must_be_there() -> None:
    problem = mismatch(Signature(measured="error", min=0.1), [FAIL, record("passed", error=0.2)])
    assert problem is not None
    assert "no failing test measured error" in problem


def test_every_part_must_hold() -> None:
    signature = Signature(raises="AssertionError", match="half", measured="error", max=1.0)
    assert mismatch(signature, [record("failed", error=0.5)]) is None
    assert mismatch(signature, [record("failed", "whole", error=0.5)]) is not None
    assert mismatch(signature, [record("failed", error=1.5)]) is not None


def test_every_failing_test_must_bear_it() -> None:
    problem = mismatch(SIGNATURE, [FAIL, OTHER])
    assert problem is not None
    assert "ImportError" in problem

# SPDX-License-Identifier: Apache-2.0
"""From what the sides did to a verdict: pure functions, no input or output.

============================== ========= ============================
stock                          patched   verdict
============================== ========= ============================
red with the declared signature green    fixed
green                          green     guard
red with the declared signature the same open
green                          red       regression: the run fails
anything else                  any       broken: the run fails
============================== ========= ============================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ci.regress.manifest import Contract, Expectation, Signature
from ci.regress.records import Outcome, Raised, TestRecord


class Verdict(StrEnum):
    """What a contract shows."""

    FIXED = "fixed"
    GUARD = "guard"
    OPEN = "open"
    REGRESSION = "regression"
    BROKEN = "broken"
    NOT_RUN = "not run"


class State(StrEnum):
    """What a contract's tests did on one side, taken together."""

    GREEN = "green"
    RED = "red"
    MIXED = "mixed"
    ERROR = "error"
    SKIPPED = "skipped"
    NOT_RUN = "not run"
    ABSENT = "absent"


@dataclass(frozen=True)
class Declared:
    """What series.toml says about a contract."""

    contract: Contract
    expectation: Expectation
    cured_by: tuple[str, ...] = ()


@dataclass
class Judgement:
    """A verdict, whether it is what series.toml leads to expect, and why."""

    verdict: Verdict
    as_declared: bool
    notes: list[str] = field(default_factory=list)


def state_of(tests: Sequence[TestRecord]) -> State:
    """Take a contract's tests on one side together; tests that cannot apply there do not count."""
    outcomes = {test.outcome for test in tests}
    if not outcomes:
        return State.ABSENT
    outcomes.discard(Outcome.NOT_RUN)
    if not outcomes:
        return State.NOT_RUN
    if Outcome.ERROR in outcomes:
        return State.ERROR
    if Outcome.SKIPPED in outcomes:
        return State.SKIPPED
    if outcomes == {Outcome.PASSED}:
        return State.GREEN
    return State.RED if outcomes == {Outcome.FAILED} else State.MIXED


def mismatch(signature: Signature, tests: Sequence[TestRecord]) -> str | None:
    """Say how the failing tests differ from a signature; None if they bear it.

    Each failing test must raise as declared.  Of the measured number at least one failing test must have a record,
    and each record must lie within the bounds.
    """
    failing = [test for test in tests if test.outcome in (Outcome.FAILED, Outcome.ERROR)]
    for test in failing:
        if test.outcome is Outcome.ERROR:
            return f"{_name(test)} ended in {test.phase} with {_first_line(test)}"
        if signature.raises is not None and not _raised(signature, test):
            return f"{_name(test)} raised {_first_line(test)}; declared: {signature.describe()}"
    if signature.measured is None:
        return None
    values = [test.measured[signature.measured] for test in failing if signature.measured in test.measured]
    if not values:
        return f"no failing test measured {signature.measured}; declared: {signature.describe()}"
    for value in values:
        low = signature.min is None or value >= signature.min
        high = signature.max is None or value <= signature.max
        if not (low and high):  # so written, not-a-number is outside
            return f"measured {signature.measured} = {value:g}; declared: {signature.describe()}"
    return None


def judge(
    declared: Declared | None,
    stock: Sequence[TestRecord],
    patched: Sequence[TestRecord],
    shim: Sequence[TestRecord] | None = None,
    fork: bool = False,
) -> Judgement:
    """Judge a contract by both sides.

    Args:
        declared: what series.toml says, or None for a contract that it does not name.
        stock: the contract's tests on the tree as it is.
        patched: the same after the series.
        shim: the same on stock with the shim installed, if that side ran.
        fork: the tree is no pinned release, and may hold a cure of its own.
    """
    if declared is None:
        return Judgement(Verdict.BROKEN, False, ["undeclared: add it to `contracts` in series.toml"])
    judgement = _judge_pair(declared, stock, patched)
    if judgement.verdict in (Verdict.FIXED, Verdict.GUARD, Verdict.OPEN):
        _compare(judgement, declared, fork)
    if shim is not None:
        _judge_shim(judgement, declared, shim)
    return judgement


def judge_as_is(declared: Declared | None, tests: Sequence[TestRecord]) -> Judgement:
    """Judge a contract by a fork's tree as it stands: a declared defect that is in it is open, and no failure."""
    if declared is None:
        return Judgement(Verdict.BROKEN, False, ["undeclared: add it to `contracts` in series.toml"])
    state = state_of(tests)
    if state is State.GREEN:
        notes = [] if declared.contract.stock == "green" else ["the defect is not in this tree"]
        return Judgement(Verdict.GUARD, True, notes)
    if state is State.NOT_RUN:
        return Judgement(Verdict.NOT_RUN, True, [_why_not_run(tests)])
    if state is State.RED:
        problem = _off_signature(declared, tests)
        if problem is None:
            return Judgement(Verdict.OPEN, True, ["the defect is in this tree"])
        return Judgement(Verdict.BROKEN, False, [problem])
    return Judgement(Verdict.BROKEN, False, [_say(state, "this tree", tests)])


def _judge_pair(declared: Declared, stock: Sequence[TestRecord], patched: Sequence[TestRecord]) -> Judgement:
    before, after = state_of(stock), state_of(patched)
    for state, side, tests in ((before, "stock", stock), (after, "patched", patched)):
        if state in (State.SKIPPED, State.ABSENT):
            return Judgement(Verdict.BROKEN, False, [_say(state, side, tests)])
    if before in (State.MIXED, State.ERROR):
        return Judgement(Verdict.BROKEN, False, [_say(before, "stock", stock)])
    if before is State.NOT_RUN and after is State.NOT_RUN:
        return Judgement(Verdict.NOT_RUN, True, [_why_not_run(stock)])
    if State.NOT_RUN in (before, after):
        side, tests = ("stock", stock) if before is State.NOT_RUN else ("patched", patched)
        return Judgement(Verdict.NOT_RUN, False, [f"not run on {side}, so nothing is shown: {_why_not_run(tests)}"])
    if before is State.GREEN:
        if after is State.GREEN:
            return Judgement(Verdict.GUARD, True)
        return Judgement(Verdict.REGRESSION, False, [_say(after, "patched", patched)])
    problem = _off_signature(declared, stock)
    if problem is not None:
        return Judgement(Verdict.BROKEN, False, [f"stock: {problem}"])
    if after is State.GREEN:
        return Judgement(Verdict.FIXED, True)
    if after is not State.RED:
        return Judgement(Verdict.BROKEN, False, [_say(after, "patched", patched)])
    problem = _off_signature(declared, patched)
    if problem is not None:
        return Judgement(Verdict.BROKEN, False, [f"patched fails in another way than stock: {problem}"])
    return Judgement(Verdict.OPEN, True)


def _compare(judgement: Judgement, declared: Declared, fork: bool) -> None:
    """Hold a verdict against the expectation."""
    if judgement.verdict.value == declared.expectation.value:
        return
    judgement.as_declared = False
    cures = ", ".join(declared.cured_by)
    if judgement.verdict is Verdict.GUARD:
        # A fork may have a cure of its own: worth saying, no reason to fail.
        judgement.as_declared = fork
        note = f"green without the series: {cures} can go" if cures else "declared red, yet green on stock"
    elif judgement.verdict is Verdict.FIXED:
        note = "cured, yet no patch names it in `cures`"
    else:
        note = f"{cures} claims to cure it" if cures else "declared green on stock"
    judgement.notes.append(note)


def _judge_shim(judgement: Judgement, declared: Declared, shim: Sequence[TestRecord]) -> None:
    state = state_of(shim)
    if declared.expectation is Expectation.OPEN:
        if state is State.RED:
            problem = _off_signature(declared, shim)
            if problem is None:
                return
            judgement.notes.append(f"shim: {problem}")
        else:
            judgement.notes.append(_say(state, "shim", shim))
        judgement.as_declared = False
    elif state is State.NOT_RUN and judgement.verdict is Verdict.NOT_RUN:
        return
    elif state is not State.GREEN:
        judgement.notes.append(_say(state, "shim", shim))
        judgement.as_declared = False


def _off_signature(declared: Declared, tests: Sequence[TestRecord]) -> str | None:
    signature = declared.contract.signature
    if signature is None:
        return f"declared green, but red: {_first_line(_first(tests, Outcome.FAILED))}"
    return mismatch(signature, tests)


def _raised(signature: Signature, test: TestRecord) -> bool:
    if test.exception is None:
        return False
    candidates: list[Raised] = [test.exception]
    if test.exception.root_cause is not None:
        candidates.append(test.exception.root_cause)
    return any(_fits(signature, one) for one in candidates)


def _fits(signature: Signature, raised: Raised) -> bool:
    names = {*raised.lineage, *(name.rpartition(".")[2] for name in raised.lineage)}
    if signature.raises not in names:
        return False
    return signature.match is None or re.search(signature.match, raised.message) is not None


def _say(state: State, side: str, tests: Sequence[TestRecord]) -> str:
    if state is State.ABSENT:
        return f"{side}: no test of it was collected"
    if state is State.SKIPPED:
        return f"{side}: {_name(_first(tests, Outcome.SKIPPED))} was skipped; a contract says yes or no"
    if state is State.ERROR:
        test = _first(tests, Outcome.ERROR)
        return f"{side}: error in {test.phase} of {_name(test)}: {_first_line(test)}"
    if state is State.MIXED:
        failed = [test for test in tests if test.outcome is Outcome.FAILED]
        return f"{side}: {len(failed)} of {len(tests)} tests red, the others green: {_first_line(failed[0])}"
    if state is State.NOT_RUN:
        return f"{side}: not run: {_why_not_run(tests)}"
    if state is State.RED:
        return f"{side}: {_first_line(_first(tests, Outcome.FAILED))}"
    return f"{side}: green"


def _why_not_run(tests: Sequence[TestRecord]) -> str:
    return _first_line(_first(tests, Outcome.NOT_RUN), with_type=False)


def _first(tests: Sequence[TestRecord], outcome: Outcome) -> TestRecord:
    return next(test for test in tests if test.outcome is outcome)


def _name(test: TestRecord) -> str:
    return test.nodeid.rpartition("::")[2] or test.nodeid


def _first_line(test: TestRecord, with_type: bool = True) -> str:
    return headline(test, with_type) or "no message"


def headline(test: TestRecord, with_type: bool = True) -> str:
    """Return the exception of a test in one line.

    An assertion says the essential first.  Many other exceptions name their cause last (a nested traceback), so the
    last line of theirs is shown too.
    """
    if test.exception is None:
        return test.text.strip().split("\n", 1)[0]
    line = test.exception.message.strip().split("\n", 1)[0]
    inner = test.exception.root_cause or test.exception
    if "builtins.AssertionError" not in inner.lineage:
        last = inner.message.strip().rpartition("\n")[2].strip()
        if last and last not in line:
            line += f" … {last}"
    return f"{test.exception.type.rpartition('.')[2]}: {line}" if with_type else line

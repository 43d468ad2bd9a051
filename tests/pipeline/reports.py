# SPDX-License-Identifier: Apache-2.0
"""Reports made by hand, with every verdict and with text that must not become markup."""

from __future__ import annotations

from datetime import UTC, datetime

from ci.regress import PATCHES, manifest, page
from ci.regress.records import ExceptionRecord, Outcome, SideRecord, TestRecord
from ci.regress.report import ContractRecord, PatchRecord, Report, Source, contract_side
from ci.regress.verdict import Verdict, state_of

NAME, TARGET = manifest.load(PATCHES).select(None)
HOSTILE = "</pre><script>document.title='gone'</script><img src=x onerror=alert(1)> & \"'{{ 7*7 }}\x00\x1b[31m"
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ROWS = {
    # contract: (verdict, stock, patched, notes)
    "gather.gate-gradient": (Verdict.FIXED, Outcome.FAILED, Outcome.PASSED, []),
    "gather.expert-gradient": (Verdict.GUARD, Outcome.PASSED, Outcome.PASSED, []),
    "gather.expert-bias": (Verdict.OPEN, Outcome.FAILED, Outcome.FAILED, []),
    "smoke.resume": (Verdict.FIXED, Outcome.FAILED, Outcome.PASSED, []),
    "sparse.dense-format": (Verdict.REGRESSION, Outcome.PASSED, Outcome.FAILED, [f"patched: {HOSTILE}"]),
    "sparse.half-an-entry": (Verdict.BROKEN, Outcome.ERROR, Outcome.PASSED, ["stock: error in setup"]),
    "failure.unpicklable": (Verdict.NOT_RUN, Outcome.NOT_RUN, Outcome.NOT_RUN, []),
    f"tests/test_{HOSTILE}.py": (Verdict.BROKEN, Outcome.ERROR, Outcome.ERROR, ["undeclared"]),
}


def a_test(contract: str, outcome: Outcome) -> TestRecord:
    """Return a test of a contract; what is not green says something hostile."""
    bad = outcome is not Outcome.PASSED
    message = f"no gradient on ranks [0, 1] {HOSTILE} " + "a_long_name_without_a_place_to_break" * 8
    return TestRecord(
        nodeid=f"tests/contracts/test_it.py::test_{contract}",
        contract=contract,
        meaning=f"what {contract} says must hold",
        outcome=outcome,
        phase="call",
        exception=ExceptionRecord(type="AssertionError", lineage=["builtins.AssertionError"], message=message)
        if bad
        else None,
        measured={"relative_error": 0.2213, "loss_<b>": float("nan")} if bad else {},
        duration_s=1.25,
        text=f"def test_it():\n>   assert gradient\nE   {message}\n" * 6 if bad else "",
    )


def a_report(as_is: bool = False, passing: bool = False) -> Report:
    """Return a report of the default target.

    Args:
        as_is: of one tree as it stands, instead of stock and patched.
        passing: only with verdicts that let a run pass.
    """
    names = ("as-is",) if as_is else ("stock", "patched")
    rows, tests = [], {name: [] for name in names}
    for contract, (verdict, stock, patched, notes) in ROWS.items():
        if passing and notes:
            continue
        found = {name: [a_test(contract, outcome)] for name, outcome in zip(names, (stock, patched), strict=False)}
        for name, made in found.items():
            tests[name] += made
        rows.append(
            ContractRecord(
                id=contract,
                meaning=f"what {contract} says must hold",
                expectation=None,
                verdict=verdict,
                as_declared=not notes,
                ok=not notes,
                notes=notes,
                sides={name: contract_side(made, state_of(made)) for name, made in found.items()},
            )
        )
    return Report(
        target=NAME,
        source=Source(kind="wheel", location="a.whl", commit=TARGET.commit or "", describe=f"a.whl {HOSTILE}"),
        patches=[PatchRecord(file=patch.file, status=patch.status, outcome="applied") for patch in TARGET.patches],
        warnings=[] if passing else [f"take care {HOSTILE}"],
        contracts=rows,
        counts={verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict},
        tests_not_run=0,
        sides=[
            SideRecord(
                side=name, tree="tree", commit="c" * 40, python="3.11.7", torch="2.13.0", duration_s=20.5, tests=made
            )
            for name, made in tests.items()
        ],
        duration_s=41.2,
        exit_status=0 if passing else 1,
    )


def a_page(as_is: bool = False, passing: bool = False) -> str:
    """Return such a report's page, with the patches of the repository."""
    return page.render(a_report(as_is, passing), TARGET, PATCHES / TARGET.series, WHEN)

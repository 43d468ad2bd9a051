# SPDX-License-Identifier: Apache-2.0
"""Every verdict, reached by running the command; one run serves all tests of this file."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest

from ci.regress import REPOSITORY, report
from tests.pipeline.project import CONTRACT, GUARD, HALF, Project, Result

MARK = "import pytest\n@pytest.mark.contract({id!r}, meaning='{id} works')\n"
CONTRACTS = {
    # id: (declared, body of the test file, verdict, ok, words of the notes)
    "a.fixed": (
        '{ raises = "Broken", match = "first is 1", measured = "first", min = 0.5, max = 1.5 }',
        """
        from nemo_automodel.components.moe import experts
        class Broken(ValueError): pass
        {mark}def test(measure):
            measure("first", experts.first())
            measure("loss", float("nan"))
            if experts.first() == 1: raise Broken("the first is 1")
        """,
        ("fixed", True, ""),
    ),
    "b.guard": ('"green"', "{mark}def test(): pass\n", ("guard", True, "")),
    "c.open": (HALF, "{mark}def test(): assert False, 'gradient is 0.5'\n", ("open", True, "")),
    "d.regression": (
        '"green"',
        """
        from nemo_automodel.components.moe import experts
        {mark}def test(): assert experts.second() == 2
        """,
        ("regression", False, "patched: AssertionError: assert 22 == 2"),
    ),
    "e.import": (
        HALF,
        "from nemo_automodel.components.moe.experts import newer\n{mark}def test(): assert newer()\n",
        ("broken", False, "stock: error in import of test_e_import.py: ImportError: cannot import name 'newer'"),
    ),
    "f.setup": (
        HALF,
        """
        {mark}def test(thing): assert thing
        @pytest.fixture
        def thing(): raise RuntimeError("no thing")
        """,
        ("broken", False, "stock: error in setup of test: RuntimeError: no thing"),
    ),
    "g.skip": (HALF, "{mark}def test(): pytest.skip('not now')\n", ("broken", False, "was skipped")),
    "h.xfail": (
        HALF,
        "{mark}@pytest.mark.xfail\ndef test(): assert False, 'gradient is 0.5'\n",
        ("broken", False, "was skipped"),
    ),
    "i.mixed": (
        HALF,
        """
        {mark}@pytest.mark.parametrize("red", [False, True])
        def test(red): assert not red, "gradient is 0.5"
        """,
        ("broken", False, "stock: 1 of 2 tests red"),
    ),
    "j.precondition": (
        HALF,
        """
        from tests.contracts.outcomes import PreconditionError
        {mark}def test(): raise PreconditionError("gradient is 0.5")
        """,
        ("broken", False, "PreconditionError: gradient is 0.5; declared: AssertionError"),
    ),
    "k.not-run": (
        HALF,
        """
        from tests.contracts.outcomes import ContractNotApplicable
        {mark}def test(): raise ContractNotApplicable("needs eight GPUs")
        """,
        ("not run", True, "needs eight GPUs"),
    ),
    "l.claimed": (
        HALF,
        "{mark}def test(): assert False, 'gradient is 0.5'\n",
        ("open", False, "0001-cure.patch claims"),
    ),
    "m.needless": (HALF, "{mark}def test(): pass\n", ("guard", False, "0001-cure.patch can go")),
    "n.unclaimed": (
        '{ raises = "AssertionError", match = "assert 3 != 3" }',
        """
        from nemo_automodel.components.moe import experts
        {mark}def test(): assert experts.third() != 3
        """,
        ("fixed", False, "no patch names it"),
    ),
    "o.artifact": (
        '"green"',
        """
        {mark}def test(artifacts, contract_side):
            if contract_side == "stock": (artifacts / "left").write_text("by stock")
            else: assert (artifacts / "left").read_text() == "by stock"
        """,
        ("guard", True, ""),
    ),
    "p.undeclared": (None, "{mark}def test(): pass\n", ("broken", False, "undeclared")),
    "q.teardown": (
        '"green"',
        """
        {mark}def test(thing): pass
        @pytest.fixture
        def thing():
            yield
            raise RuntimeError("untidy")
        """,
        ("broken", False, "stock: error in teardown of test: RuntimeError: untidy"),
    ),
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Result:
    project = Project(tmp_path_factory.mktemp("everything"))
    for contract, (declared, text, _) in CONTRACTS.items():
        mark = MARK.format(id=contract)
        lines = [line.removeprefix("        ") for line in text.splitlines()]
        project.declare(contract, declared or "", "\n".join(lines).replace("{mark}", mark))
        if declared is None:
            del project.contracts[contract]
    project.add_patch("return 1\n", "return 11\n", ["a.fixed", "l.claimed", "m.needless"])
    project.add_patch("return 2\n", "return 22\n", [], "breaks")
    project.add_patch("return 3\n", "return 33\n", [], "more")
    return project.run()


@pytest.mark.parametrize("contract", CONTRACTS)
def test_verdict(everything: Result, contract: str) -> None:
    verdict, ok, note = CONTRACTS[contract][2]
    row = next(row for row in everything.report.contracts if row.id == contract)
    assert (row.verdict.value, row.ok) == (verdict, ok), row.notes
    assert note in "\n".join(row.notes)


def test_exit_status_and_table(everything: Result) -> None:
    assert everything.status == 1
    for contract in CONTRACTS:
        assert contract in everything.out
    assert "not as declared: d.regression, e.import" in everything.out
    assert "1 open" not in everything.out
    assert "2 open" in everything.out
    assert "2 tests not run" in everything.out
    assert "patched  a.fixed" in everything.out
    assert f"reports: {everything.reports}" in everything.out
    assert "which stands for commit 111111111" in everything.out


def test_report_json(everything: Result) -> None:
    found = everything.report
    assert found.exit_status == 1
    assert sum(found.counts.values()) == len(CONTRACTS) == len(found.contracts)
    assert [side.side for side in found.sides] == ["stock", "patched"]
    assert [patch.outcome for patch in found.patches] == ["applied"] * 3
    row = next(row for row in found.contracts if row.id == "a.fixed")
    assert row.meaning == "a.fixed works"
    assert row.sides["stock"].measured["first"] == [1.0]
    assert row.sides["patched"].measured["first"] == [11.0]
    assert [str(value) for value in row.sides["stock"].measured["loss"]] == ["nan"]
    test = next(test for test in found.sides[0].tests if test.contract == "a.fixed")
    assert test.exception is not None
    assert test.exception.type == "test_a_fixed.Broken"
    assert test.exception.lineage[1] == "builtins.ValueError"
    assert "Broken: the first is 1" in test.text
    assert found.sides[0].commit == "1" * 40
    assert len(found.sides[1].commit) == 40
    assert found.sides[0].package_file is not None
    assert found.sides[0].package_file.startswith(found.sides[0].tree)


def test_junit(everything: Result) -> None:
    suite = everything.junit()
    cases = suite.findall("testcase")
    bad = [name for name, (_, _, (_, ok, _)) in CONTRACTS.items() if not ok]
    assert suite.get("tests") == str(len(CONTRACTS)) == str(len(cases))
    assert suite.get("failures") == str(len(bad))
    assert suite.get("skipped") == "1"
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert sorted(map(str, failed)) == sorted(bad)
    assert [case.get("name") for case in cases if case.find("skipped") is not None] == ["k.not-run"]


def test_reports_of_the_sides(everything: Result) -> None:
    summary = (everything.reports / "summary.txt").read_text()
    assert "regression" in summary
    assert "\x1b" not in summary
    for side in ("stock", "patched"):
        log = (everything.reports / f"{side}.log").read_text()
        assert f"{side}: nemo_automodel from" in log
        assert "test_a_fixed.py::test" in log


def test_schema_is_current() -> None:
    script = [sys.executable, "-m", "ci.regress.report"]
    printed = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    kept = (REPOSITORY / "ci" / "regress" / "report.schema.json").read_text()
    assert kept == printed, "python -m ci.regress.report > ci/regress/report.schema.json"
    assert set(report.schema()["properties"]) == set(report.Report.model_fields)


def test_reports_bear_their_schema(everything: Result) -> None:
    written = json.loads((everything.reports / "report.json").read_text())
    jsonschema.validate(written, report.schema())
    # Not-a-number is no JSON: it is written as text, and read again as what it was.
    side = report.ContractSide.model_validate(written["contracts"][0]["sides"]["stock"])
    odd = side.model_copy(update={"measured": {"error": [float("nan"), float("inf"), 0.5]}})
    text = odd.model_dump_json(by_alias=True)
    jsonschema.validate(json.loads(text), report.ContractSide.model_json_schema(mode="serialization"))
    assert str(report.ContractSide.model_validate_json(text).measured) == str(odd.measured)
    written["unknown"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unknown"):
        jsonschema.validate(written, report.schema())


def test_all_as_declared(cured: Project) -> None:
    result = cured.run()
    assert result.status == 0, result.out + result.err
    assert result.verdict("gather.gradient") == "fixed"
    assert result.verdict("guard.fine") == "guard"
    assert "2 contracts: 1 fixed, 1 guard" in result.out
    assert "stock: AssertionError: gradient is 0.5" in result.out
    assert result.err == ""


def test_quiet_prints_only_the_table(cured: Project) -> None:
    result = cured.run("--quiet")
    assert result.status == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0].split() == ["contract", "stock", "patched", "verdict", "what", "it", "means"]
    assert len(lines) == 5


def test_two_contracts_may_share_a_file_and_two_files_a_contract(project: Project) -> None:
    project.cure()
    project.declare("guard.fine", '"green"')
    project.tests["test_both.py"] = CONTRACT + GUARD
    result = project.run()
    assert result.status == 0, result.out
    row = next(row for row in result.report.contracts if row.id == "gather.gradient")
    assert row.sides["stock"].tests == 2

# SPDX-License-Identifier: Apache-2.0
"""What the sessions that are run by hand rest on: the page of the grid, the faults, the benchmark's arithmetic."""

from __future__ import annotations

import os

import pytest

from ci import grid, mutants
from ci.bench.timing import Spread, in_a_child, measure, ratio
from ci.regress import REPOSITORY


def test_grid_page_is_what_a_run_makes() -> None:
    """A few rows are run again; sizes of drifts depend on the processor."""
    rows = ["adamw", "int8-with-scale", "cyclic", "half an entry"]
    committed = grid.kinds(grid.PAGE.read_text(encoding="utf-8")).splitlines()
    again = grid.kinds(grid.page(grid.run(rows), "any")).splitlines()
    found = [line for line in again if line.startswith(tuple(f"| {row} |" for row in rows)) and line.count("|") > 3]
    assert len(found) == len(rows)
    assert [line for line in found if line not in committed] == []


def test_grid_page_has_every_row() -> None:
    from tests.support.optimizers import OPTIMIZERS, OTHERS
    from tests.support.scenario import SCHEDULERS

    lines = grid.PAGE.read_text(encoding="utf-8").splitlines()
    for row in (*OPTIMIZERS, *OTHERS, *SCHEDULERS, *grid.DAMAGES):
        assert any(line.startswith(f"| {row} |") for line in lines), row


def test_faults_are_in_the_loader() -> None:
    assert len(mutants.MUTANTS) >= 12
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    assert mutants.check_texts(mutants.MUTANTS) == []
    for mutant in mutants.MUTANTS:
        path, *_, test = mutant.test.split("::")
        assert f"def {test.partition('[')[0]}(" in (REPOSITORY / path).read_text(encoding="utf-8"), mutant.name


def test_a_fault_whose_text_is_gone_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    gone = mutants.Mutant("gone", "no such text", "", mutants.TESTS + "test_x")
    monkeypatch.setattr(mutants, "MUTANTS", [gone])
    assert mutants.main([]) == 2
    assert "gone: its text is 0 times" in capsys.readouterr().err


def test_a_measurement_in_a_child_answers_or_says_why_not() -> None:
    assert in_a_child(lambda: {"mib": 2.5, "process": os.getpid()})["process"] != os.getpid()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_a_child(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="ended with status 768"):  # 3, as waitpid has it
        in_a_child(lambda: os._exit(3))


def test_arithmetic_of_the_benchmarks() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert ratio([1.0, 4.0], [2.0, 2.0]) == Spread(1.25, 0.5, 2.0, 2)
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


def test_extra_memory_is_the_peak_and_not_what_is_left() -> None:
    found = measure(lambda: len(bytearray(64 * 2**20)))
    assert 60 * 2**20 <= found["extra"] <= 100 * 2**20
    assert found["seconds"] > 0

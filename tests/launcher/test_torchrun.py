# SPDX-License-Identifier: Apache-2.0
"""Rank bodies, unchanged, in the processes that torchrun launches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

TESTS = """
import pytest

from tests.contracts.outcomes import ContractNotApplicable
from tests.launcher import bodies
from tests.support.world import WorldFailure, run_world


@pytest.mark.contract("a.b", meaning="c")
def test_results_are_everywhere(tmp_path, measure, artifacts, contract_side):
    total = sum(2.0 * (rank + 4) for rank in range(2))
    for _ in range(2):
        assert run_world(bodies.summed, 2, tmp_path, args=(1, 2), kwargs={"factor": 2.0}) == [
            (rank, 2, total) for rank in range(2)
        ]
    measure("total", total)
    assert contract_side == "as-is"


def test_context_is_the_launchs(tmp_path):
    facts = run_world(bodies.facts, 2, tmp_path)
    assert len({here["pid"] for here in facts}) == 2
    assert [here["context"].rank for here in facts] == [0, 1]
    assert [here["backend"] for here in facts] == ["gloo", "gloo"]
    assert len({here["context"].directory for here in facts}) == 1


def test_failure_is_everywhere_and_the_next_world_is_sound(tmp_path):
    with pytest.raises(WorldFailure) as failure:
        run_world(bodies.collective_with_failure, 2, tmp_path, args=(1, "raise"), pg_timeout=3)
    assert failure.value.root_cause.rank == 1
    assert failure.value.root_cause.exc_type == "builtins.ValueError"
    outcomes = run_world(bodies.wait_for_early_leaver, 2, tmp_path, pg_timeout=2, check=False)
    assert [outcome.kind for outcome in outcomes] == ["ok", "raised"]
    outcomes = run_world(bodies.return_lambda, 2, tmp_path, check=False)
    assert [outcome.kind for outcome in outcomes] == ["ok", "unpicklable"]
    assert [value[0] for value in run_world(bodies.summed, 2, tmp_path)] == [0, 1]


def test_other_size(tmp_path):
    run_world(bodies.summed, 4, tmp_path)


def test_not_applicable():
    raise ContractNotApplicable("no such machine")


def test_red():
    assert RED is False
"""


def launch(directory: Path, *arguments: str, ranks: int | None = 2) -> subprocess.CompletedProcess[str]:
    """Run pytest, as two ranks of torchrun unless ``ranks`` is None."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--local-ranks-filter",
        "0",
    ]
    pytest = ["-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-o", "addopts=", "-q", "-rs"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [
            sys.executable,
            *([*torchrun, "--nproc-per-node", str(ranks)] if ranks else []),
            *pytest,
            str(directory),
            *arguments,
        ],
        cwd=REPOSITORY,
        env=environment | {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


def test_bodies_run_unchanged_and_what_cannot_run_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_launched.py").write_text(TESTS.replace("RED", "False"))
    done = launch(tmp_path, "--torchrun=gloo")
    assert done.returncode == 0, done.stdout
    assert "4 passed, 2 skipped" in done.stdout
    assert "not run, and not passed: 2 tests" in done.stdout
    assert "needs a world of 4 ranks; torchrun has launched 2" in done.stdout


def test_failures_and_empty_runs_fail_the_launch(tmp_path: Path) -> None:
    (tmp_path / "test_launched.py").write_text(TESTS.replace("RED", "True"))
    red = launch(tmp_path, "--torchrun=gloo", "-k", "red or size", ranks=1)
    assert red.returncode != 0
    assert "1 failed" in red.stdout
    empty = launch(tmp_path, "--torchrun=gloo", "-k", "size", ranks=1)
    assert empty.returncode != 0
    assert "exitcode  : 5" in empty.stdout


def test_a_rank_that_fails_first_leaves_the_others_time_to_tell(tmp_path: Path) -> None:
    """Rank 0 is slow to its summary, and torchrun kills it as soon as another rank has failed."""
    (tmp_path / "test_launched.py").write_text(
        "import os, time, pytest\n"
        "@pytest.fixture\n"
        "def slow():\n"
        "    yield\n"
        "    time.sleep(0 if int(os.environ['RANK']) else 4)\n"
        "def test_red(slow):\n"
        "    assert not 'the reason'\n"
    )
    done = launch(tmp_path, "--torchrun=gloo")
    assert done.returncode != 0
    assert "assert not 'the reason'" in done.stdout
    assert "1 failed" in done.stdout


def test_torchrun_is_needed(tmp_path: Path) -> None:
    (tmp_path / "test_launched.py").write_text(TESTS)
    done = launch(tmp_path, "--torchrun=gloo", ranks=None)
    assert done.returncode == 4
    assert "--torchrun needs torchrun around pytest: RANK is not set" in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""The command line, and pytest runs that must leave the contracts alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.regress import REPOSITORY, cli
from tests.pipeline.project import CONTRACT, Project


def call(capsys: pytest.CaptureFixture[str], project: Project, *arguments: str) -> tuple[int, str]:
    """Run the command in this process, for what ends before anything starts."""
    project.write()
    try:
        status = cli.main(project.command(*arguments)[3:])
    except SystemExit as exc:  # argparse
        status = int(exc.code or 0)
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "fake/v8"], "--target fake/v8: not in series.toml; known: fake/v9"),
        (["--git", "a", "--tree", "b"], "--git and --tree exclude each other"),
        (["--apply"], "--apply needs --tree PATH"),
        (["--require-green"], "--require-green needs --tree PATH"),
        (["--tree", "x", "--apply", "--require-green"], "leave out --apply"),
        (["--tree", "x", "--with-shim"], "--with-shim with --tree needs --apply"),
        (["--with-shim"], "this target has no `shim` in series.toml"),
        (["--only", "no.such"], "--only no.such: not declared in series.toml; known: gather.gradient"),
        (["--timeout", "0"], "argument --timeout: a number of seconds above 0 is needed, not '0'"),
        (["--timeout", "soon"], "argument --timeout: a number of seconds above 0 is needed, not 'soon'"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--report-dir", "/dev/null/reports"], "--report-dir /dev/null/reports: "),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], project: Project, arguments: list[str], said: str) -> None:
    status, out = call(capsys, project, *arguments)
    assert status == 2
    assert said in out


def test_unknown_key_of_series_toml(capsys: pytest.CaptureFixture[str], project: Project) -> None:
    project.extra = 'tags = "v9"'
    status, out = call(capsys, project)
    assert status == 2
    assert 'patches/series.toml: targets."fake/v9".tags: unknown key' in out


def test_environment_lacks_a_package(capsys: pytest.CaptureFixture[str], project: Project) -> None:
    project.extra = 'imports = ["json", "no_such_module", "no_such.package"]'
    status, out = call(capsys, project)
    assert status == 2
    assert "environment lacks no_such_module, no_such.package" in out
    assert "`nox -s regress -- --target fake/v9` makes an environment" in out


def test_list(capsys: pytest.CaptureFixture[str], cured: Project) -> None:
    (cured.series / "0001-cure.patch").unlink()
    status, out = call(capsys, cured, "--list")
    assert status == 0
    for words in (
        "fake/v9 (default): https://example.invalid/fake v9",
        "0001-cure.patch (not there)",
        "proposed",
        "it is wrong",
        "AssertionError matching 'gradient is 0\\\\.5'",
        "guard.fine",
    ):
        assert words in out
    assert not (cured.root / "reports").exists()


def test_help_names_the_exit_statuses(capsys: pytest.CaptureFixture[str], project: Project) -> None:
    status, out = call(capsys, project, "--help")
    assert status == 0
    for words in ("exit status:", "  0  every contract", "  1  some verdict", "  2  the run could not", "--with-shim"):
        assert words in out
    assert "--wheel-cache" in out
    assert "--contracts" not in out


def test_old_reports_are_removed_before_a_run_that_fails(cured: Project) -> None:
    assert cured.run().status == 0
    assert (cured.root / "reports" / "report.json").exists()
    cured.sha256 = "0" * 64
    assert cured.run().status == 2
    assert [path.name for path in (cured.root / "reports").iterdir()] == []


def pytest_run(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Run pytest as somebody would by hand."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=120)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one contract beside one ordinary test."""
    for name in ("pyproject.toml", "tests/__init__.py", "tests/contracts/__init__.py", "tests/contracts/conftest.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((REPOSITORY / name).read_text())
    (tmp_path / "tests" / "contracts" / "test_gather.py").write_text(CONTRACT)
    (tmp_path / "tests" / "test_ordinary.py").write_text("def test_ordinary(): pass\n")
    return tmp_path


@pytest.mark.parametrize("arguments", [["tests"], []])
def test_contracts_are_no_part_of_an_ordinary_run(checkout: Path, arguments: list[str]) -> None:
    done = pytest_run("-q", *arguments, cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize(
    "argument", ["tests/contracts", "tests/contracts/test_gather.py", "tests/contracts/test_gather.py::test_gradient"]
)
def test_contracts_cannot_run_by_themselves(checkout: Path, argument: str) -> None:
    done = pytest_run(argument, cwd=checkout)
    assert done.returncode == 4, done.stdout
    assert "tests/contracts cannot run by itself" in done.stderr
    assert "use `nox -s regress`" in done.stderr


def test_plugin_without_its_options() -> None:
    done = pytest_run("-p", "ci.regress.plugin", "--collect-only", "tests/pipeline/test_verdict.py")
    assert done.returncode == 4
    assert "ci.regress.plugin is for `python -m ci.regress`; missing: --regress-side" in done.stderr


def test_environment_lacks_what_the_pipeline_itself_needs() -> None:
    # without site-packages, as a bare interpreter is
    done = subprocess.run([sys.executable, "-S", "-m", "ci.regress"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: environment lacks jinja2, pydantic, pytest, rich" in done.stderr
    assert "`nox -s regress`" in done.stderr


def test_reader_that_goes_away_is_no_verdict(cured: Project) -> None:
    """``… | head -1``: the pipe breaks while the run still prints."""
    cured.write()
    cured.fill_cache()
    with subprocess.Popen(
        cured.command(),
        cwd=REPOSITORY,
        env=cured.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(timeout=60) == 141

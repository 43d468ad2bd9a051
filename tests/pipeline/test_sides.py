# SPDX-License-Identifier: Apache-2.0
"""Sides that die, hang or are interrupted; what they collect; and what they import."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ci.regress import REPOSITORY, cli, sides
from tests.pipeline.project import CONTRACT, GUARD, HALF, MODULE, Project

# A contract that starts two processes, one of them in a session of its own, and then hangs.
HANGING = """
import os, subprocess, sys, time
import pytest

@pytest.mark.contract("gather.gradient", meaning="it hangs")
def test_hang():
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    inside = subprocess.Popen(sleep)
    outside = subprocess.Popen(sleep, start_new_session=True)
    path = os.environ["PIDS"]
    with open(path + ".part", "w") as stream:
        stream.write(f"{os.getpid()} {inside.pid} {outside.pid}")
    os.rename(path + ".part", path)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_for(condition: object, seconds: float = 20.0) -> None:
    """Wait until a condition holds, and fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def hanging(project: Project) -> Path:
    """Make the contract hang, and return the file in which it leaves the ids of its processes."""
    project.tests = {"test_gather_gradient.py": HANGING, "test_guard_fine.py": GUARD}
    project.declare("guard.fine", '"green"')
    return project.root / "pids"


def test_time_out_leaves_nothing_running(project: Project) -> None:
    pids = hanging(project)
    result = project.run("--timeout", "2", PIDS=str(pids))
    assert result.status == 1
    assert len(pids.read_text().split()) == 3
    assert [pid for pid in pids.read_text().split() if alive(int(pid))] == []
    assert result.verdict("gather.gradient") == "broken"
    assert "timed out: the side had 2 s (--timeout), while test_gather_gradient.py::test_hang ran" in result.notes(
        "gather.gradient"
    )
    assert "not reached: timed out" in result.notes("guard.fine")
    assert "stock: timed out" in "\n".join(result.report.warnings)


@pytest.mark.parametrize(
    ("signals", "status"),
    [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGHUP], 129), ([signal.SIGINT, signal.SIGINT], 130)],
    ids=["interrupt", "terminate", "hang-up", "interrupt-twice"],
)
def test_interrupt_leaves_nothing_behind(project: Project, signals: list[signal.Signals], status: int) -> None:
    pids = hanging(project)
    project.write()
    project.fill_cache()
    process = subprocess.Popen(
        project.command(),
        cwd=REPOSITORY,
        env=project.environment(PIDS=str(pids)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(pids.exists)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == status, out
    assert [pid for pid in pids.read_text().split() if alive(int(pid))] == []
    assert os.listdir(project.root / "tmp") == []
    assert out.splitlines()[-1] == ("interrupted" if status == 130 else "terminated")


def test_side_does_not_outlive_a_runner_that_is_killed(project: Project) -> None:
    pids = hanging(project)
    project.write()
    project.fill_cache()
    environment = project.environment(PIDS=str(pids))
    process = subprocess.Popen(
        project.command(), cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(pids.exists)
    process.kill()
    process.wait()
    side, inside, outside = (int(pid) for pid in pids.read_text().split())
    try:
        wait_for(lambda: not alive(side) and not alive(inside))
    finally:
        os.kill(outside, signal.SIGKILL)  # a session of its own: only a living runner finds it


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os.kill(os.getpid(), 9)", "the side's process was killed by SIGKILL (out of memory?), while "),
        ("os.kill(os.getpid(), 11)", "the side's process was killed by SIGSEGV, while "),
        ("os._exit(7)", "the side's process ended with exit status 7 before pytest was done, while "),
        ("pytest.exit('enough', returncode=5)", "pytest ended with exit status 5 before every test had run"),
    ],
)
def test_side_that_dies(project: Project, body: str, said: str) -> None:
    project.declare("guard.fine", '"green"', GUARD)
    text = CONTRACT.replace("import pytest", "import os, pytest").replace("    assert", f"    {body}\n    assert")
    project.tests["test_gather_gradient.py"] = text
    result = project.run()
    assert result.status == 1
    assert result.verdict("gather.gradient") == "broken"
    assert said in result.notes("gather.gradient")
    assert result.verdict("guard.fine") == "broken"
    assert "not reached: " in result.notes("guard.fine")
    assert result.report.sides[0].died is not None


def test_process_of_a_contract_that_dies(project: Project) -> None:
    project.tests["test_gather_gradient.py"] = """
        import pytest, subprocess, sys
        @pytest.mark.contract("gather.gradient", meaning="a rank dies")
        def test_rank():
            script = "import os; os.kill(os.getpid(), 9)"
            subprocess.run([sys.executable, "-c", script], check=True)
    """
    result = project.run()
    assert result.status == 1
    assert result.verdict("gather.gradient") == "broken"
    assert "died with <Signals.SIGKILL: 9>" in result.notes("gather.gradient")


def test_what_a_finished_side_leaves_running_is_ended(project: Project) -> None:
    pids = project.root / "pids"
    project.tests["test_gather_gradient.py"] = (
        CONTRACT
        + """
def test_stray():
    import os, subprocess, sys
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(os.environ["PIDS"], "a") as stream:
        print(child.pid, file=stream)
    raise AssertionError("gradient is 0.5")

pytestmark = pytest.mark.contract("gather.gradient", meaning="it leaves a process behind")
"""
    )
    result = project.run(PIDS=str(pids))
    assert result.status == 0, result.out
    assert len(pids.read_text().split()) == 2
    assert [pid for pid in pids.read_text().split() if alive(int(pid))] == []


def test_side_that_dies_before_collection(project: Project) -> None:
    project.tests["test_gather_gradient.py"] = "import os\nos._exit(3)\n"
    result = project.run()
    assert result.status == 2
    assert "side stock: the side's process ended with exit status 3" in result.err
    assert "stock.log" in result.err


def test_file_that_collects_nothing(project: Project) -> None:
    project.tests["test_more.py"] = "def tset_it(): pass\n"
    result = project.run()
    assert result.status == 2
    assert "contract files that collect nothing: test_more.py" in result.err


def test_declared_contract_without_a_test(project: Project) -> None:
    project.declare("gather.other", HALF)
    result = project.run()
    assert result.status == 2
    assert "declared in series.toml, but no test carries the mark: gather.other" in result.err


def test_no_contract_at_all(project: Project) -> None:
    project.tests, project.contracts = {}, {}
    result = project.run()
    assert result.status == 2
    assert "no contract was collected at all" in result.err


@pytest.mark.parametrize("mark", ["", "@pytest.mark.contract()", "@pytest.mark.contract('gather.gradient')"])
def test_test_without_a_whole_mark(project: Project, mark: str) -> None:
    project.tests["test_more.py"] = f"import pytest\n{mark}\ndef test_it(): pass\n"
    result = project.run()
    assert result.status == 2
    assert 'test_more.py::test_it: needs @pytest.mark.contract("area.name", meaning="one line")' in result.err


def test_file_that_cannot_be_imported_and_names_no_contract(project: Project) -> None:
    project.tests["test_more.py"] = "import no_such_module\n"
    result = project.run()
    assert result.status == 1
    assert result.verdict("test_more.py") == "broken"
    assert result.verdict("gather.gradient") == "open"


def test_only(cured: Project) -> None:
    result = cured.run("--only", "guard.fine")
    assert result.status == 0, result.out
    assert [row.id for row in result.report.contracts] == ["guard.fine"]
    assert [len(side.tests) for side in result.report.sides] == [1, 1]


def test_environment_of_a_side(project: Project) -> None:
    project.tests["test_gather_gradient.py"] = """
        import os, sys
        from pathlib import Path
        import pytest, tests
        @pytest.mark.contract("gather.gradient", meaning="what a side sees")
        def test_it(contract_side, artifacts, tmp_path):
            tree = Path(os.environ["CONTRACT_TREE"])
            import nemo_automodel
            assert Path(nemo_automodel.__file__).resolve().is_relative_to(tree)
            assert (tree / ".git").exists() and not Path.cwd().is_relative_to(tree)
            assert Path(tests.__file__).parents[1] == Path(os.environ["REPOSITORY"])
            assert artifacts.is_dir() and tree.parent in tmp_path.parents
            names = "PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS TORCHDYNAMO_DISABLE HF_HUB_OFFLINE".split()
            assert [os.environ[name] for name in names] == ["1"] * 4
            assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
            assert "PYTEST_ADDOPTS" not in os.environ and "AUTOMODEL_SHIM_INSTALL" not in os.environ
            raise AssertionError("gradient is 0.5 on " + contract_side)
    """
    result = project.run(PYTEST_ADDOPTS="--maxfail=0 --no-such-option", REPOSITORY=str(REPOSITORY))
    assert result.status == 0, result.out + result.err
    row = result.report.contracts[0]
    assert row.sides["stock"].headline == "AssertionError: gradient is 0.5 on stock"
    assert row.sides["patched"].headline == "AssertionError: gradient is 0.5 on patched"


def test_package_from_elsewhere_is_refused(cured: Project) -> None:
    elsewhere = cured.root / "elsewhere"
    (elsewhere / "nemo_automodel").mkdir(parents=True)
    (elsewhere / "nemo_automodel" / "__init__.py").write_text("")
    # a contract that tampers with the path stands for an environment in which another package comes first
    cured.tests["conftest.py"] = f"""
        import sys
        sys.path.insert(0, {str(elsewhere)!r})
        import nemo_automodel
        sys.path.pop(0)
        del sys.modules["nemo_automodel"]
        sys.modules["nemo_automodel"] = nemo_automodel
    """
    cured.tests["test_gather_gradient.py"] = CONTRACT.replace("from nemo", "#").replace("experts.gradient()", "0.5")
    cured.tests["test_guard_fine.py"] = GUARD.replace("from nemo", "#").replace("experts.fine()", "True")
    result = cured.run()
    assert result.status == 2
    assert f"nemo_automodel comes from {elsewhere}" in result.err.replace("\n", " ")
    assert "not from the tree under test" in result.err


SHIM = f"""
import os

def install():
    assert os.environ["AUTOMODEL_SHIM_INSTALL"] == "1"
    from {MODULE.removesuffix(".py").replace("/", ".")} import __name__ as name
    import sys
    sys.modules[name].gradient = lambda: VALUE
"""


@pytest.mark.parametrize(("value", "status"), [("1.0", 0), ("0.25", 1)])
def test_shim_is_a_third_side(cured: Project, value: str, status: int) -> None:
    cured.extra = 'shim = "fake_shim"'
    (cured.root / "fake_shim.py").write_text(SHIM.replace("VALUE", value))
    result = cured.run("--with-shim", PYTHONPATH=str(cured.root))
    assert result.status == status, result.out + result.err
    assert [side.side for side in result.report.sides] == ["stock", "patched", "installed"]
    row = next(row for row in result.report.contracts if row.id == "gather.gradient")
    assert (row.verdict.value, row.ok) == ("fixed", status == 0)
    assert row.sides["installed"].state.value == ("green" if status == 0 else "red")
    assert result.report.sides[2].tree == result.report.sides[0].tree
    assert "shim" in (cured.root / "reports" / "summary.txt").read_text().splitlines()[0]


def test_shim_that_fails_to_install(cured: Project) -> None:
    cured.extra = 'shim = "fake_shim"'
    (cured.root / "fake_shim.py").write_text("def install(): raise RuntimeError('other release')\n")
    result = cured.run("--with-shim", PYTHONPATH=str(cured.root))
    assert result.status == 2
    assert "side installed: fake_shim.install() failed: RuntimeError: other release" in result.err


def test_heartbeat(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slow = CONTRACT.replace("    assert", "    import time; time.sleep(1)\n    assert")
    project.tests["test_gather_gradient.py"] = slow
    project.write()
    project.fill_cache()
    monkeypatch.setattr(sides, "_HEARTBEAT_S", 0.3)
    monkeypatch.setenv("TMPDIR", str(project.root))
    assert cli.main(project.command()[3:]) == 0
    assert "  stock    … test_gradient 0 s" in capsys.readouterr().out

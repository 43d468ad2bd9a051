# SPDX-License-Identifier: Apache-2.0
"""The launcher itself: every way a rank can end, told apart, with real processes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher import bodies, plain_bodies
from tests.support.outcomes import RankOutcome, is_secondary, root_cause
from tests.support.world import WorldFailure, one_world_at_a_time, run_world

REPOSITORY = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if sys.platform != "linux":
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it went meanwhile
        return False
    return stat.rpartition(")")[2].split()[0] not in "XZ"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition became true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


# ---------------------------------------------------------------------------------------------- worlds that succeed


@pytest.mark.parametrize("world_size", [1, 4])
def test_results_come_in_rank_order_and_collectives_work(tmp_path: Path, world_size: int) -> None:
    results = run_world(bodies.summed, world_size, tmp_path, args=(1, 2), kwargs={"factor": 2.0})
    total = sum(2.0 * (rank + 4) for rank in range(world_size))
    assert results == [(rank, world_size, total) for rank in range(world_size)]


def test_ranks_are_fresh_processes_with_the_context_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    first = run_world(bodies.facts, 2, tmp_path)
    monkeypatch.setenv("SEEN_BY_RANKS", "yes")
    monkeypatch.chdir(tmp_path)
    second = run_world(bodies.facts, 2, tmp_path)

    pids = {facts["pid"] for facts in first + second}
    assert len(pids) == 4
    assert os.getpid() not in pids
    assert [facts["visits"] for facts in first + second] == [1, 1, 1, 1]
    assert not any(alive(pid) for pid in pids)
    for rank, facts in enumerate(second):
        context = facts["context"]
        assert (context.rank, context.world_size, context.directory) == (rank, 2, tmp_path)
        assert (context.device.type, context.backend, facts["backend"]) == ("cpu", "gloo", "gloo")
        assert facts["threads"] == 1
        env = facts["env"]
        assert (env["OMP_NUM_THREADS"], env["TORCHDYNAMO_DISABLE"]) == ("1", "1")
        assert (env["RANK"], env["WORLD_SIZE"], env["SEEN_BY_RANKS"]) == (str(rank), "2", "yes")
        assert facts["cwd"] == tmp_path
    assert "SEEN_BY_RANKS" not in first[0]["env"]
    assert "RANK" not in os.environ
    assert not list(tmp_path.glob(".store-*"))


def test_eight_ranks_start_in_half_a_second(tmp_path: Path) -> None:
    run_world(plain_bodies.enter, 8, tmp_path)
    times = []
    for _ in range(3):
        call = time.monotonic()
        times.append(max(run_world(plain_bodies.enter, 8, tmp_path)) - call)
    print("from the call until the last of 8 ranks entered its body:", ", ".join(f"{value:.3f} s" for value in times))
    assert min(times) <= 0.5


def test_logs_hold_all_output_and_the_failure_quotes_the_root_causes(tmp_path: Path) -> None:
    with pytest.raises(WorldFailure) as caught:
        run_world(bodies.speak, 2, tmp_path)
    for rank in range(2):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert caught.value.outcomes[rank].log_path == tmp_path / f"rank-{rank}.log"
        assert [f"{verb} by {rank}" in log for verb in ("printed", "written", "echoed")] == [True] * 3
        assert f"by {1 - rank}" not in log
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 raised LookupError: rank 1 has spoken\nTraceback")
    assert "echoed by 1" in text
    assert "echoed by 0" not in text
    assert "rank-0.log, rank-1.log" in text


def test_a_second_world_does_not_show_the_logs_of_the_first(tmp_path: Path) -> None:
    run_world(bodies.speak, 1, tmp_path)
    assert "printed by 0" in (tmp_path / "rank-0.log").read_text()
    run_world(plain_bodies.enter, 1, tmp_path)
    assert (tmp_path / "rank-0.log").read_text() == ""


def test_what_a_rank_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    (pid,) = run_world(plain_bodies.leave_child_behind, 1, tmp_path)
    assert wait_until(lambda: not alive(pid), 2.0)


# ---------------------------------------------------------------------------------------------- ranks that fail


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", "raised", "raised ValueError: text of the failure"),
        ("unpicklable exception", "raised", "raised tests.launcher.bodies.UnpicklableError: still reported"),
        ("str fails", "raised", "raised tests.launcher.bodies.Mute: <str() of the exception raised ZeroDivisionError>"),
        ("checkpoint", "raised", "raised torch.distributed.checkpoint.api.CheckpointException: "),
        ("keyboard", "raised", "raised KeyboardInterrupt"),
        ("sys.exit", "exited", "exited with code 3"),
        ("sys.exit 0", "exited", "exited with code 0"),
        ("os._exit", "exited", "exited with code 3"),
        ("os._exit 0", "exited", "exited with code 0"),
        ("SIGSEGV", "signal", "killed by SIGSEGV"),
        ("SIGKILL", "signal", "killed by SIGKILL"),
        ("SIGTERM", "signal", "killed by SIGTERM"),
    ],
)
def test_a_failing_rank_is_told_by_how_it_failed(tmp_path: Path, how: str, kind: str, text: str) -> None:
    with pytest.raises(WorldFailure) as caught:
        run_world(bodies.fail, 3, tmp_path, args=(how,))
    failure = caught.value
    assert str(failure).startswith(f"rank 1 of 3 {text}")
    assert failure.root_cause is failure.outcomes[1]
    assert [outcome.kind for outcome in failure.outcomes] == ["ok", kind, "ok"]
    assert [outcome.rank for outcome in failure.outcomes] == [0, 1, 2]
    assert failure.outcomes[0].value == "fine"
    assert all(outcome.entered for outcome in failure.outcomes)
    assert failure.elapsed < 3.0


def test_a_raised_exception_is_reported_as_text(tmp_path: Path) -> None:
    _, outcome = run_world(bodies.fail, 2, tmp_path, args=("checkpoint",), check=False)
    assert outcome.exc_type == "torch.distributed.checkpoint.api.CheckpointException"
    assert outcome.exc_mro == (outcome.exc_type, "builtins.BaseException", "builtins.object")
    assert "shard is short" in outcome.message
    assert 'raise CheckpointException("failed"' in outcome.traceback


def test_a_crash_in_c_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    outcome, _ = run_world(bodies.segfault_in_c, 2, tmp_path, check=False)
    assert (outcome.kind, outcome.message) == ("signal", "killed by SIGSEGV")
    assert "in segfault_in_c" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (bodies.return_lambda, "returned a result of type function, which cannot be pickled"),
        (bodies.return_private, "returned a result that cannot be unpickled: ValueError: made elsewhere"),
    ],
)
def test_a_result_that_cannot_be_sent_is_a_failure(tmp_path: Path, body: Callable[..., object], text: str) -> None:
    with pytest.raises(WorldFailure) as caught:
        run_world(body, 2, tmp_path)
    assert str(caught.value).startswith(f"rank 1 of 2 {text}")
    assert [outcome.kind for outcome in caught.value.outcomes] == ["ok", "unpicklable"]


def test_a_rank_that_dies_after_its_body_returned_is_a_failure(tmp_path: Path) -> None:
    _, outcome = run_world(bodies.die_after_return, 2, tmp_path, check=False)
    assert (outcome.kind, outcome.value) == ("exited", None)
    assert outcome.message == "exited with code 5 without a result (after the body had returned)"


# ---------------------------------------------------------------------------------------------- ranks that hang


@pytest.mark.parametrize("deaf", [False, True])
def test_a_hang_is_an_outcome_with_stacks(tmp_path: Path, deaf: bool) -> None:
    call = time.monotonic()
    outcomes = run_world(
        plain_bodies.sleep_forever, 3, tmp_path, args=((1,), deaf), deadline=1.0, pg_timeout=0.9, check=False
    )
    assert 1.0 <= time.monotonic() - call < 4.0
    assert [outcome.kind for outcome in outcomes] == ["ok", "hung", "ok"]
    assert outcomes[1].entered
    assert outcomes[1].stack_dump.startswith("Current thread")
    assert "in sleep_forever" in outcomes[1].stack_dump
    assert not alive(outcomes[1].pid)


def test_the_failure_of_a_world_that_hangs_names_the_hang(tmp_path: Path) -> None:
    with pytest.raises(WorldFailure) as caught:
        run_world(plain_bodies.sleep_forever, 3, tmp_path, args=((1, 2),), deadline=1.0, pg_timeout=0.9)
    text = str(caught.value)
    assert text.startswith("rank 1 of 3 hung: still running at the deadline")
    assert "rank 0: returned after" in text
    assert text.index("stacks of rank 1") < text.index("in sleep_forever") < text.index("stacks of rank 2")


def test_ranks_beside_a_failure_are_given_the_grace_and_then_stopped(tmp_path: Path) -> None:
    call = time.monotonic()
    with pytest.raises(WorldFailure) as caught:
        run_world(bodies.fail_beside_sleepers, 3, tmp_path, grace=0.5)
    assert 0.5 <= time.monotonic() - call < 3.5
    assert caught.value.root_cause.rank == 0
    assert [outcome.kind for outcome in caught.value.outcomes] == ["raised", "hung", "hung"]
    assert "first failure" in caught.value.outcomes[1].message
    assert "in sleep_forever" in str(caught.value)


def test_within_the_grace_others_fail_by_themselves_and_the_earliest_comes_first(tmp_path: Path) -> None:
    with pytest.raises(WorldFailure) as caught:
        run_world(bodies.late_failure, 2, tmp_path, grace=5.0)
    assert [outcome.message for outcome in caught.value.outcomes] == ["failure of 0", "failure of 1"]
    assert caught.value.root_cause.rank == 0
    assert caught.value.elapsed < 4.0


def test_ranks_left_alone_by_an_early_return_fail_by_the_timeout_of_the_group(tmp_path: Path) -> None:
    outcomes = run_world(bodies.wait_for_early_leaver, 3, tmp_path, deadline=15.0, pg_timeout=1.0, check=False)
    assert [outcome.kind for outcome in outcomes] == ["ok", "raised", "raised"]
    assert all(is_secondary(outcome) for outcome in outcomes[1:])
    assert max(outcome.seconds for outcome in outcomes) < 5.0


def test_groups_made_by_a_mesh_have_the_timeout_as_well(tmp_path: Path) -> None:
    outcomes = run_world(bodies.wait_in_mesh, 4, tmp_path, deadline=15.0, pg_timeout=1.0, grace=0.1, check=False)
    assert [outcome.kind for outcome in outcomes] == ["raised", "hung", "hung", "hung"]
    assert outcomes[0].seconds < 5.0


# ---------------------------------------------------------------------------------------------- the root cause


@pytest.mark.parametrize(
    ("how", "text"), [("raise", "raised ValueError: text of the failure"), ("SIGKILL", "killed by SIGKILL")]
)
def test_the_root_cause_comes_before_the_transport_errors_of_the_others(tmp_path: Path, how: str, text: str) -> None:
    with pytest.raises(WorldFailure) as caught:
        run_world(bodies.collective_with_failure, 4, tmp_path, args=(2, how))
    assert str(caught.value).startswith(f"rank 2 of 4 {text}")
    others = [outcome for outcome in caught.value.outcomes if outcome.rank != 2]
    assert [outcome.kind for outcome in others] == ["raised"] * 3
    assert all(is_secondary(outcome) for outcome in others)


def test_a_checkpoint_failure_is_laid_to_the_rank_it_names(tmp_path: Path) -> None:
    with pytest.raises(WorldFailure) as caught:
        run_world(bodies.other_ranks_checkpoint_failure, 3, tmp_path)
    assert caught.value.root_cause.rank == 2
    assert [is_secondary(outcome) for outcome in caught.value.outcomes] == [True, True, False]


def test_order_of_root_causes() -> None:
    hung = RankOutcome(0, "hung", seconds=0.1)
    mro = ("torch.distributed.DistBackendError", "builtins.RuntimeError")
    transport = RankOutcome(1, "raised", exc_type=mro[0], exc_mro=mro, message="?", seconds=0.2)
    late = RankOutcome(2, "raised", exc_type="builtins.AssertionError", message="timed out", seconds=0.5)
    early = RankOutcome(3, "exited", message="exited with code 1", seconds=0.4)
    dead = RankOutcome(4, "signal", message="killed by SIGSEGV", seconds=0.9)
    outcomes = [RankOutcome(5, "ok"), hung, transport, late, early, dead]
    for expected in (dead, early, late, transport, hung):
        assert root_cause(outcomes) is expected
        outcomes.remove(expected)
    with pytest.raises(ValueError, match="no rank failed"):
        root_cause(outcomes)


# ---------------------------------------------------------------------------------------------- calls that are refused


def closure() -> Callable[..., None]:
    """Return a body that no other process can import."""

    def inner(context: object) -> None:
        return None

    return inner


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda context: None, "lambda, a closure or a method"),
        (closure(), "lambda, a closure or a method"),
        (functools.partial(bodies.fail, how="raise"), "not partial"),
        (functools.wraps(plain_bodies.enter)(lambda context: None), "is something else"),
    ],
)
def test_a_body_that_cannot_be_imported_is_refused(tmp_path: Path, body: Callable[..., object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        run_world(body, 1, tmp_path)


def test_arguments_that_cannot_be_pickled_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the arguments of fail cannot be pickled"):
        run_world(bodies.fail, 1, tmp_path, args=(lambda: None,))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world_size": 0}, "at least one rank"),
        ({"world_size": -1}, "at least one rank"),
        ({"deadline": 5.0, "pg_timeout": 5.0}, "less than the deadline"),
        ({"deadline": 5.0}, "less than the deadline"),
        ({"pg_timeout": 0.0}, "must be positive"),
        ({"grace": -1.0}, "grace"),
    ],
)
def test_senseless_numbers_are_refused(tmp_path: Path, options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run_world(plain_bodies.enter, **{"world_size": 1, "directory": tmp_path, **options})


def test_a_world_inside_a_rank_is_refused(tmp_path: Path) -> None:
    (outcome,) = run_world(plain_bodies.nested, 1, tmp_path, check=False)
    assert (outcome.kind, outcome.message) == ("raised", "run_world was called inside a rank")


# ---------------------------------------------------------------------------------------------- set-up


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on ``sys.path`` for modules made by a test."""
    directory = tmp_path / "modules"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    return directory


def test_a_preloaded_module_is_there_before_the_body(tmp_path: Path, modules: Path) -> None:
    name = "module_to_preload"
    (modules / f"{name}.py").write_text("")
    assert run_world(plain_bodies.is_loaded, 2, tmp_path, args=(name,), preload=[name]) == [True, True]
    assert run_world(plain_bodies.is_loaded, 2, tmp_path, args=(name,)) == [False, False]


def test_a_module_that_cannot_be_preloaded_is_named_with_the_real_error(tmp_path: Path, modules: Path) -> None:
    (modules / "broken_module.py").write_text("import a_module_that_does_not_exist\n")
    with pytest.raises(WorldFailure) as caught:
        run_world(plain_bodies.enter, 2, tmp_path, preload=["broken_module"])
    assert [outcome.kind for outcome in caught.value.outcomes] == ["setup", "setup"]
    assert not any(outcome.entered for outcome in caught.value.outcomes)
    text = str(caught.value)
    assert "could not preload broken_module" in text
    assert "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'" in text

    (modules / "broken_module.py").write_text("")
    assert len(run_world(plain_bodies.enter, 2, tmp_path, preload=["broken_module"])) == 2


@pytest.mark.parametrize("preloaded", [False, True])
def test_the_package_under_test_must_come_from_the_tree(
    tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch, preloaded: bool
) -> None:
    (modules / "nemo_automodel").mkdir()
    (modules / "nemo_automodel" / "__init__.py").write_text("")
    preload = ["nemo_automodel"] if preloaded else []
    monkeypatch.setenv("CONTRACT_TREE", str(modules))
    (path,) = run_world(plain_bodies.import_module, 1, tmp_path, args=("nemo_automodel",), preload=preload)
    assert path == str(modules / "nemo_automodel" / "__init__.py")

    # A name that merely begins alike is another directory.
    monkeypatch.setenv("CONTRACT_TREE", str(modules)[:-1])
    with pytest.raises(WorldFailure) as caught:
        run_world(plain_bodies.import_module, 1, tmp_path, args=("nemo_automodel",), preload=preload)
    outcome = caught.value.root_cause
    assert (outcome.kind, outcome.entered) == ("setup", not preloaded)
    assert str(modules / "nemo_automodel" / "__init__.py") in outcome.message
    assert f"CONTRACT_TREE={str(modules)[:-1]}" in outcome.message


def test_a_preload_that_kills_the_fork_server_is_an_error_with_its_output(tmp_path: Path, modules: Path) -> None:
    (modules / "deadly_module.py").write_text("import os\nos.write(2, b'last words')\nos._exit(9)\n")
    with pytest.raises(RuntimeError, match=r"(?s)the fork server is gone \(exit code 9\).*last words"):
        run_world(plain_bodies.enter, 1, tmp_path, preload=["deadly_module"])
    assert len(run_world(plain_bodies.enter, 1, tmp_path)) == 1


def test_the_environment_of_the_caller_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (facts,) = run_world(bodies.facts, 1, tmp_path)
    assert facts["env"]["OMP_NUM_THREADS"] == "2"


# ---------------------------------------------------------------------------------------------- the end of the parent

HANGING_SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
from tests.launcher import plain_bodies
from tests.support.world import ForkServerError, run_world
try:
    run_world(plain_bodies.record_pids_and_hang, 3, sys.argv[1], deadline=300.0)
except (KeyboardInterrupt, ForkServerError) as error:
    print({KeyboardInterrupt: "interrupted"}.get(type(error), type(error).__name__), flush=True)
    sys.stdin.read()
    raise
"""

INTERVAL_SCRIPT = """
import json
import sys
import time
from tests.launcher import plain_bodies
from tests.support.world import run_world
print(time.monotonic(), flush=True)
for number in range(int(sys.argv[2])):
    results = run_world(
        plain_bodies.interval, 2, sys.argv[1], args=(0.3,), deadline=float(sys.argv[3]), pg_timeout=1.0)
    print(json.dumps(results), flush=True)
"""


def start_script(code: str, *args: str, lock: str | None = None) -> subprocess.Popen[str]:
    """Start a test process of its own, which shares the lock of this one unless ``lock`` names another."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ if lock is None else {**os.environ, "PYTEST_XDIST_TESTRUNUID": lock},
        text=True,
    )


@dataclasses.dataclass
class HangingScript:
    """A test process whose world hangs, with the pids of what must not outlive it."""

    process: subprocess.Popen[str]
    ranks: list[int]
    children: list[int]  # of the ranks
    server: int

    @property
    def pids(self) -> list[int]:
        return [*self.ranks, *self.children, self.server]


@pytest.fixture(scope="module")
def hanging_scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[HangingScript]]:
    """Four such processes, started at once since each needs a fork server; every test takes one."""
    directories = [tmp_path_factory.mktemp("hanging") for _ in range(4)]
    processes = [start_script(HANGING_SCRIPT, str(path), lock=uuid.uuid4().hex) for path in directories]
    scripts = []
    for process, directory in zip(processes, directories, strict=True):
        files = [directory / f"pids-{rank}" for rank in range(3)]
        assert wait_until(lambda files=files: all(file.exists() for file in files), 40.0)
        rows = [[int(pid) for pid in file.read_text().split()] for file in files]
        ranks, children, servers = zip(*rows, strict=True)
        scripts.append(HangingScript(process, list(ranks), list(children), servers[0]))
        assert len(set(scripts[-1].pids)) == 7
    yield scripts
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_test_process_leaves_no_process(
    hanging_scripts: list[HangingScript], signum: signal.Signals
) -> None:
    script = hanging_scripts.pop()
    process = script.process
    assert all(alive(pid) for pid in script.pids)
    # ^C in a terminal goes to the process group of the test process: it must be the only one to get it.
    assert not any(os.getpgid(pid) == os.getpgid(process.pid) for pid in script.pids)

    process.send_signal(signum)
    if signum == signal.SIGINT:
        assert process.stdout.readline() == "interrupted\n"
        # The process itself still runs: the ranks were reaped before the exception left the launcher.
        assert not any(alive(pid) for pid in [*script.ranks, script.server])
    process.communicate(timeout=15)
    assert process.returncode == -signum
    assert wait_until(lambda: not any(alive(pid) for pid in script.pids), 5.0)


def test_the_end_of_the_fork_server_ends_its_ranks_and_is_an_error(hanging_scripts: list[HangingScript]) -> None:
    script = hanging_scripts.pop()
    assert all(alive(pid) for pid in script.pids)
    os.kill(script.server, signal.SIGKILL)
    assert script.process.stdout.readline() == "ForkServerError\n"
    assert wait_until(lambda: not any(alive(pid) for pid in script.pids), 2.0)
    script.process.communicate(timeout=15)
    assert script.process.returncode == 1


def test_worlds_of_two_processes_do_not_overlap(tmp_path: Path) -> None:
    scripts = [start_script(INTERVAL_SCRIPT, str(tmp_path / name), "2", "30") for name in ("first", "second")]
    spans = []
    for script in scripts:
        output, _ = script.communicate(timeout=60)
        assert script.returncode == 0
        for results in map(json.loads, output.splitlines()[1:]):
            spans.append((min(begin for begin, _ in results), max(end for _, end in results)))
    assert len(spans) == 4
    spans.sort()
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_waiting_for_another_world_does_not_count(tmp_path: Path) -> None:
    with one_world_at_a_time():
        script = start_script(INTERVAL_SCRIPT, str(tmp_path), "1", "1.5")
        ready = float(script.stdout.readline())
        time.sleep(1.7)
    output, _ = script.communicate(timeout=60)
    assert script.returncode == 0
    assert min(begin for begin, _ in json.loads(output)) > ready + 1.5

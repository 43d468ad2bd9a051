# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism with gradient checkpointing: molt says at launch what would fail in the first backward pass."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contracts.molt import model_files, strategy_ranks
from tests.contracts.outcomes import PreconditionError
from tests.support.world import run_world

ROOT = Path(__file__).resolve().parents[3]
ISSUE = "https://github.com/NVIDIA-NeMo/Automodel/issues/3325"
DISPATCHER = "MOLT_MOE_DISPATCHER"
SECONDS = 10.0  # of processor time until a refusal: wall time depends on what else the machine does


@dataclass
class Launch:
    """What became of a command line."""

    status: int
    errors: str
    opened: list[str]
    passes: int
    dispatcher: str | None
    seconds: float

    @property
    def last_line(self) -> str:
        """Of standard error; rank prefixes are taken off."""
        lines = [line.removeprefix("[rank0]: ").strip() for line in self.errors.strip().splitlines()]
        return lines[-1] if lines else ""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model and the data."""
    directory = tmp_path_factory.mktemp("files")
    model_files.write_model(directory / "model")
    model_files.write_data(directory / "sft.jsonl")
    return directory


@pytest.fixture
def train_sft(files: Path, tmp_path: Path) -> Callable[..., Launch]:
    """Launch ``train_sft`` with the report's flags, as they are spelt in this release."""
    reported = {
        "--model.model_name_or_path": [files / "model"],
        "--data.dataset": [files / "sft.jsonl"],
        "--data.input_key": ["prompt"],
        "--data.output_key": ["response"],
        "--data.max_len": ["256"],
        "--data.max_samples": ["128"],
        "--train.max_epochs": ["2"],
        "--train.batch_size": ["16"],
        "--train.micro_batch_size": ["1"],
        "--fsdp.param_dtype": ["bf16"],
        "--fsdp.attn_implementation": ["sdpa"],
        "--fsdp.ep_size": ["4"],
        "--model.aux_loss_coef": ["0.001"],
        "--adam.lr": ["2e-4"],
        "--ckpt.disable_final_save": [],
        "--ckpt.output_dir": [tmp_path / "ckpt"],
    }
    command = Path(importlib.util.find_spec("molt.cli.train_sft").origin)
    if "--model.lora_dim" in command.read_text(encoding="utf-8"):  # in git only later
        reported |= {
            "--model.lora_dim": ["16"],
            "--model.lora_alpha": ["32"],
            "--model.lora_target_modules": ["*_proj", "*experts"],
        }
    flags = [str(part) for flag, values in reported.items() for part in (flag, *values)]

    def launch(mode: str, dispatcher: str | None = None) -> Launch:
        more = ["--model.gradient_checkpoint", mode]
        return start(tmp_path, files / "model", "train_sft", [*flags, *more], dispatcher)

    return launch


def start(tmp_path: Path, model: Path, command: str, flags: list[str], dispatcher: str | None) -> Launch:
    """Run a command line as rank 0 of 4."""
    environment = {key: value for key, value in os.environ.items() if key not in (DISPATCHER, "LOCAL_RANK")}
    environment["WORLD_SIZE"] = "4"
    if dispatcher is not None:
        environment[DISPATCHER] = dispatcher
    output = tmp_path / "launch.json"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "tests.contracts.molt.launch_process", output, model, command, *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not output.is_file():
        raise PreconditionError(f"the process left no report:\n{done.stderr}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Launch(done.returncode, done.stderr, **json.loads(output.read_text()), seconds=seconds)


def can_replay() -> bool:
    """Whether the Automodel here replays HybridEP's layout."""
    from nemo_automodel.components.moe.megatron import fused_a2a

    return hasattr(fused_a2a, "hybridep_dispatch_replay_scope")


def refused_or_trains(launch: Launch, parts: list[str], measure: Callable[[str, float], None]) -> None:
    """Hold a launch on HybridEP against what is right with the Automodel here."""
    if can_replay() and launch.dispatcher in (None, "hybridep"):
        assert launch.status == 0, launch.errors
        assert launch.passes == 1
    else:
        refused_early(launch, parts, measure)


def refused_early(launch: Launch, parts: list[str], measure: Callable[[str, float], None]) -> None:
    """Hold a launch against what a refusal owes: its exit status, its words, once, and no file of the model opened."""
    if launch.opened:
        if "model.safetensors" not in launch.opened:
            raise PreconditionError(f"neither refused nor loaded: {launch.last_line}")
        became = f"{launch.passes} backward passes" if launch.status == 0 else raw_failure(launch.errors)
        raise AssertionError(f"accepted, on dispatcher {launch.dispatcher!r}, then {became}")
    measure("seconds_to_refusal", launch.seconds)
    assert launch.status == 1
    assert launch.last_line.startswith("ValueError: ")
    assert [part for part in parts if part not in launch.last_line] == [], launch.last_line
    assert launch.errors.count(launch.last_line) == 1
    assert launch.seconds <= SECONDS


def raw_failure(errors: str) -> str:
    """The exception that a launch ended with, and its first pair of shapes."""
    lines = [line.removeprefix("[rank0]: ").strip() for line in errors.splitlines()]
    start = next((number for number, line in enumerate(lines) if "CheckpointError: " in line), len(lines))
    shapes = [line for line in lines[start:] if "metadata: {" in line][:2]
    return " ".join([lines[start], *shapes]) if start < len(lines) else lines[-1]


@pytest.mark.contract(
    "launch.full", meaning="the report's command trains, or is refused at launch by name, with no file read"
)
def test_the_reports_command_is_refused_at_launch(
    train_sft: Callable[..., Launch], measure: Callable[[str, float], None]
) -> None:
    parts = [
        "--model.gradient_checkpoint full",
        "--fsdp.ep_size 4",
        f"hybridep dispatcher (the default: {DISPATCHER} is not set)",
        "--model.gradient_checkpoint none",
        f"{DISPATCHER}=torch",
        ISSUE,
    ]
    refused_or_trains(train_sft("full"), parts, measure)


@pytest.mark.contract("launch.selective", meaning="selective checkpointing too: the drift is below the router")
def test_selective_is_refused_at_launch(
    train_sft: Callable[..., Launch], measure: Callable[[str, float], None]
) -> None:
    parts = ["--model.gradient_checkpoint selective", f"from {DISPATCHER}='hybridep'", "none", "=torch", ISSUE]
    refused_or_trains(train_sft("selective", "hybridep"), parts, measure)


@pytest.mark.contract(
    "launch.spelling", meaning="' HybridEP ' is judged as hybridep, never silently another dispatcher"
)
def test_case_and_blanks_make_no_difference(
    train_sft: Callable[..., Launch], measure: Callable[[str, float], None]
) -> None:
    refused_or_trains(train_sft("full", " HybridEP "), [f"from {DISPATCHER}=' HybridEP '", ISSUE], measure)


@pytest.mark.contract(
    "launch.misspelt-mode", meaning="a misspelt mode is refused with the list of modes, not taken for full"
)
def test_a_misspelt_mode_is_refused(train_sft: Callable[..., Launch], measure: Callable[[str, float], None]) -> None:
    refused_early(train_sft("selectiv", "torch"), ["'selectiv'", "full", "selective", "none"], measure)


@pytest.mark.contract("launch.allowed", meaning="what works is launched: checkpointing off, and the torch dispatcher")
@pytest.mark.parametrize(("mode", "dispatcher"), [("none", None), ("full", "torch")], ids=["off", "torch"])
def test_what_works_is_launched(mode: str, dispatcher: str | None, train_sft: Callable[..., Launch]) -> None:
    launch = train_sft(mode, dispatcher)
    assert launch.status == 0, launch.errors
    assert launch.passes == 1
    assert launch.dispatcher == (dispatcher or "hybridep")


@pytest.mark.contract("launch.reinforcement", meaning="the command line for reinforcement decides as early")
def test_reinforcement_is_refused_at_launch(files: Path, tmp_path: Path, measure: Callable[[str, float], None]) -> None:
    flags = {
        "--actor.model_name_or_path": str(files / "model"),
        "--vllm.num_engines": "1",
        "--train.agent_path": "agent.py",
        "--train.async_queue_size": "1",
        "--rollout.n_samples_per_prompt": "8",
        "--fsdp.ep_size": "4",
    }
    launch = start(tmp_path, files / "model", "train_rl_ray", list(itertools.chain(*flags.items())), None)
    entered = "in train\n" in launch.errors
    if can_replay():
        assert entered, launch.errors
        return
    assert not entered, "accepted: train() was entered"
    parts = ["--actor.gradient_checkpoint full", "--fsdp.ep_size 4", "--actor.gradient_checkpoint none", ISSUE]
    refused_early(launch, parts, measure)


@pytest.mark.contract("strategy.refuses", meaning="the set-up refuses the same on every rank, and warns of DeepEP once")
def test_the_strategy_decides_with_authority(tmp_path: Path) -> None:
    preload = (strategy_ranks.__name__,)
    for mode in ("full", "selective"):
        ranks = run_world(strategy_ranks.set_up, 2, tmp_path, ("hybridep", mode), preload=preload)
        refusals = {refusal for refusal, _ in ranks}
        if can_replay():
            assert refusals == {None}
            continue
        assert None not in refusals, f"the set-up accepts {mode} checkpointing"
        assert len(refusals) == 1
        assert all(part in refusals.copy().pop() for part in (f"gradient_checkpoint {mode}", "ep_size 2", ISSUE))
    for dispatcher, mode, warnings in (
        ("deepep", "full", [1, 0]),
        ("torch", "full", [0, 0]),
        ("hybridep", "off", [0, 0]),
    ):
        ranks = run_world(strategy_ranks.set_up, 2, tmp_path, (dispatcher, mode), preload=preload)
        assert [refusal for refusal, _ in ranks] == [None, None]
        assert [printed.count("[Warning]") for _, printed in ranks] == warnings


@pytest.mark.contract("guard.truth-table", meaning="every cell: ep_size, mode, dispatcher, capability")
def test_every_cell_of_the_truth_table(measure: Callable[[str, float], None]) -> None:
    import molt.models.utils as utils

    verdict = getattr(utils, "ep_checkpoint_verdict", lambda *cell: "ok")  # without a guard all is accepted
    misses = refusals = cells = 0
    for cell in itertools.product(
        (1, 2, 8, 256), (False, True, "selective"), ("hybridep", "deepep", "uccl_ep", "mok", "torch"), (False, True)
    ):
        ep_size, mode, dispatcher, can_replay = cell
        fails = ep_size > 1 and bool(mode) and dispatcher == "hybridep" and not can_replay
        refused = verdict(*cell) == "refuse"
        cells, misses, refusals = cells + 1, misses + (fails and not refused), refusals + (refused and not fails)
    measure("cells", cells)
    measure("misses", misses)
    measure("false_refusals", refusals)
    assert (misses, refusals) == (0, 0), f"of {cells} cells: misses={misses} false refusals={refusals}"

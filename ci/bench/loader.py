# SPDX-License-Identifier: Apache-2.0
"""Saving and loading optimizer state: the release beside the release with the shim. ``nox -s bench-loader``.

Each measurement is a process of its own, forked with everything imported; the two sides take turns, so that a busy
machine slows both, and the goals are held against CPU seconds for the same reason. Both go through the release's
``Checkpointer``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from ci.bench.timing import Spread, in_a_child, measure, ratio, write
from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest

SIDES = ("stock", "patched")


class Case(NamedTuple):
    """One optimizer: how many parameters of which shape, how many of them were never updated, and the goals."""

    name: str
    count: int
    shape: tuple[int, ...]
    cold: int = 0
    sides: tuple[str, ...] = SIDES
    baseline: str | None = None  # the case whose stock side the ratios are taken with; None: its own
    goals: tuple[float, float, float] | None = None  # load time, load memory, save time, as shares of stock's


def cases(small: int, gibibytes: float) -> list[Case]:
    """``small`` parameters, dense and with 3 % cold; ten times as many; ``gibibytes`` of state in eight tensors."""
    goals = (0.35, 0.5, 1.0)
    return [
        Case("small", small, (4, 4), goals=goals),
        # A sparse file does not load in stock at all: the comparison is with its dense one.
        Case("small-cold", small, (4, 4), cold=small * 3 // 100, sides=("patched",), baseline="small", goals=goals),
        Case("small-x10", small * 10, (4, 4), sides=("patched",)),
        Case("large", 8, (int(gibibytes * 2**30) // (8 * 2 * 4 * 1024), 1024), goals=(1.0, 1.0, 1.0)),
    ]


def build(case: Case, steps: int) -> tuple[Any, Any]:
    """A model and its AdamW after ``steps`` steps, of which the last ``case.cold`` parameters saw none."""
    import torch
    from torch import nn

    model = nn.ModuleList([nn.Module() for _ in range(case.count)])
    for layer in model:
        layer.weight = nn.Parameter(torch.ones(case.shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    params = list(model.parameters())[: case.count - case.cold]
    for _ in range(steps):
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def work(side: str, operation: str, case: Case, path: str) -> dict[str, float]:
    """In a process of its own: save (as ``prepare`` too) or load ``case`` at ``path``."""
    import torch

    torch.set_num_threads(1)
    if side == "patched":
        import nemo_automodel_shim

        nemo_automodel_shim.install()
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    config = CheckpointingConfig(
        checkpoint_dir=path, model_save_format="torch_save", save_consolidated=False, model_repo_id="none"
    )
    checkpointer = Checkpointer(config, dp_rank=0, tp_rank=0, pp_rank=0)
    with tempfile.TemporaryDirectory() as warm:  # what is imported late is no part of the measurement
        model, optimizer = build(Case("warm-up", 2, (4, 4)), 1)
        checkpointer.save_optimizer(optimizer, model, warm)
        checkpointer.load_optimizer(optimizer, model, warm)
    model, optimizer = build(case, 0 if operation == "load" else 1)
    action = checkpointer.load_optimizer if operation == "load" else checkpointer.save_optimizer
    found = measure(lambda: action(optimizer, model, path))
    if operation == "load" and len(optimizer.state) != case.count - case.cold:
        raise RuntimeError(f"{side} restored {len(optimizer.state)} of {case.count - case.cold} parameters")
    return found


def run(work_directory: Path, chosen: list[Case], repeats: int) -> dict[str, Any]:
    """All measurements: case -> side -> operation -> figure -> one value a repeat."""
    taken: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(list))))
    for case in chosen:
        for side in case.sides:
            _process(side, "prepare", case, work_directory / case.name / side)
        for repeat in range(repeats):
            for operation in ("load", "save"):
                for side in case.sides if repeat % 2 else case.sides[::-1]:
                    place = work_directory / case.name / (side if operation == "load" else "again")
                    figures = _process(side, operation, case, place)
                    print(f"{case.name} {side} {operation} {repeat}: {figures}", file=sys.stderr, flush=True)
                    for figure, value in figures.items():
                        taken[case.name][side][operation][figure].append(value)
        for file in sorted((work_directory / case.name).rglob("*.distcp")):
            file.unlink()
    return json.loads(json.dumps(taken))


def _process(side: str, operation: str, case: Case, path: Path) -> dict[str, float]:
    if operation == "save":
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    try:
        return in_a_child(lambda: work(side, operation, case, str(path)))
    except RuntimeError as error:
        raise RuntimeError(f"{side} {operation} {case.name}: {error}") from None


def summary(taken: dict[str, Any], chosen: list[Case]) -> tuple[dict[str, Any], list[str]]:
    """Medians and spreads, ratios to stock, and the lines of a table."""
    lines = [
        f"{'case':12} {'operation':10} {'side':8} {'seconds':>24} {'cpu seconds':>24} {'extra MiB':>24} "
        f"{'time/stock':>18} {'cpu/stock':>18} {'memory/stock':>18}  goal"
    ]
    found: dict[str, Any] = {}
    for case in chosen:
        for operation in ("load", "save"):
            stock = taken[case.baseline or case.name].get("stock", {}).get(operation)
            for side in case.sides:
                mine = taken[case.name][side][operation]
                row: dict[str, Any] = {figure: Spread.of(values) for figure, values in mine.items()}
                text = f"{case.name:12} {operation:10} {side:8} {row['seconds'].text():>24} {row['cpu'].text():>24} "
                text += f"{row['extra'].text(2**20, 0):>24} "
                if side == "patched" and stock:
                    row["time_ratio"] = ratio(mine["seconds"], stock["seconds"])
                    row["cpu_ratio"] = ratio(mine["cpu"], stock["cpu"])
                    row["memory_ratio"] = ratio(mine["extra"], [max(each, 2**20) for each in stock["extra"]])
                    text += " ".join(f"{row[f'{kind}_ratio'].text():>18}" for kind in ("time", "cpu", "memory"))
                    if case.goals:
                        time, memory, save = case.goals
                        row["goal"] = {"cpu": time, "memory": memory} if operation == "load" else {"cpu": save}
                        met = all(row[f"{kind}_ratio"].median <= limit for kind, limit in row["goal"].items())
                        text += f"  {' and '.join(f'{k} <= {v}' for k, v in row['goal'].items())}"
                        text += ": met" if met else ": NOT MET"
                        row["met"] = met
                found.setdefault(case.name, {}).setdefault(operation, {})[side] = row
                lines.append(text.rstrip())
    if "small-x10" in found:
        for operation in ("load", "save"):
            ten, one = (
                found[name][operation]["patched"]["cpu"].median / count
                for name, count in (("small-x10", 10), ("small", 1))
            )
            found["small-x10"][operation]["time_per_parameter_ratio"] = ten / one
            lines.append(f"{operation} of ten times as many: {ten / one:.2f} of the CPU time a parameter")
    return found, lines


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", type=int, default=10_000, help="how many small parameters")
    parser.add_argument("--gibibytes", type=float, default=2.0, help="how much state in few tensors")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", action="append", help="names of cases")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the count of reads and collectives; 0: none")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint|megatron_fsdp")
    target = manifest.load(PATCHES).select(None)[1]
    chosen = [case for case in cases(options.small, options.gibibytes) if not options.only or case.name in options.only]
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as temporary:
        release = Path(temporary) / "release"
        wheel = fetch.fetch_wheel(target.wheel, WHEEL_CACHE, lambda line: print(line, file=sys.stderr))
        fetch.unpack_wheel(wheel, release)
        sys.path.insert(0, str(release))
        import nemo_automodel_shim

        nemo_automodel_shim.install()  # imports all that the sides need, once for all measurements
        nemo_automodel_shim.uninstall()
        taken = run(Path(temporary), chosen, options.repeats)
        found, lines = summary(taken, chosen)
        results: dict[str, Any] = {"cases": found, "taken": taken}
        if options.ranks:
            results["ranks"] = _count(release, options.ranks, Path(temporary))
            lines += [f"{side}, {options.ranks} ranks: {counts}" for side, counts in results["ranks"].items()]
    print("\n".join(lines))
    write("loader", results, "\n".join(lines))
    rows = [row for case in found.values() for operation in case.values() for row in operation.values()]
    return int(any(isinstance(row, dict) and row.get("met") is False for row in rows))


def _count(release: Path, ranks: int, directory: Path) -> dict[str, Any]:
    counts = {}
    for side in SIDES:
        done = subprocess.run(
            [sys.executable, "-m", "ci.bench.loader_ranks", side, str(ranks), str(directory / f"ranks-{side}")],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": f"{release}{os.pathsep}{REPOSITORY}", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{side} on {ranks} ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
        counts[side] = json.loads(done.stdout.splitlines()[-1])
    return counts


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Cost of the gather of hidden states and routing weights: ``nox -s bench-gather``.

In one world of gloo ranks, with repeats interleaved: the release's gather (which has no backward for the weights), the
patched one, and one made of torch's own differentiable ``all_gather``; by themselves, and inside the layer. Result:
a table, and ``gather.json`` in ``.regress/bench``. Linux only: peak memory is read from ``/proc``.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from ci.regress import OUTPUT, PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest, worktree
from ci.regress.errors import RegressError

VERSIONS = ("stock", "patched", "functional")
EXPERTS_FILE = "nemo_automodel/components/moe/experts.py"
EXPERTS, TOP_K = 8, 2
_MEMORY_REPEATS = 6


def measure(context: Any, stock_file: str, tokens: int, dim: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Rank body: seconds and peak memory (MiB) of each repeat, by what was measured and version.

    Args:
        context: The rank.
        stock_file: The release's own ``experts.py``; ``nemo_automodel`` is the patched tree.
        tokens: Tokens of rank 0; the others have a few less each.
        dim: Width of the hidden states and of the experts.
        repeats: Measured repeats; one more before them warms up.
    """
    import torch
    import torch.distributed as dist
    from nemo_automodel.components.moe import experts as patched
    from torch.distributed.device_mesh import init_device_mesh

    modules = {
        "stock": _load("bench_stock_experts", Path(stock_file)),
        "patched": patched,
        "functional": _load("bench_functional_experts", Path(patched.__file__)),
    }
    modules["functional"]._AllGatherConcatVarlenFn = _functional_gather()
    mesh = init_device_mesh("cpu", (context.world_size,))
    group = mesh.get_group()
    counts = [tokens - 3 * rank for rank in range(context.world_size)]
    generator = torch.Generator().manual_seed(context.rank)
    rows = counts[context.rank]
    hidden = torch.randn(rows, dim, generator=generator).requires_grad_()
    weights = torch.rand(rows, TOP_K, generator=generator).requires_grad_()
    indices = torch.randint(0, EXPERTS, (rows, TOP_K), generator=generator)
    mask = torch.ones(rows, dtype=torch.bool)
    gradients = [torch.randn(sum(counts), width) for width in (dim, TOP_K)]
    layers = {name: _layer(module, mesh, dim) for name, module in modules.items()}

    def gather(name: str) -> Callable[[], None]:
        function = modules[name]._AllGatherConcatVarlenFn

        def step() -> None:
            gathered = function.apply(hidden, group, counts, max(counts))
            inputs = weights.detach() if name == "stock" else weights
            routed = function.apply(inputs, group, counts, max(counts))
            given = [(gathered, gradients[0])] + ([(routed, gradients[1])] if name != "stock" else [])
            torch.autograd.backward(*map(list, zip(*given, strict=True)))

        return step

    def layer(name: str) -> Callable[[], None]:
        return lambda: layers[name](hidden, mask, weights, indices).sum().backward()

    found: dict[str, dict[str, list[float]]] = {}
    for what, make in (("gather", gather), ("layer", layer)):
        steps = {name: make(name) for name in VERSIONS}
        for repeat in range(-1, repeats + _MEMORY_REPEATS):
            # Each version is first, second and third in turn.
            for place in range(len(VERSIONS)):
                name = VERSIONS[(repeat + place) % len(VERSIONS)]
                for tensor in (hidden, weights, *layers[name].parameters()):
                    tensor.grad = None
                if repeat >= repeats:
                    # Apart from the timing: without memory at hand that was freed before, all that is used shows.
                    ctypes.CDLL(None).malloc_trim(0)
                    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
                before = _memory("VmRSS")
                dist.barrier()
                began = time.perf_counter()
                steps[name]()
                seconds = time.perf_counter() - began
                if repeat >= repeats:
                    peak = (_memory("VmHWM") - before) / 1024
                    found.setdefault(f"{what} peak MiB", {}).setdefault(name, []).append(peak)
                elif repeat >= 0:
                    found.setdefault(f"{what} seconds", {}).setdefault(name, []).append(seconds)
    return found


def _load(name: str, file: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _functional_gather() -> type:
    import torch
    import torch.distributed.nn.functional as functional

    class Gather:
        @staticmethod
        def apply(rows: torch.Tensor, group: Any, counts: list[int], longest: int) -> torch.Tensor:
            padded = torch.nn.functional.pad(rows, (0, 0, 0, longest - rows.size(0)))
            parts = functional.all_gather(padded, group=group)
            return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    return Gather


def _layer(module: ModuleType, mesh: Any, dim: int) -> Any:
    import torch
    from nemo_automodel.components.moe.config import MoEConfig
    from nemo_automodel.components.moe.parallelizer import ExpertParallel
    from torch.distributed.tensor.parallel import parallelize_module

    options = {"n_expert_groups": 0, "n_limited_groups": 0, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0}
    config = MoEConfig(
        n_routed_experts=EXPERTS,
        n_shared_experts=0,
        n_activated_experts=TOP_K,
        train_gate=True,
        score_func="softmax",
        route_scale=1.0,
        dim=dim,
        inter_dim=dim,
        moe_inter_dim=dim,
        norm_topk_prob=True,
        dtype=torch.float32,
        **options,
    )
    experts = module.GroupedExperts(config)
    with torch.no_grad():
        for param in experts.parameters():
            param.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    parallelize_module(experts, mesh, ExpertParallel())
    return experts


def _memory(entry: str) -> int:
    """KiB, of the lines of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {entry}")


def summarise(ranks: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median, quartiles and ratio to the best right version; a repeat counts as long as its slowest rank took."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for what in ranks[0]:
        rows = {}
        for name in VERSIONS:
            slowest = [max(values) for values in zip(*(rank[what][name] for rank in ranks), strict=True)]
            low, median, high = statistics.quantiles(slowest, n=4)
            rows[name] = {"median": median, "lower_quartile": low, "upper_quartile": high, "repeats": len(slowest)}
        # Stock does less than is needed, so it is no version to be measured against; its ratio is shown all the same.
        best = min(rows[name]["median"] for name in VERSIONS if name != "stock")
        for row in rows.values():
            row["ratio_to_best"] = row["median"] / best if best else 1.0
        result[what] = rows
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 if it could not run."""
    parser = argparse.ArgumentParser(prog="python -m ci.bench.gather", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank (default: 4096)")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--report-dir", type=Path, default=OUTPUT / "bench")
    parser.add_argument("--stock", help=argparse.SUPPRESS)  # in the child: the stock tree; the patched one is imported
    options = parser.parse_args(arguments)
    if options.stock is None:
        return _with_trees(list(arguments if arguments is not None else sys.argv[1:]))

    import torch

    from ci.bench.gather import measure as body  # importable by its name: this module may be __main__
    from tests.support.world import run_world

    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        file = str(Path(options.stock) / EXPERTS_FILE)
        numbers = (file, options.tokens, options.dim, options.repeats)
        ranks = run_world(body, options.ranks, work, numbers, deadline=900, preload=["ci.bench.gather"])
    result = summarise(ranks)
    shape = {"ranks": options.ranks, "tokens": options.tokens, "dim": options.dim, "torch": torch.__version__}
    options.report_dir.mkdir(parents=True, exist_ok=True)
    report = options.report_dir / "gather.json"
    report.write_text(json.dumps({"schema": 1, **shape, "results": result}, indent=2) + "\n", encoding="utf-8")
    shown = Table("measured", "version", "median", "quartiles", "to the best", title=str(shape))
    for what, rows in result.items():
        for name, row in rows.items():
            spread = f"{row['lower_quartile']:.4g} to {row['upper_quartile']:.4g}"
            shown.add_row(what, name, f"{row['median']:.4g}", spread, f"{row['ratio_to_best']:.3f}")
    Console(width=120).print(shown)
    print(f"report: {report}")
    return 0


def _with_trees(arguments: list[str]) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as place:
            work = Path(place)
            loaded = manifest.load(PATCHES)
            _, target = loaded.select(None)
            git = worktree.Git(work / "home", loaded.identity)
            fetch.unpack_wheel(fetch.fetch_wheel(target.wheel, WHEEL_CACHE, lambda line: None), work / "stock")
            worktree.commit_all(git, work / "stock", target.wheel.filename)
            worktree.second_tree(git, work / "stock", work / "patched")
            files = [PATCHES / target.series / patch.file for patch in target.patches]
            worktree.apply_series(git, work / "patched", files, False, lambda line: None)
            # The package alone: the patches bring a `tests` of their own.
            (work / "import").mkdir()
            (work / "import" / target.package).symlink_to(work / "patched" / target.package)
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(work / "import"), str(REPOSITORY)])}
            command = [sys.executable, "-m", "ci.bench.gather", "--stock", str(work / "stock"), *arguments]
            return subprocess.run(command, env=environment, check=False).returncode
    except RegressError as exc:
        print(exc, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

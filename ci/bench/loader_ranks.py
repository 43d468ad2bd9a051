# SPDX-License-Identifier: Apache-2.0
"""How often a save and a load on several ranks read the metadata, and which collectives they enter."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.world import RankContext, run_world

_opened: Counter[str] = Counter()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        mode = arguments[1]
        name = Path(os.fspath(arguments[0])).name
        if name == ".metadata" and (mode is None or "r" in str(mode)):
            _opened[name] += 1


class _Collectives(TorchDispatchMode):
    """Counts what reaches the process group, by operation, with the greatest size of one in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional") and "wait" not in str(func):
            self.calls[str(func).split(".")[1]] += 1
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.largest = max([self.largest, *(tensor.nbytes for tensor in tensors)])
        return func(*args, **(kwargs or {}))


def count(context: RankContext, side: str) -> dict[str, Any]:
    """One save and one load of a model under FSDP2, of which one layer was never updated (``stock``: all were)."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if side == "patched":
        import nemo_automodel_shim

        nemo_automodel_shim.install()
    from tests.contracts.automodel.upstream import plain_checkpointer

    mesh = init_device_mesh("cpu", (context.world_size,))
    torch.manual_seed(0)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    updated = list(model.parameters())[: None if side == "stock" else -2]
    for param in updated:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    path = context.directory / "checkpoint"
    checkpointer = plain_checkpointer(path, context.rank)
    found: dict[str, Any] = {}
    other = build()
    sys.addaudithook(_watch)
    for operation, pair in (("save", (model, optimizer)), ("load", other)):
        _opened.clear()
        with _Collectives() as collectives:
            action = checkpointer.save_optimizer if operation == "save" else checkpointer.load_optimizer
            action(pair[1], pair[0], str(path))
        found[operation] = {
            "metadata_reads": _opened[".metadata"],
            "collectives": dict(sorted(collectives.calls.items())),
            "largest_bytes": collectives.largest,
        }
    assert len(other[1].state) == len(updated)
    return found


def main(side: str, ranks: str, directory: str) -> None:
    """Print the counts as JSON: metadata reads of all ranks together, collectives of one."""
    by_rank = run_world(count, int(ranks), Path(directory), args=(side,), deadline=180, pg_timeout=90)
    summed = {
        operation: {
            "metadata_reads": sum(rank[operation]["metadata_reads"] for rank in by_rank),
            "collectives": by_rank[-1][operation]["collectives"],
            "largest_bytes": max(rank[operation]["largest_bytes"] for rank in by_rank),
        }
        for operation in ("save", "load")
    }
    print(json.dumps(summed))


if __name__ == "__main__":
    import ci.bench.loader_ranks as importable  # the ranks import the body by its module's name

    importable.main(*sys.argv[1:])

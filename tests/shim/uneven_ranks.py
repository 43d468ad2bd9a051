# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of saves in which the ranks' optimizers do not agree, through the shim's own ``Checkpointer``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nemo_automodel_shim.components.checkpoint import checkpointing
from tests.shim.layout_ranks import Party, Silent, give
from tests.support.training import differences, snapshot
from tests.support.world import RankContext


class Checkpointer(checkpointing.Checkpointer):
    """The shim's methods over plain DCP, with what they take from the release's class."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(is_peft=False, is_async=False)
        self._optim_ctx = SimpleNamespace(future=None)

    def _do_save(self, state: dict[str, Any], path: str, storage_writer: Any = None) -> None:
        dcp.save(state, checkpoint_id=path)


def _build(names: tuple[str, ...], sharded: bool) -> Party:
    model = nn.ModuleDict()
    generator = torch.Generator().manual_seed(3)
    for name in names:
        data = torch.randn(4, 3, generator=generator)
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
            data = distribute_tensor(data, mesh, [Shard(0)])
        model[name] = nn.Module()
        model[name].weight = nn.Parameter(data)
    return Party(model, torch.optim.AdamW(model.parameters(), lr=0.1))


# name -> names a rank, whether sharded, and how often each name is updated on each rank
CASES: dict[str, tuple[bool, list[dict[str, int]]]] = {
    "sharded, state on one rank": (True, [{"used": 2, "late": 2}, {"used": 2, "late": 0}]),
    "sharded, no state on the first rank": (True, [{"used": 2, "late": 0}, {"used": 2, "late": 1}]),
    "sharded, counters differ": (True, [{"used": 3}, {"used": 2}]),
    "replicated, state on one rank": (False, [{"used": 2, "late": 2}, {"used": 2, "late": 0}]),
    "replicated, counters differ": (False, [{"used": 3}, {"used": 2}]),
    "nothing on one rank": (True, [{"used": 2}, {"used": 0}]),
    # These are right as they are.
    "the same everywhere": (True, [{"used": 2, "late": 0}, {"used": 2, "late": 0}]),
    "each rank its own": (False, [{"first": 3}, {"second": 1}]),
    "each rank its own, one cold": (False, [{"first": 3}, {"second": 0}]),
}
EVEN = ("the same everywhere", "each rank its own", "each rank its own, one cold")


def save_unevenly(context: RankContext, directory: str) -> dict[str, dict[str, Any]]:
    """For each case: what the save said, what it changed, and what a resume from it differs in."""
    found = {}
    for number, (case, (sharded, by_rank)) in enumerate(CASES.items()):
        counts = by_rank[context.rank % len(by_rank)]
        party = _build(tuple(counts), sharded)
        for step in range(max(max(each.values()) for each in by_rank)):
            for name, count in counts.items():
                if step < count:
                    give(party.model[name].weight, step)
            party.optimizer.step()
            party.optimizer.zero_grad()
        before, text = party.snapshot(), None
        place = str(Path(directory) / str(number))
        try:
            Checkpointer().save_optimizer(party.optimizer, party.model, place)
        except BaseException as failure:  # DCP's own derives from BaseException
            text = f"{type(failure).__name__}: {failure}"
        found[case] = {"text": text, "changed": differences(before, party.snapshot())}
        refusals: list[Any] = [None] * context.world_size
        dist.all_gather_object(refusals, text is not None)
        if not any(refusals):
            resumed = _build(tuple(counts), sharded)
            with torch.no_grad():
                for mine, theirs in zip(resumed.model.parameters(), party.model.parameters(), strict=True):
                    mine.copy_(theirs)
            try:
                Checkpointer().load_optimizer(resumed.optimizer, resumed.model, place)
                found[case]["resumed"] = differences(before, snapshot(resumed.model, resumed.optimizer, Silent()))
            except BaseException as failure:
                found[case]["resumed"] = [f"{type(failure).__name__}: {failure}"]
    return found

# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of saves and loads in many layouts: FSDP2, expert parallelism, both, tensor parallelism.

A checkpoint of any layout is loaded into any other, of another number of ranks too. Each run takes elementwise
gradients from the parameter itself, so that they are the same in every layout.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    load_optimizer_state,
    optimizer_state_dict,
)
from tests.support.optimizers import OPTIMIZERS
from tests.support.training import differences, snapshot
from tests.support.world import RankContext

NAMES = ("used", "late", "never")
EXPERTS, WIDTH, ROWS = 8, 4, 3  # three rows over four ranks: one shard is empty


class Block(nn.Module):
    """Two projections with biases, a norm's scale, and experts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, ROWS)
        self.down = nn.Linear(ROWS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.ones(EXPERTS, WIDTH, 2))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Only there because ``fully_shard`` wants it."""
        return self.down(self.up(data)) * self.scale


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies on ``ranks`` ranks."""

    name: str
    ranks: int
    place: Callable[[nn.Module], None]


def _fsdp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.values():
        fully_shard(block, mesh=mesh)


def _hsdp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.values():
        fully_shard(block, mesh=mesh)


def _experts(block: nn.Module, mesh: DeviceMesh) -> None:
    weight = distribute_tensor(block.experts.weight.detach(), mesh, [Shard(0)])
    block.experts.weight = nn.Parameter(weight)  # as ExpertParallel does


def _ep(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for block in model.values():
        _experts(block, mesh)


def _ep_fsdp(model: nn.Module) -> None:
    """Experts over half of the ranks, each expert over the other half; the rest over all, as upstream does it."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    whole = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in model.values():
        _experts(block, mesh["ep"])
        if world > 2:
            fully_shard(block.experts, mesh=mesh["ep_shard"], shard_placement_fn=lambda param: Shard(1))
        ignored = set(block.experts.parameters())
        fully_shard(block, mesh=whole, ignored_params=ignored)


def _ep_over_fsdp(model: nn.Module) -> None:
    """Experts over all ranks and the rest under FSDP2 over the same ones."""
    world = dist.get_world_size()
    ep = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    for block in model.values():
        _experts(block, ep)
        fully_shard(block, mesh=ep, ignored_params=set(block.experts.parameters()))


def _tp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.scale = nn.Parameter(distribute_tensor(block.scale.detach(), mesh, [Replicate()]))


def _tp_fsdp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.values():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for child in (block.up, block.down):
            fully_shard(child, mesh=mesh["dp"])


def _plain(model: nn.Module) -> None:
    """Replicated on every rank, without a mesh."""


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one", 1, _plain),
        Layout("fsdp-1", 1, _fsdp),
        Layout("fsdp-2", 2, _fsdp),
        Layout("fsdp-4", 4, _fsdp),
        Layout("hsdp-2x2", 4, _hsdp),
        Layout("ep-2", 2, _ep),
        Layout("ep-4", 4, _ep),
        Layout("ep-8", 8, _ep),
        Layout("ep-2-fsdp-2", 2, _ep_over_fsdp),
        Layout("ep-2x2-fsdp-4", 4, _ep_fsdp),
        Layout("ep-8-fsdp-8", 8, _ep_over_fsdp),
        Layout("tp-2", 2, _tp),
        Layout("tp-2x2-fsdp", 4, _tp_fsdp),
    )
}
# What each name gets: gradients before the save, and after it.
BEFORE, AFTER = ("used",), ("used", "late")


@dataclasses.dataclass
class Party:
    """A model in a layout with its optimizer."""

    model: nn.ModuleDict
    optimizer: torch.optim.Optimizer

    def train(self, steps: range, names: tuple[str, ...]) -> None:
        """Give the parameters of ``names`` a gradient each step."""
        for step in steps:
            for name, param in self.model.named_parameters():
                if name.partition(".")[0] in names:
                    give(param, step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, Any]:
        """This rank's shards, state, and groups."""
        return snapshot(self.model, self.optimizer, Silent())


class Silent:
    def state_dict(self) -> dict[str, Any]:
        return {}


def give(param: nn.Parameter, step: int) -> None:
    with torch.no_grad():
        local = param.to_local() if isinstance(param, DTensor) else param
        value = local * 0.5 + (step % 3 - 1) * 0.25
        if isinstance(param, DTensor):
            value = DTensor.from_local(
                value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
    param.grad = value


def build(layout: Layout, optimizer: str) -> Party:
    """The model from its seed, placed, with a fresh optimizer."""
    generator = torch.Generator().manual_seed(11)
    model = nn.ModuleDict({name: Block() for name in NAMES})
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    layout.place(model)
    return Party(model, OPTIMIZERS[optimizer].make(model.parameters()))


def save_all(context: RankContext, plan: list[tuple[str, str, int]], directory: str) -> None:
    """Save a run for each (layout, optimizer, steps) of the plan."""
    for name, optimizer, steps in plan:
        party = build(LAYOUTS[name], optimizer)
        party.train(range(steps), BEFORE)
        before = party.snapshot()
        dcp.save(
            {"optim": optimizer_state_dict(party.model, party.optimizer)},
            checkpoint_id=str(Path(directory) / f"{name}-{optimizer}-{steps}"),
        )
        assert differences(before, party.snapshot()) == [], (name, optimizer, steps)


def load_all(
    context: RankContext, plan: list[tuple[str, str, str, int]], directory: str
) -> list[tuple[tuple[str, str, str, int], list[str]]]:
    """Load each (saved layout, layout, optimizer, steps); what differs from the run that never stopped."""
    found = []
    for source, name, optimizer, steps in plan:
        alone, resumed = build(LAYOUTS[name], optimizer), build(LAYOUTS[name], optimizer)
        alone.train(range(steps), BEFORE)
        resumed.train(range(80, 81), ("late",))
        with torch.no_grad():
            for mine, theirs in zip(resumed.model.parameters(), alone.model.parameters(), strict=True):
                mine.copy_(theirs)
        path = str(Path(directory) / f"{source}-{optimizer}-{steps}")
        load_optimizer_state([resumed.model], [resumed.optimizer], None, path)
        paths = differences(alone.snapshot(), resumed.snapshot())
        for party in (alone, resumed):
            party.train(range(steps, steps + 3), AFTER)
        paths += [f"later{path}" for path in differences(alone.snapshot(), resumed.snapshot())]
        found.append(((source, name, optimizer, steps), paths))
    return found


def ranks_of(names: list[str]) -> list[tuple[int, list[str]]]:
    """Layouts by their number of ranks, since each number takes a world of its own."""
    ordered = sorted(names, key=lambda name: LAYOUTS[name].ranks)
    return [(ranks, list(group)) for ranks, group in itertools.groupby(ordered, lambda name: LAYOUTS[name].ranks)]


COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "send", "recv"),
)


def costs_of_a_load(context: RankContext, directory: str) -> tuple[int, list[str]]:
    """How often this rank opens the metadata in a load, and the collectives that the load enters."""
    party, other = (build(LAYOUTS["fsdp-4"], "adamw") for _ in range(2))
    party.train(range(2), BEFORE)
    dcp.save({"optim": optimizer_state_dict(party.model, party.optimizer)}, checkpoint_id=directory)
    opened: list[str] = []
    entered: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".metadata"):
            opened.append(str(arguments[0]))

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            entered.append(name)
            return function(*args, **kwargs)

        return call

    # The processes of a world are its own: nothing has to be taken back.
    sys.addaudithook(watch)
    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name)))
    load_optimizer_state([other.model], [other.optimizer], None, directory)
    return len(opened), entered

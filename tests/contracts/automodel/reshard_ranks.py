# SPDX-License-Identifier: Apache-2.0
"""Rank bodies: a model under expert parallelism and FSDP2 is saved on some ranks and loaded on fewer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.contracts.automodel.upstream import ExpertParallel, plain_checkpointer
from tests.contracts.outcomes import PreconditionError
from tests.support.world import RankContext

NAMES = ("used", "late", "never")


class Experts(nn.Module):
    """Experts in one tensor, as the release's are."""

    def __init__(self) -> None:
        super().__init__()
        self.projs = nn.Parameter(torch.ones(4, 3, 2))


class Block(nn.Module):
    """A projection of three rows, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3)
        self.experts = Experts()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Only there because ``fully_shard`` wants it."""
        return self.proj(data)


def _build(context: RankContext) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("ep",))
    generator = torch.Generator().manual_seed(5)
    model = nn.ModuleDict({name: Block() for name in NAMES})
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    for block in model.values():
        ExpertParallel()._apply(block.experts, mesh)
        fully_shard(block, mesh=mesh, ignored_params=set(block.experts.parameters()))
    if not all(isinstance(param, DTensor) for param in model.parameters()):
        raise PreconditionError("some parameters are not sharded")
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def give_gradient(param: torch.Tensor, step: int) -> None:
    """Set a gradient that is elementwise in the parameter, so that it is the same in every layout."""
    local = param.detach().to_local() * 0.5 + 0.25 * step
    param.grad = DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _train(model: nn.ModuleDict, optimizer: torch.optim.Optimizer, names: tuple[str, ...], steps: range) -> None:
    for step in steps:
        for name in names:
            for param in model[name].parameters():
                give_gradient(param, step)
        optimizer.step()
        optimizer.zero_grad()


def in_full(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters and state in full, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        values = {"parameter": param.detach(), **optimizer.state.get(param, {})}
        found[name] = {
            entry: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for entry, value in values.items()
        }
    return found


def save_partial(context: RankContext, path: str) -> None:
    """Train the layers of ``used`` alone, and save."""
    model, optimizer = _build(context)
    _train(model, optimizer, ("used",), range(3))
    plain_checkpointer(path, context.rank).save_optimizer(optimizer, model, path)


def resume(context: RankContext, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """On this number of ranks: the run that never stopped and the resumed one, in full."""
    model, optimizer = _build(context)
    _train(model, optimizer, ("used",), range(3))
    resumed, fresh = _build(context)
    with torch.no_grad():
        for mine, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    plain_checkpointer(path, context.rank).load_optimizer(fresh, resumed, path)
    for pair in ((model, optimizer), (resumed, fresh)):
        _train(*pair, ("used", "late"), range(3, 6))
    return in_full(model, optimizer), in_full(resumed, fresh)

# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of gather contracts about training: FSDP2, checkpointing, accumulation, clipping, a saved optimizer."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.contracts.automodel import impostors
from tests.contracts.automodel.gather_ranks import DIM, EXPERTS, Case, Sums, build_layer, ep_mesh, shard, sums, tokens
from tests.contracts.automodel.upstream import (
    HAS_SELECTIVE_CHECKPOINTING,
    apply_ac,
    apply_ep,
    apply_fsdp,
    plain_checkpointer,
    scale_grads_and_clip_grad_norm,
)
from tests.contracts.outcomes import PreconditionError
from tests.support.training import differences, snapshot
from tests.support.world import RankContext

# How the blocks are checkpointed: the options of upstream's apply_ac, or None.
CHECKPOINTING: dict[str, dict[str, bool] | None] = {
    "none": None,
    "router-saved": {"ignore_router": True},
    "router-recomputed": {"ignore_router": False},
    **({"selective": {"selective": True}} if HAS_SELECTIVE_CHECKPOINTING else {}),
}
MAX_NORM = 0.5
MICRO_BATCHES = 2


class Block(nn.Module):
    """A linear layer, and a MoE layer above it."""

    def __init__(self, seed: int, case: Case) -> None:
        super().__init__()
        self.below = nn.Linear(DIM, DIM)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.below.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
        self.mlp = build_layer(case, seed=seed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of shape [batch, tokens, dim] to the same; what the router sees is positive."""
        return hidden + self.mlp(nn.functional.softplus(self.below(hidden)))


class Model(nn.Module):
    """Two blocks in upstream's layout; the first sends every token to the experts of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        first, second = Case("idle", layout="idle-experts"), Case("busy", options=(("n_shared_experts", 1),))
        self.model.layers = nn.ModuleDict({"0": Block(31, first), "1": Block(32, second)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of shape [tokens, dim] to the same."""
        hidden = hidden.unsqueeze(0)
        for layer in self.model.layers.values():
            hidden = layer(hidden)
        return hidden[0]


def training_steps(context: RankContext) -> dict[str, dict[str, Any]]:
    """One optimizer step's gradients under EP and FSDP2 over the same ranks, for each way of checkpointing.

    Two micro-batches are accumulated (in the second the last rank has no token), and upstream's function scales and
    clips.

    Returns:
        By way of checkpointing: ``norm`` before clipping and what it should be, ``gradients`` by parameter as
        ``Sums`` of this rank's shards, or None.
    """
    with impostors.from_environment():
        return {name: _training_step(context, options) for name, options in CHECKPOINTING.items()}


def _training_step(context: RankContext, checkpointing: dict[str, bool] | None) -> dict[str, Any]:
    size = context.world_size
    layouts = [Case("", layout=layout).counts(size) for layout in ("uneven", "empty-rank")]
    batches = [tokens(Case(""), sum(counts), number) for number, counts in enumerate(layouts)]

    reference = Model().to(context.device)
    for batch in batches:
        reference(batch.to(context.device)).square().sum().backward()
    # FSDP2 averages over the ranks, and upstream divides the experts' gradients likewise.
    right = {name: param.grad / size for name, param in reference.named_parameters()}
    right_norm = float(torch.stack([grad.norm() for grad in right.values()]).norm())
    if right_norm < 2 * MAX_NORM:
        raise PreconditionError(f"nothing to clip: the norm is {right_norm}")

    model = Model().to(context.device)
    moe_mesh, _ = ep_mesh(context)
    world = init_device_mesh(context.device.type, (size,), mesh_dim_names=("dp",))
    apply_ep(model, moe_mesh)
    if checkpointing is not None:
        apply_ac(model, hidden_size=DIM, num_experts=EXPERTS, **checkpointing)
    apply_fsdp(model, world, ep_enabled=True, ep_shard_enabled=False, mp_policy=MixedPrecisionPolicy())
    for batch, counts in zip(batches, layouts, strict=True):
        start = sum(counts[: context.rank])
        mine = batch[start : start + counts[context.rank]].to(context.device)
        model(mine).square().sum().backward()
    norm = scale_grads_and_clip_grad_norm(
        MAX_NORM, [model], device_mesh=world, moe_mesh=moe_mesh, ep_axis_name="ep", dp_group_size=size
    )
    found: dict[str, Sums | None] = {}
    for name, param in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "")
        want = right[plain] * (MAX_NORM / right_norm)
        if param.grad is None:
            found[plain] = None
            continue
        if not isinstance(param.grad, DTensor):
            raise PreconditionError(f"{name} is not sharded")
        found[plain] = sums(param.grad.full_tensor(), want)
    return {"norm": (float(norm), right_norm), "gradients": found}


def bias_checkpoint(context: RankContext) -> list[str]:
    """AdamW on experts with bias whose router chooses the experts of rank 0: save, resume in a fresh run, go on.

    Returns:
        Where the resumed run and the one that was not stopped differ, on this rank; empty where they are equal.
    """
    case = Case("gpt-oss", layout="idle-experts", options=(("expert_bias", True),))

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        layer = build_layer(case, context.device)
        mesh, _ = ep_mesh(context)
        shard(layer, mesh)
        optimizer = torch.optim.AdamW(layer.experts.parameters(), lr=1e-2)
        return layer, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    def step(layer: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, number: int) -> None:
        hidden = tokens(case, 4, 10 * number + context.rank).to(context.device)
        layer(hidden.unsqueeze(0)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    run = start()
    for number in range(2):
        step(*run, number)
    path = str(context.directory / "checkpoint")
    plain_checkpointer(path, context.rank).save_optimizer(run[1], run[0], path, run[2])
    dist.barrier()
    other = start()
    with torch.no_grad():
        for param, source in zip(other[0].parameters(), run[0].parameters(), strict=True):
            param.copy_(source)
    plain_checkpointer(path, context.rank).load_optimizer(other[1], other[0], path, other[2])
    found = differences(snapshot(*run), snapshot(*other))
    for number in range(2, 6):
        step(*run, number)
        step(*other, number)
    found += differences(snapshot(*run), snapshot(*other))
    cold = [name for name, param in run[0].experts.named_parameters() if param not in run[1].state]
    return found + [f"{name} has no state" for name in cold]


@impostors.from_environment()
def compiled_rest(context: RankContext) -> dict[str, Any]:
    """A block whose parts around the experts are compiled, against one process that compiles nothing.

    The release's expert activations are compiled by it, with inductor; here they are not, since that takes longer
    than all else, and the experts' collectives stay out of the graph as a graph break.

    Returns:
        Number of compiled graphs; ``Sums`` of the hidden states' gradient, and of the router's over all ranks.
    """
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    case = Case("compiled", options=(("expert_activation", "relu2"), ("n_shared_experts", 1)))
    counts = case.counts(context.world_size)
    everything = tokens(case, sum(counts)).to(context.device)
    mine = slice(sum(counts[: context.rank]), sum(counts[: context.rank + 1]))
    blocks = []
    for _ in range(2):
        block = Block(33, case).to(context.device)
        activation = block.mlp.experts.expert_activation_grouped
        block.mlp.experts.expert_activation_grouped = getattr(activation, "_torchdynamo_orig_callable", activation)
        blocks.append(block)
    reference, block = blocks
    right = everything.clone().requires_grad_()
    reference(right.unsqueeze(0)).square().sum().backward()

    shard(block.mlp, ep_mesh(context)[0])
    block.mlp.experts.forward = torch._dynamo.disable(block.mlp.experts.forward)
    hidden = everything[mine].clone().requires_grad_()
    # The sides run with it, for the sake of the activations.
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"), torch._dynamo.config.patch(disable=False):
        torch.compile(block, backend=keep)(hidden.unsqueeze(0)).square().sum().backward()
    gate = block.mlp.gate.weight.grad
    if gate is not None:
        dist.all_reduce(gate)
    return {
        "graphs": len(graphs),
        "hidden": sums(hidden.grad, right.grad[mine]),
        "gate": None if gate is None else sums(gate, reference.mlp.gate.weight.grad),
    }

# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of the gather contracts: one MoE layer of the release, under EP and in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.contracts.automodel.upstream import ExpertParallel, MoE, MoEConfig, cpu_backend
from tests.contracts.outcomes import PreconditionError
from tests.support.world import RankContext

DIM, EXPERTS, TOP_K = 16, 8, 2


def build_layer(**options: object) -> MoE:
    """An fp32 MoE layer of the release with seeded weights."""
    config = MoEConfig(
        **{
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 0,
            "n_activated_experts": TOP_K,
            "n_expert_groups": 0,
            "n_limited_groups": 0,
            "train_gate": True,
            "gate_bias_update_factor": 0.0,
            "aux_loss_coeff": 0.0,
            "score_func": "softmax",
            "softmax_before_topk": True,
            "route_scale": 1.0,
            "dim": DIM,
            "inter_dim": DIM,
            "moe_inter_dim": DIM,
            "norm_topk_prob": True,
            "dtype": torch.float32,
            **options,
        }
    )
    layer = MoE(config, cpu_backend())
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return layer


def run_layer(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Forward and backward; returns the gradient of the hidden states, of shape [tokens, dim]."""
    hidden = hidden.clone().requires_grad_()
    layer(hidden.unsqueeze(0)).square().sum().backward()
    return hidden.grad


def gradients(context: RankContext, counts: list[int], options: dict[str, object]) -> dict[str, object]:
    """Gradients of this rank's layer under EP, and of the same layer in one process on all tokens.

    Args:
        context: The rank.
        counts: Number of tokens of each rank.
        options: Overrides of the layer's config.

    Returns:
        ``gate``, ``hidden``: this rank's gradients and their references; ``experts``: by name, likewise, the
        reference cut to this rank's experts; ``received``: tokens routed to this rank's experts.
    """
    everything = torch.randn(sum(counts), DIM, generator=torch.Generator().manual_seed(12))
    start = sum(counts[: context.rank])
    reference = build_layer(**options)
    reference_hidden = run_layer(reference, everything)
    with torch.no_grad():
        chosen = reference.gate(everything, torch.ones(len(everything), dtype=torch.bool), None)[1]

    layer = build_layer(**options)
    mesh = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("ep",))
    parallelize_module(layer.experts, mesh, ExpertParallel())
    if not isinstance(layer.experts.gate_and_up_projs, DTensor):
        raise PreconditionError("the experts are not sharded over the EP ranks")
    hidden = run_layer(layer, everything[start : start + counts[context.rank]])

    share = EXPERTS // context.world_size
    mine = range(context.rank * share, (context.rank + 1) * share)
    found: dict[str, object] = {
        "gate": (layer.gate.weight.grad, reference.gate.weight.grad),
        "hidden": (hidden, reference_hidden[start : start + counts[context.rank]]),
        "experts": {
            name: (
                None if param.grad is None else param.grad.to_local(),
                dict(reference.experts.named_parameters())[name].grad[mine.start : mine.stop],
            )
            for name, param in layer.experts.named_parameters()
        },
        "received": int(sum((chosen == expert).sum() for expert in mine)),
    }
    # The router is replicated: its gradient is the sum over ranks, where every rank has one.
    present = torch.tensor([layer.gate.weight.grad is not None], dtype=torch.int64)
    dist.all_reduce(present)
    if int(present) == context.world_size:
        total = layer.gate.weight.grad.clone()
        dist.all_reduce(total)
        found["gate"] = (total, reference.gate.weight.grad)
    return found


def empty_everywhere(context: RankContext) -> None:
    """Forward and backward where no rank has a token."""
    layer = build_layer()
    mesh = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("ep",))
    parallelize_module(layer.experts, mesh, ExpertParallel())
    run_layer(layer, torch.empty(0, DIM))


def skewed_bias(context: RankContext) -> dict[str, object]:
    """Experts with bias and a router that chooses experts 0 and 1 only: which gradients exist on this rank."""
    layer = build_layer(expert_bias=True)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[:TOP_K] = 1.0
    mesh = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("ep",))
    parallelize_module(layer.experts, mesh, ExpertParallel())
    hidden = torch.rand(4, DIM, generator=torch.Generator().manual_seed(13)) + 0.1
    with torch.no_grad():
        chosen = layer.gate(hidden, torch.ones(4, dtype=torch.bool), None)[1]
    if not bool((chosen < TOP_K).all()):
        raise PreconditionError(f"the router chose other experts than 0 and 1: {chosen.tolist()}")
    run_layer(layer, hidden)
    return {name: param.grad is not None for name, param in layer.experts.named_parameters()}

# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of the gather contracts: one MoE layer of the release, under EP and in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.contracts.automodel import impostors
from tests.contracts.automodel.upstream import ExpertParallel, MoE, MoEConfig, cpu_backend
from tests.contracts.outcomes import PreconditionError
from tests.support.world import RankContext

DIM, EXPERTS, TOP_K = 16, 8, 2
Sums = tuple[float, float]  # squared norm of a difference, squared norm of what is right


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the layer, and how the tokens lie.

    ``layout``: ``uneven``, ``empty-rank`` (the last rank has no token), ``idle-experts`` (a router that chooses the
    first experts only, so that the experts of other ranks get no token).
    """

    name: str
    experts: str = "torch"
    layout: str = "uneven"
    groups: int = 1  # EP groups side by side in the world
    options: tuple[tuple[str, object], ...] = ()
    dtype: torch.dtype = torch.float32

    def counts(self, size: int, group: int = 0) -> list[int]:
        """Tokens of each rank of an EP group: never even, so that an average or a wrong slice shows."""
        counts = [(5, 3, 7, 2, 4, 1, 6, 3)[(rank + 3 * group) % 8] for rank in range(size)]
        if self.layout == "empty-rank":
            counts[-1] = 0
        return counts


def build_layer(
    case: Case | None = None, device: torch.device | str = "cpu", seed: int = 11, **options: object
) -> nn.Module:
    """A MoE layer of the release with seeded weights, in the dtype of the case (fp32 without one)."""
    case = case or Case("plain")
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
            "dtype": case.dtype,
            **dict(case.options),
            **options,
        }
    )
    layer = MoE(config, cpu_backend(experts=case.experts)).to(case.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
        if layer.gate.e_score_correction_bias is not None:
            # Enough to change the choice, not the weights.
            layer.gate.e_score_correction_bias.copy_(torch.randn(EXPERTS, generator=generator) * 0.1)
        if case.layout == "idle-experts":
            layer.gate.weight[TOP_K:] = 0
            layer.gate.weight[:TOP_K] = layer.gate.weight[:TOP_K].abs()
    return layer.to(device)


def tokens(case: Case, count: int, group: int = 0) -> torch.Tensor:
    """Seeded hidden states of shape [count, dim] on the CPU."""
    drawn = torch.randn(count, DIM, generator=torch.Generator().manual_seed(12 + group))
    return (drawn.abs() + 0.1 if case.layout == "idle-experts" else drawn).to(case.dtype)


def shard(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts as upstream does."""
    parallelize_module(layer.experts, mesh, ExpertParallel())
    if not isinstance(layer.experts.gate_and_up_projs, DTensor):
        raise PreconditionError("the experts are not sharded over the EP ranks")


def ep_mesh(context: RankContext, groups: int = 1) -> tuple[DeviceMesh, int]:
    """The mesh of this rank's EP group, and the number of the group."""
    if groups == 1:
        return init_device_mesh(context.device.type, (context.world_size,), mesh_dim_names=("ep",)), 0
    shape = (groups, context.world_size // groups)
    mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=("replica", "ep"))
    return mesh["ep"], mesh.get_local_rank("replica")


def run_layer(layer: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward; output and gradient of the hidden states, both of shape [tokens, dim]."""
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden.unsqueeze(0))[0]
    output.float().square().sum().backward()
    return output.detach(), hidden.grad


def sums(got: torch.Tensor, want: torch.Tensor) -> Sums:
    """What a relative norm of the difference is made of, summed in float64."""
    got, want = got.double(), want.double()
    return float((got - want).square().sum()), float(want.square().sum())


def compare(context: RankContext, cases: list[Case]) -> list[dict[str, Any]]:
    """Each case under EP over this world, against the same layer in one process, in fp32, on all tokens.

    Args:
        context: The rank.
        cases: What to run.

    Returns:
        For each case: ``output``, ``hidden``, and ``sharded`` and ``replicated`` by parameter, as ``Sums`` of this
        rank, or None where this rank has no gradient; ``received``: tokens routed to this rank's experts.
    """
    with impostors.from_environment():
        return [_compare(context, case) for case in cases]


def _compare(context: RankContext, case: Case) -> dict[str, Any]:
    mesh, number = ep_mesh(context, case.groups)
    rank, size = mesh.get_local_rank(), mesh.size()
    counts = case.counts(size, number)
    everything = tokens(case, sum(counts), number).to(context.device)
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    layer = build_layer(case, context.device)
    reference = build_layer(dataclasses.replace(case, dtype=torch.float32), context.device)
    with torch.no_grad():
        for param, source in zip(reference.parameters(), layer.parameters(), strict=True):
            param.copy_(source)  # for bf16: the rounded weights, so that only the arithmetic differs
    right_output, right_hidden = run_layer(reference, everything.float())
    with torch.no_grad():
        mask = torch.ones(len(everything), dtype=torch.bool, device=context.device)
        chosen = reference.gate(everything.float(), mask, None)[1].sort(dim=-1).values
        here = layer.gate(everything[mine], mask[mine], None)[1].sort(dim=-1).values
    if not torch.equal(chosen[mine], here):
        raise PreconditionError(f"{case.name}: the router chose other experts than in one process")

    shard(layer, mesh)
    output, hidden = run_layer(layer, everything[mine])
    share = EXPERTS // size
    experts = range(rank * share, (rank + 1) * share)
    right = {name: param.grad for name, param in reference.named_parameters()}
    found: dict[str, Any] = {
        "case": case.name,
        "output": sums(output, right_output[mine]),
        "hidden": sums(hidden, right_hidden[mine]),
        "sharded": {},
        "replicated": {},
        "received": int(sum((chosen == expert).sum() for expert in experts)),
    }
    for name, param in layer.named_parameters():
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if name.startswith("experts."):
            found["sharded"][name] = None if grad is None else sums(grad, right[name][experts.start : experts.stop])
            continue
        # Replicated: the gradient is the sum over the ranks, where every rank has one. Summed in fp32, so that the
        # comparison adds no rounding of its own.
        present = torch.tensor([grad is not None], dtype=torch.int64, device=context.device)
        dist.all_reduce(present, group=mesh.get_group())
        total = None if grad is None else grad.float()
        if int(present) == size:
            dist.all_reduce(total, group=mesh.get_group())
        found["replicated"][name] = None if total is None else sums(total, right[name])
    if case.layout == "uneven" and not found["received"]:
        raise PreconditionError(f"{case.name}: the experts of rank {rank} of {size} got no token")
    if case.layout == "idle-experts" and int(chosen.max()) >= TOP_K:
        raise PreconditionError(f"{case.name}: the router chose other experts than 0 and 1")
    return found


# --------------------------------------------------------------------------------------- no tokens, idle experts


@impostors.from_environment()
def empty_everywhere(context: RankContext, backends: list[str]) -> list[str]:
    """Forward and backward where no rank has a token; which gradients are not there, or not zero."""
    wrong = []
    for backend in backends:
        layer = build_layer(Case("empty", experts=backend, options=(("expert_bias", True),)), context.device)
        mesh, _ = ep_mesh(context)
        shard(layer, mesh)
        output, hidden = run_layer(layer, torch.empty(0, DIM, device=context.device))
        if output.shape != (0, DIM) or hidden is None:
            wrong.append(f"{backend}: output of shape {list(output.shape)}, hidden-state gradient {hidden}")
        for name, param in layer.named_parameters():
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            # Whether biases and router have one at all is the business of other contracts.
            if grad is None and (name.endswith("_bias") or name.startswith("gate.")):
                continue
            if grad is None or bool(grad.ne(0).any()):
                wrong.append(f"{backend}: {name}: {'no gradient' if grad is None else 'not zero'}")
    return wrong


@impostors.from_environment()
def skewed_bias(context: RankContext, backends: list[str]) -> dict[str, Any]:
    """Experts with bias and a router that chooses experts 0 and 1 only: which gradients exist, and their error."""
    found: dict[str, Any] = {}
    for backend in backends:
        case = Case(backend, experts=backend, layout="idle-experts", options=(("expert_bias", True),))
        found[backend] = _compare(context, case)["sharded"]
    return found


# ------------------------------------------------------------------------------------------ who else is touched


def shared_gradient(context: RankContext) -> dict[str, Any]:
    """The gradient of what was gathered is also somebody else's: is that one changed by the backward?

    The experts get ``gathered + other``, so one gradient tensor belongs to both. What ``other`` gets must be this
    rank's own, not a sum over ranks.

    Returns:
        For hidden states and routing weights: whether it is, and ``Sums`` of the difference.
    """
    with impostors.from_environment():
        return {name: _shared(context, position) for position, name in enumerate(("hidden states", "routing weights"))}


def _shared(context: RankContext, position: int) -> dict[str, Any]:
    layer = build_layer(device=context.device)
    mesh, _ = ep_mesh(context)
    shard(layer, mesh)
    counts = Case("").counts(context.world_size)
    leaf = torch.zeros(sum(counts), (DIM, TOP_K)[position], device=context.device, requires_grad=True)
    other = leaf * 1.0  # made before the gather, so that its backward comes after that of the gather
    kept: list[torch.Tensor] = []
    forward = layer.experts._forward_loop

    def shared(*arguments: Any) -> torch.Tensor:
        both = arguments[position] + other
        both.register_hook(lambda grad: kept.append(grad.clone()))
        return forward(*arguments[:position], both, *arguments[position + 1 :])

    layer.experts._forward_loop = shared
    hidden = tokens(Case(""), sum(counts)).to(context.device)
    start = sum(counts[: context.rank])
    run_layer(layer, hidden[start : start + counts[context.rank]])
    if len(kept) != 1 or not bool(kept[0].ne(0).any()):
        raise PreconditionError(f"{len(kept)} gradients of what was gathered were seen")
    return {"equal": torch.equal(leaf.grad, kept[0]), "error": sums(leaf.grad, kept[0])}


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Names of the collectives that this process enters, whoever calls them: the process group is asked."""
    entered: list[str] = []
    group_type = dist.ProcessGroup
    originals = {name: member for name, member in vars(group_type).items() if name in _COLLECTIVES}
    functions = {name: getattr(group_type, name) for name in originals}

    def counting(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            entered.append(name)
            return functions[name](*arguments, **keywords)

        return call

    try:
        for name in originals:
            setattr(group_type, name, counting(name))
        yield entered
    finally:
        for name, member in originals.items():
            setattr(group_type, name, member)  # as it stood in the class: what getattr returns would not bind


_COLLECTIVES = (
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce",
    "broadcast",
    "alltoall",
    "alltoall_base",
    "scatter",
    "gather",
    "barrier",
    "send",
    "recv",
)


@impostors.from_environment()
def collectives(context: RankContext) -> dict[str, Any]:
    """Collectives of forward and backward with a trainable and with a frozen router, and the graph of the latter."""
    found: dict[str, Any] = {}
    for name, trainable in (("trainable", True), ("frozen", False)):
        layer = build_layer(device=context.device)
        mesh, _ = ep_mesh(context)
        shard(layer, mesh)
        layer.gate.requires_grad_(trainable)
        weights: list[torch.Tensor] = []
        forward = layer.experts._forward_loop

        def seen(x: torch.Tensor, routed: torch.Tensor, *arguments: Any, keep=weights, forward=forward) -> torch.Tensor:
            keep.append(routed)
            return forward(x, routed, *arguments)

        layer.experts._forward_loop = seen
        hidden = tokens(Case(""), 3).to(context.device).requires_grad_()
        if not trainable:
            # A router's weights also depend on the hidden states: cut there, nothing is left that needs a gradient.
            gate = layer.gate.forward
            layer.gate.forward = lambda x, *rest, gate=gate: gate(x.detach(), *rest)
        with counted_collectives() as entered:
            output = layer(hidden.unsqueeze(0))
        in_forward = list(entered)
        with counted_collectives() as entered:
            output.square().sum().backward()
        found[name] = {"forward": in_forward, "backward": list(entered), "node": str(weights[0].grad_fn)}
    return found


@impostors.from_environment()
def frozen_on_one_rank(context: RankContext) -> str | None:
    """The router is frozen on the last rank only; the text of the error, or None where there is none."""
    layer = build_layer(device=context.device)
    mesh, _ = ep_mesh(context)
    shard(layer, mesh)
    hidden = tokens(Case(""), 3).to(context.device)
    if context.rank == context.world_size - 1:
        layer.gate.requires_grad_(False)
        gate = layer.gate.forward
        layer.gate.forward = lambda x, *rest: gate(x.detach(), *rest)
    try:
        run_layer(layer, hidden)
    except ValueError as error:
        return str(error)
    dist.barrier()
    return None


def skips_the_layer(context: RankContext) -> None:
    """The last rank leaves before the layer's first collective."""
    layer = build_layer(device=context.device)
    mesh, _ = ep_mesh(context)
    shard(layer, mesh)
    if context.rank < context.world_size - 1:
        run_layer(layer, tokens(Case(""), 3).to(context.device))

# SPDX-License-Identifier: Apache-2.0
"""Rank bodies: two MoE layers of the release under expert parallelism, with and without activation checkpointing."""

from __future__ import annotations

import re
from types import SimpleNamespace

import torch
from nemo_automodel.components.moe import parallelizer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointError

from tests.contracts.automodel import hybridep
from tests.contracts.automodel.upstream import MoE, MoEConfig, cpu_backend
from tests.contracts.outcomes import PreconditionError
from tests.support.world import RankContext

DIM, EXPERTS, TOP_K, LAYERS, TOKENS = 16, 8, 2, 2, 8


class Block(nn.Module):
    """A residual MoE layer."""

    def __init__(self, config: MoEConfig, backend: object) -> None:
        super().__init__()
        self.mlp = MoE(config, backend)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [batch, tokens, dim] to the same shape."""
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    """Blocks, in the places where the release looks for them."""

    def __init__(self, dispatcher: str, experts: str) -> None:
        super().__init__()
        options = {"dispatcher": dispatcher, "experts": "torch" if dispatcher == "torch" else experts}
        config = moe_config()
        self.config = SimpleNamespace(hidden_size=DIM, num_experts=EXPERTS)
        self.model = nn.Module()
        self.model.moe_config = config
        self.model.layers = nn.ModuleDict({str(n): Block(config, cpu_backend(**options)) for n in range(LAYERS)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [batch, tokens, dim] to the same shape."""
        for block in self.model.layers.values():
            hidden = block(hidden)
        return hidden


def moe_config() -> MoEConfig:
    """Eight fp32 experts, two a token."""
    return MoEConfig(
        n_routed_experts=EXPERTS,
        n_shared_experts=0,
        n_activated_experts=TOP_K,
        n_expert_groups=0,
        n_limited_groups=0,
        train_gate=True,
        gate_bias_update_factor=0.0,
        aux_loss_coeff=0.0,
        score_func="softmax",
        softmax_before_topk=True,
        route_scale=1.0,
        dim=DIM,
        inter_dim=DIM,
        moe_inter_dim=DIM,
        norm_topk_prob=True,
        dtype=torch.float32,
    )


def build(context: RankContext, dispatcher: str, experts: str = "torch_mm", **options: object) -> Model:
    """The seeded model, made parallel by the release.

    Args:
        context: The rank.
        dispatcher: Of the release's backend.
        experts: Which matrix products the experts take; ``gmm`` is a package that is absent, plain products stand in.
        options: For ``parallelize_model``.
    """
    model = Model(dispatcher, experts)
    generator = torch.Generator().manual_seed(31)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    # No data-parallel ranks: FSDP stays out of it.
    world = init_device_mesh("cpu", (1, context.world_size), mesh_dim_names=("dp", "other"))
    moe = init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("ep",))
    if dispatcher == "hybridep":
        hybridep.install(moe.get_group("ep"))
    parallelizer.parallelize_model(model, world, moe, dp_axis_names=("dp",), ep_axis_name="ep", **options)
    return model


def train(context: RankContext, dispatcher: str, options: dict[str, object]) -> dict[str, object]:
    """One forward and backward pass.

    Args:
        context: The rank.
        dispatcher: Of the release's backend.
        options: For ``build``.

    Returns:
        ``refused``: the message, where the set-up refuses, else None; then also ``output``, ``hidden`` (the hidden
        states' gradient), both of shape [1, tokens, dim], and ``grads``, the parameters' by name.

    Raises:
        PreconditionError: the passes do not agree on the routing, so that a failure would say nothing of the dispatch.
        Exception: whatever backward raises.
    """
    try:
        model = build(context, dispatcher, **options)
    except ValueError as exc:
        return {"refused": str(exc)}
    output, hidden = step(context, model)
    return {
        "refused": None,
        "output": output.detach(),
        "hidden": hidden.grad,
        "grads": {
            name.replace("_checkpoint_wrapped_module.", ""): getattr(param.grad, "_local_tensor", param.grad)
            for name, param in model.named_parameters()
        },
    }


def train_each(context: RankContext, cases: list[tuple[str, dict[str, object]]]) -> list[dict[str, object]]:
    """``train`` for each (dispatcher, options)."""
    return [train(context, dispatcher, options) for dispatcher, options in cases]


def step(context: RankContext, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward on this rank's tokens; output and hidden states, both of shape [1, tokens, dim]."""
    seen: list[tuple[bool, tuple[torch.Tensor, ...]]] = []
    for module in model.modules():
        if isinstance(module, MoE):
            module.experts.register_forward_pre_hook(lambda module, given: seen.append((in_backward(), given)))
    hidden = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(32 + context.rank)).requires_grad_()
    output = model(hidden)
    try:
        output.square().sum().backward()
    finally:
        check_routing(seen)
    return output, hidden


def drift(context: RankContext) -> dict[str, object]:
    """The same layers under torch's own checkpointing: what drifts is not a matter of ``apply_ac``.

    Returns:
        ``built``: rows of each layout that the buffer built; ``differences``: by how many rows the tensors of the
        ``CheckpointError`` differ; empty if there was none.
    """
    model = build(context, "hybridep")
    for name, block in list(model.model.layers.items()):
        model.model.layers[name] = checkpoint_wrapper(block)
    differences: list[int] = []
    try:
        step(context, model)
    except CheckpointError as exc:
        saved, again = (
            [int(rows) for rows in re.findall(rf"{which} metadata: .*?Size\(\[(\d+),", str(exc))]
            for which in ("saved", "recomputed")
        )
        differences = [one - other for one, other in zip(saved, again, strict=True)]
    return {"built": hybridep.buffer().built, "differences": differences}


def modes(context: RankContext, values: list[object]) -> list[tuple[bool, str | None]]:
    """What ``parallelize_model`` makes of each value: whether all blocks are checkpointed, and its error."""
    found = []
    for value in values:
        model = Model("torch", "torch")
        world = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        try:
            parallelizer.parallelize_model(model, world, None, dp_axis_names=("dp",), activation_checkpointing=value)
            error = None
        except ValueError as exc:
            error = str(exc)
        found.append((checkpointed(model), error))
    return found


def checkpointed(model: Model) -> bool:
    """Whether every block is."""
    return all(isinstance(block, CheckpointWrapper) for block in model.model.layers.values())


def in_backward() -> bool:
    """Whether this is called while autograd's engine runs."""
    return torch._C._current_graph_task_id() != -1


def check_routing(seen: list[tuple[bool, tuple[torch.Tensor, ...]]]) -> None:
    """Hold what the experts were given on recompute against forward: mask, weights, indices, tokens an expert.

    Args:
        seen: Of each call: whether it was in backward, and (hidden states, mask, weights, indices) of shapes
            [tokens, dim], [tokens], [tokens, top_k], [tokens, top_k].

    Raises:
        PreconditionError: they differ.
    """
    forward = [given for backward, given in seen if not backward]
    # Backward reaches the last layer first.
    for first, again in zip(reversed(forward), [given for backward, given in seen if backward], strict=False):
        counts = [torch.bincount(given[3].flatten(), minlength=EXPERTS) for given in (first, again)]
        same = [torch.equal(left, right) for left, right in zip(first, again, strict=True)]
        if not all(same) or not torch.equal(*counts):
            raise PreconditionError(f"recompute routes otherwise: {same}, {[one.tolist() for one in counts]}")

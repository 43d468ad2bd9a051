# SPDX-License-Identifier: Apache-2.0
"""The expert-parallel gather of routed tokens, with a backward for everything that requires a gradient.

``GroupedExperts`` of ``nemo_automodel/components/moe/experts.py`` gathers the tokens of all expert-parallel (EP)
ranks, lets each rank compute its own experts for all of them, and sums the results. In 0.4.0 and 0.5.0 the routing
weights are gathered without a backward (0.5.0: line 356), so neither the router nor the hidden states below it
receive the router's share of the gradient. On a rank whose experts receive no token the biases are left out, and with
no token on any rank the release fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class _GatherRows(torch.autograd.Function):
    """All-gather of rows whose number differs between ranks; the backward sums over the group."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.size(0)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=False)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Every rank used every row, so the gradient of a row is the sum over the ranks. The incoming gradient may
        # be shared with other nodes: reduce a copy.
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        rank = dist.get_rank(ctx.group)
        return total.narrow(0, sum(ctx.counts[:rank]), ctx.counts[rank]), None, None


def gather_rows(rows: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the rows of all ranks of ``group``.

    Where ``rows`` requires no gradient there is no graph node, and the backward enters no collective.

    Args:
        rows: Tensor of shape [counts[rank], ...], any dtype that the backend gathers.
        counts: Number of rows of each rank, the same list on every rank.
        group: The process group to gather over.

    Returns:
        Tensor of shape [sum(counts), ...] and of the dtype of ``rows``.
    """
    return _GatherRows.apply(rows, counts, group)


def exchange_counts(x: torch.Tensor, weights: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """Number of tokens of each rank; the ranks also agree on what has a backward, which is a collective.

    Args:
        x: Tensor of shape [tokens, dim], this rank's hidden states.
        weights: Tensor of shape [tokens, top_k], this rank's routing weights.
        group: The process group; the exchange runs on the device of ``x``.

    Returns:
        Number of tokens of each rank.

    Raises:
        ValueError: On every rank, if ``x`` or ``weights`` requires a gradient on some ranks only.
    """
    needed = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weights)]
    mine = torch.tensor([x.size(0), *needed], dtype=torch.int64, device=x.device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    counts, *flags = torch.stack(found).T.tolist()
    for name, required in zip(("hidden states", "routing weights"), flags, strict=True):
        if len(set(required)) > 1:
            ranks = [rank for rank, flag in enumerate(required) if flag]
            raise ValueError(
                f"The {name} require a gradient on expert-parallel ranks {ranks} of {len(required)} only. "
                "Freeze, or train, the router and the layers below on all ranks alike."
            )
    return counts


def zero_with_gradients(*tensors: torch.Tensor) -> torch.Tensor:
    """A zero (scalar, fp32) through which each tensor, of any shape, gets a gradient of zeros; no element is read."""
    return torch.stack([tensor[:0].sum(dtype=torch.float32) for tensor in tensors]).sum()


def with_biases(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``GroupedExpertsDeepEP.forward`` so that biases have a gradient where no token arrives.

    Its ``IndexError`` on a rank without tokens of its own whose experts receive none is not cured here; patch 0005
    does.
    """

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = forward(self, *args, **kwargs)
        if self.expert_bias:
            biases = (_local(bias, y.dtype) for bias in (self.gate_up_proj_bias, self.down_proj_bias))
            y = y + zero_with_gradients(*biases).to(y.dtype)
        return y

    return wrapped


class GroupedExperts:
    """Replacement parts for upstream's class of the same name; ``install`` puts them into it."""

    def forward(
        self, x: torch.Tensor, token_mask: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        """Compute the routed experts for the tokens of this rank.

        Args:
            x: Tensor of shape [tokens, dim], this rank's hidden states.
            token_mask: Boolean tensor of shape [tokens], true for tokens that count.
            weights: Tensor of shape [tokens, top_k], routing weights.
            indices: Integer tensor of shape [tokens, top_k], the experts chosen.

        Returns:
            Tensor of shape [tokens, dim] and of the dtype of ``x``.

        Raises:
            ValueError: If the experts cannot be divided evenly over the EP ranks, the mesh has several dimensions, or
                the EP ranks disagree about what requires a gradient.
        """
        dtype, tokens = x.dtype, x.size(0)
        group, ep_rank, ep_size, counts = None, 0, 1, [tokens]
        if isinstance(self.gate_and_up_projs, DTensor):
            mesh = self.gate_and_up_projs.device_mesh
            if mesh.ndim != 1:
                raise ValueError(f"experts are sharded over a {mesh.ndim}-dimensional mesh; one dimension is supported")
            ep_rank, ep_size = mesh.get_local_rank(), mesh.size()
            group = mesh.get_group() if ep_size > 1 else None
        if self.n_routed_experts % ep_size:
            raise ValueError(f"{self.n_routed_experts} experts cannot be divided over ep_size={ep_size}")

        if group is not None:
            counts = exchange_counts(x, weights, group)
            weights = weights.float()
            x, weights, indices, token_mask = (
                gather_rows(rows, counts, group) for rows in (x, weights, indices, token_mask)
            )

        local = self.n_routed_experts // ep_size
        first = ep_rank * local
        params = [_local(self.gate_and_up_projs, dtype), _local(self.down_projs, dtype)]
        biases = [self.gate_up_proj_bias, self.down_proj_bias] if self.expert_bias else [None, None]
        params += [_local(bias, dtype) for bias in biases]
        if x.size(0) == 0:
            # The release's own paths read the first token.
            used = (tensor for tensor in (x, weights, *params) if tensor is not None)
            y = x.new_zeros(x.shape, dtype=torch.float32) + zero_with_gradients(*used)
        elif self.use_torch_mm:
            y = self._forward_grouped_mm(x, token_mask, weights, indices, *params, local, first)
        else:
            y = self._forward_loop(x, weights, indices, token_mask, *params, local, first, first + local)

        if self.expert_bias:
            y = y + zero_with_gradients(*params[2:])
        if group is not None:
            # Every rank enters the backward of the gather, also one whose experts got no token.
            y = y + x.sum(dtype=torch.float32) * 0.0
            y = _SumOverRanks.apply(y, group).narrow(0, sum(counts[:ep_rank]), tokens)
        return y.to(dtype)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose backward is an all-reduce too: each rank reads other rows of the sum."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _local(param: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if param is None:
        return None
    return (param.to_local() if isinstance(param, DTensor) else param).to(dtype)

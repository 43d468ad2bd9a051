# SPDX-License-Identifier: Apache-2.0
"""The expert-parallel gather of routed tokens, with a backward for everything that requires a gradient.

``GroupedExperts`` of ``nemo_automodel/components/moe/experts.py`` gathers the tokens of all expert-parallel (EP)
ranks, lets each rank compute its own experts for all of them, and sums the results. In 0.4.0 and 0.5.0 the routing
weights are gathered without a backward (0.5.0: line 356), so neither the router nor the hidden states below it
receive the router's share of the gradient.
"""

from __future__ import annotations

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


def exchange_counts(count: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Number of rows of each rank of ``group``, given this rank's ``count``; collectives run on ``device``."""
    mine = torch.tensor([count], dtype=torch.int64, device=device)
    counts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, mine, group=group)
    return [int(other) for other in counts]


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
            ValueError: If the experts cannot be divided evenly over the EP ranks, or the mesh has several dimensions.
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
            counts = exchange_counts(tokens, group, x.device)
            weights = weights.float()
            x, weights, indices, token_mask = (
                gather_rows(rows, counts, group) for rows in (x, weights, indices, token_mask)
            )

        local = self.n_routed_experts // ep_size
        first = ep_rank * local
        params = [_local(self.gate_and_up_projs, dtype), _local(self.down_projs, dtype)]
        biases = [self.gate_up_proj_bias, self.down_proj_bias] if self.expert_bias else [None, None]
        params += [_local(bias, dtype) for bias in biases]
        if self.use_torch_mm:
            y = self._forward_grouped_mm(x, token_mask, weights, indices, *params, local, first)
        else:
            y = self._forward_loop(x, weights, indices, token_mask, *params, local, first, first + local)

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

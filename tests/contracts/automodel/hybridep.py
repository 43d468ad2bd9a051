# SPDX-License-Identifier: Apache-2.0
"""A stand-in for HybridEP's communication buffer, on gloo; everything around it is the release's own."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

SPARE_ROWS = 2


@dataclasses.dataclass
class Layout:
    """What a dispatch builds and later calls are handed back.

    ``tokens`` and ``experts``: int64 tensors of shape [rows], the sending token (over all ranks) and the local expert
    of each row. ``spare``: rows that hold no token. ``counts``: int64 tensor of shape [local experts].
    """

    tokens: torch.Tensor
    experts: torch.Tensor
    spare: int
    counts: torch.Tensor
    total: int  # tokens of all ranks


class StandInBuffer:
    """Moves rows between ranks as HybridEP's buffer does, and builds another layout whenever backward asks for one.

    A layout that is built in the forward pass has two spare rows, one that is built while backward runs has none: the
    drift of the reports, made regular. A layout that is handed back is used as it is.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.built: list[int] = []  # rows of each layout

    def dispatch_with_permute(
        self,
        hidden: torch.Tensor,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        handle: Layout | None = None,
        topk_idx: torch.Tensor | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor, Layout]:
        """Send each token to the ranks of its experts.

        Args:
            hidden: Tensor of shape [tokens, dim].
            routing_map: Bool tensor of shape [tokens, experts]; with ``topk_idx`` instead, of shape [tokens, top_k].
            probs: Tensor of shape [tokens, experts].
            num_of_experts_per_rank: Experts a rank.
            handle: A layout to use, instead of building one.
            topk_idx: See ``routing_map``.
            unused: What only the real buffer needs.

        Returns:
            Rows of shape [rows, dim], their probabilities of shape [rows], no scaling, rows an expert, the layout.
        """
        rows = self._gather(hidden)
        if handle is None:
            if routing_map is None:
                routing_map = torch.zeros(probs.shape, dtype=torch.bool)
                routing_map.scatter_(1, topk_idx.clamp_min(0).long(), topk_idx >= 0)
            first = dist.get_rank(self.group) * num_of_experts_per_rank
            mine = self._gather(routing_map.to(torch.int64))[:, first : first + num_of_experts_per_rank]
            experts, tokens = mine.t().nonzero(as_tuple=True)
            spare = SPARE_ROWS if torch._C._current_graph_task_id() == -1 else 0
            counts = mine.sum(0)
            counts[-1] += spare
            handle = Layout(tokens, experts, spare, counts, len(rows))
            self.built.append(len(tokens) + spare)
        sent = torch.cat([rows[handle.tokens], rows.new_zeros(handle.spare, rows.shape[1])])
        chances = None
        if probs is not None:
            first = dist.get_rank(self.group) * len(handle.counts)
            all_probs = self._gather(probs)
            chances = torch.cat([all_probs[handle.tokens, handle.experts + first], all_probs.new_zeros(handle.spare)])
        return sent, chances, None, handle.counts.clone(), handle

    def combine_with_unpermute(
        self, hidden: torch.Tensor, handle: Layout, probs: torch.Tensor | None = None, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add rows up at the tokens that they came from.

        Args:
            hidden: Tensor of shape [rows, dim]; it must fit the layout.
            handle: The layout.
            probs: Tensor of shape [rows].
            unused: What only the real buffer needs.

        Returns:
            Tensor of shape [tokens, dim], and of shape [tokens, experts] where ``probs`` is given.
        """
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        used = len(handle.tokens)
        back = hidden.new_zeros(handle.total, hidden.shape[1]).index_add_(0, handle.tokens, hidden[:used])
        dist.all_reduce(back, group=self.group)
        chances = None
        if probs is not None:
            local = len(handle.counts)
            dense = probs.new_zeros(handle.total, size * local)
            dense[handle.tokens, handle.experts + rank * local] = probs[:used]
            dist.all_reduce(dense, group=self.group)
            chances = dense.chunk(size)[rank]
        return back.chunk(size)[rank], chances

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty(part.shape, dtype=part.dtype) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts)


def indices_to_multihot(indices: torch.Tensor, probs: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the release's Triton kernel computes, for a CPU.

    Args:
        indices: Integer tensor of shape [tokens, top_k]; -1 is no expert.
        probs: Tensor of shape [tokens, top_k].
        experts: How many there are.

    Returns:
        Bool tensor and probabilities, both of shape [tokens, experts].
    """
    chosen, index = indices >= 0, indices.clamp_min(0)
    dense = probs.new_zeros(len(indices), experts).scatter_add(1, index, probs * chosen)
    return dense.new_zeros(dense.shape).scatter_add(1, index, chosen.to(dense.dtype)) > 0, dense


def plain_products(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, **unused: object) -> torch.Tensor:
    """What the package ``grouped_gemm`` computes: one product an expert.

    Args:
        rows: Tensor of shape [rows, in], sorted by expert.
        weights: Tensor of shape [experts, in, out].
        counts: Integer tensor of shape [experts]: rows of each.
        unused: Options that the release leaves at their defaults.

    Returns:
        Tensor of shape [rows, out].
    """
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def install(group: dist.ProcessGroup) -> None:
    """Give this process HybridEP, with the stand-in as its buffer, around the release's own dispatch.

    A Triton kernel and ``grouped_gemm``, which need a GPU, are replaced by plain torch too.

    Args:
        group: The expert-parallel group.
    """
    package = ModuleType("deep_ep")
    package.HybridEPBuffer = StandInBuffer
    sys.modules["deep_ep"] = package
    # Both look at import time whether the package is there.
    fused = importlib.reload(importlib.import_module("nemo_automodel.components.moe.megatron.fused_a2a"))
    dispatcher = importlib.import_module("nemo_automodel.components.moe.megatron.token_dispatcher")
    dispatcher.fused_indices_to_multihot = indices_to_multihot
    dispatcher.hybrid_ep_dispatch = fused.hybrid_ep_dispatch
    dispatcher.hybrid_ep_combine = fused.hybrid_ep_combine
    experts = importlib.import_module("nemo_automodel.components.moe.experts")
    experts.ops = SimpleNamespace(gmm=plain_products)
    fused._hybrid_ep_buffer = StandInBuffer(group)


def buffer() -> StandInBuffer:
    """The buffer of the last ``install``."""
    return sys.modules["nemo_automodel.components.moe.megatron.fused_a2a"]._hybrid_ep_buffer

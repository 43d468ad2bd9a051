# SPDX-License-Identifier: Apache-2.0
"""What ``train_indexer=True`` is for: a loss of the indexer's own, which teaches it where the attention looks.

A way to train an indexer with multi-head latent attention (DeepSeek-V3.2, GLM): Kullback-Leibler divergence of the
indexer's scores from the attention's distribution over all earlier positions, summed over the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class _Tap(TorchFunctionMode):
    """Keep what passes by: the scores that an indexer cuts to indices, and queries and keys of the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.in_indexer = False
        self.scores: list[torch.Tensor] = []
        self.attention: list[torch.Tensor] = []

    def enter(self, *_: Any) -> None:
        self.in_indexer = True

    def leave(self, *_: Any) -> None:
        self.in_indexer = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.topk and self.in_indexer:
            self.scores.append(args[0])
        if func is functional.scaled_dot_product_attention:
            query, key = args[:2]
            scale = (kwargs or {}).get("scale") or query.shape[-1] ** -0.5
            self.attention.append((query @ key.transpose(-2, -1) * scale).detach())
        return func(*args, **(kwargs or {}))


def distillation_loss(
    model: nn.Module, tokens: torch.Tensor, indexer_types: tuple[type[nn.Module], ...]
) -> torch.Tensor:
    """One forward of ``model``, and how far each indexer's scores are from its layer's attention.

    Args:
        model: A causal model whose layers call their indexer and then ``scaled_dot_product_attention``.
        tokens: Integer tensor of shape [batch, sequence].
        indexer_types: The classes of its indexers.

    Returns:
        Scalar tensor; a mean over positions, a sum over layers. The attention is the teacher and gets no gradient of
        it, but what the indexer reads does: call ``torch.autograd.backward(loss, inputs=[indexer parameters])``.
    """
    tap = _Tap()
    hooks = []
    for module in model.modules():
        if isinstance(module, indexer_types):
            hooks += [module.register_forward_pre_hook(tap.enter), module.register_forward_hook(tap.leave)]
    with tap:
        model(tokens)
    for hook in hooks:
        hook.remove()
    length = tokens.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    loss = torch.zeros(())
    for scores, attention in zip(tap.scores, tap.attention, strict=True):
        teacher = attention.masked_fill(later, -torch.inf).softmax(-1).mean(1)
        student = scores.masked_fill(later, -torch.inf).log_softmax(-1).masked_fill(later, 0.0)
        loss = loss + functional.kl_div(student, teacher, reduction="none").sum(-1).mean()
    return loss

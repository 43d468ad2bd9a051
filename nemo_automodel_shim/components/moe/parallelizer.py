# SPDX-License-Identifier: Apache-2.0
"""The release's ``apply_ac`` and ``parallelize_model`` with the checks of activation checkpointing before them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from nemo_automodel_shim.shared.activation_checkpointing import (
    normalize_activation_checkpointing,
    refuse_hybridep_recompute,
)


def guarded_apply_ac(upstream: Any) -> Callable[..., None]:
    """Return ``apply_ac`` of the release's module ``upstream`` that refuses what would fail in backward.

    Raises (the returned function):
        ValueError: a block is to be checkpointed whose experts are parallel and dispatch through HybridEP.
    """
    apply_ac = upstream.apply_ac

    @functools.wraps(apply_ac)
    def guarded(model: Any, ignore_router: bool = True, *args: Any, selective: bool = False, **kwargs: Any) -> None:
        blocks = _blocks_checkpointed_whole(upstream, model, ignore_router, selective)
        experts = (getattr(upstream._get_moe_module(block), "experts", None) for block in blocks)
        refuse_hybridep_recompute(experts, "selective" if selective else "full")
        apply_ac(model, ignore_router, *args, selective=selective, **kwargs)

    return guarded


def with_known_modes(parallelize_model: Callable[..., None]) -> Callable[..., None]:
    """Return ``parallelize_model`` that reads the spellings of ``activation_checkpointing``.

    Raises (the returned function):
        ValueError: the value is no mode.
    """

    @functools.wraps(parallelize_model)
    def read(*args: Any, activation_checkpointing: bool | str | None = False, **kwargs: Any) -> None:
        mode = normalize_activation_checkpointing(activation_checkpointing)
        parallelize_model(*args, activation_checkpointing=mode, **kwargs)

    return read


def read_mode(config: Any, *args: Any, **kwargs: Any) -> None:
    """Replace the mode of a config that has been made by what it means; frozen ones too."""
    mode = normalize_activation_checkpointing(config.activation_checkpointing)
    object.__setattr__(config, "activation_checkpointing", mode)


def _blocks_checkpointed_whole(upstream: Any, model: Any, ignore_router: bool, selective: bool) -> Iterator[Any]:
    head = getattr(model, "mtp", None)
    tied = not selective and bool(getattr(getattr(head, "mtp_config", None), "use_repeated_layer", False))
    skipped = {id(block) for block in head.layers.children()} if tied and hasattr(head, "layers") else set()
    for _, _, block in upstream._iter_transformer_and_mtp_blocks(model):
        # A block that checkpoints its own parts leaves the dispatch out of them.
        checkpoints_itself = not selective and ignore_router and hasattr(block, "set_activation_checkpointing")
        if id(block) not in skipped and not checkpoints_itself:
            yield block

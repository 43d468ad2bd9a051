# SPDX-License-Identifier: Apache-2.0
"""Whether the parameters of a sparse-attention indexer are trained.

An indexer hands out positions only, ``topk(...).indices``: no gradient path leads from the loss to its parameters.
Left trainable they sit in the optimizer without ever being updated, so they are frozen unless the model's config says
``train_indexer=True`` (for a training loop that gives the indexer a loss of its own).
"""

from __future__ import annotations

import logging

from torch import nn

logger = logging.getLogger(__name__)


def apply_indexer_policy(
    model: nn.Module, indexer_types: type[nn.Module] | tuple[type[nn.Module], ...], *, trainable: bool
) -> list[str]:
    """Freeze every indexer of ``model``, or warn that nothing in the model's own loss trains it.

    Indexers are found by module type, never by name. Parameters that somebody froze on purpose stay frozen where
    ``trainable`` is true.

    Args:
        model: The module to search, itself included.
        indexer_types: The indexer class or classes.
        trainable: The config's ``train_indexer``.

    Returns:
        Fully qualified names of the indexer parameters, in the order of ``nn.Module.named_parameters``.
    """
    owned: dict[int, str] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, indexer_types):
            for name, param in module.named_parameters(prefix=prefix):
                owned.setdefault(id(param), name)
                if not trainable:
                    param.requires_grad_(False)
    names = list(owned.values())
    if trainable and names:
        logger.warning(
            "train_indexer=True: %d indexer parameters are trainable, but only indices leave an indexer, so the "
            "language-model loss gives them no gradient: %s. Give them a loss of their own, or leave the flag off.",
            len(names),
            ", ".join(names),
        )
    return names

# SPDX-License-Identifier: Apache-2.0
"""Whether the parameters of a sparse-attention indexer are trained.

Where an indexer hands out positions only, such as ``topk(...).indices``, no gradient path leads from the model's loss
to its parameters. Left trainable they sit in the optimizer without ever being updated. So they are frozen, unless the
model's config says ``train_indexer=True`` (for a training loop that gives the indexer a loss of its own).

A model takes part by deriving its indexer from ``HardTopKIndexer``; its name plays no part.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


class HardTopKIndexer(nn.Module):
    """Base of indexers that hand out positions only.

    Sharding, adapters and passes that freeze or thaw by name come after the build, and some make every parameter
    anew. The policy therefore holds whenever the parameters are looked up: a walk over a model's modules or
    parameters (``named_modules``, ``parameters``, ``requires_grad_``, …) freezes whatever lies in the indexer by then,
    adapters included, before handing it out. An optimizer that is made from a walk cannot get them.
    """

    train_indexer: bool = False

    def follow_config(self, config: Any) -> None:
        """Take ``train_indexer`` from the model's config; to be called when the parameters have been made.

        Args:
            config: The model's config. Without that field, the indexer is not trained.

        Raises:
            TypeError: If the field is no bool, as a ``"false"`` from a command line would be.
        """
        flag = getattr(config, "train_indexer", False)
        if not isinstance(flag, bool):
            raise TypeError(f"train_indexer must be True or False, not {flag!r}")
        self.train_indexer = flag
        if not flag:
            self.requires_grad_(False)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As ``nn.Module.named_modules``, with the parameters frozen first unless they are to be trained.

        Args:
            memo: Modules that have been handed out already.
            prefix: Put before every name.
            remove_duplicate: Whether a module is handed out once only.

        Yields:
            Name and module, this one first.
        """
        if not self.train_indexer:
            for _, module in super().named_modules():
                for param in module._parameters.values():
                    # A view that a sharding wrapper lends for the time of a forward is no leaf, and cannot be frozen.
                    if param is not None and param.requires_grad and param.is_leaf:
                        param.requires_grad_(False)
        yield from super().named_modules(memo, prefix, remove_duplicate)


def indexer_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of every ``HardTopKIndexer`` in ``model``, by fully qualified name.

    Args:
        model: The module to search, itself included.

    Returns:
        Each parameter once, in the order of ``nn.Module.named_parameters``.
    """
    owned: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, HardTopKIndexer):
            for name, param in module.named_parameters(prefix=prefix):
                owned.setdefault(id(param), (name, param))
    return dict(owned.values())


def report_trainable_indexers(model: nn.Module) -> list[str]:
    """Warn, once a call, which trainable parameters get no gradient; a model calls it at the end of its build.

    Args:
        model: The module to search, itself included.

    Returns:
        Fully qualified names of the indexer parameters that are trainable. Nothing is logged where there are none.
    """
    names = [name for name, param in indexer_parameters(model).items() if param.requires_grad]
    if names:
        logger.warning(
            "train_indexer=True: %d indexer parameters are trainable, but only indices leave an indexer, so the "
            "language-model loss gives them no gradient: %s. Give them a loss of their own, or leave the flag off.",
            len(names),
            ", ".join(names),
        )
    return names

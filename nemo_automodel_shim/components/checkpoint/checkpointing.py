# SPDX-License-Identifier: Apache-2.0
"""``Checkpointer.save_optimizer`` and ``load_optimizer`` on top of ``sparse_optimizer_state``.

Upstream: ``nemo_automodel/components/checkpoint/checkpointing.py`` and ``stateful_wrappers.py`` (0.5.0: lines 433 to
467, and class ``OptimizerState``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    load_optimizer_state,
    optimizer_state_dict,
    positional_optimizer_state_dict,
    validate_optimizers_for_save,
)


class CheckpointPath(str):
    """A path in which the question ``"/model" in path`` is answered by the last directory alone.

    Upstream asks so whether a file of adapters is meant (0.5.0: ``checkpointing.py``, lines 964 and 990).
    """

    __slots__ = ()

    def __contains__(self, part: object) -> bool:
        if part == "/model":
            return os.path.basename(os.path.normpath(self)) == "model"
        return super().__contains__(part)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def by_its_own_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap upstream's ``_do_save`` or ``_do_load``: whether the path is the model's, its last directory says."""

    @functools.wraps(method)
    def wrapped(self: Any, state_dict: dict[str, Any], path: str, *args: Any, **kwargs: Any) -> Any:
        return method(self, state_dict, CheckpointPath(path), *args, **kwargs)

    return wrapped


class Checkpointer:
    """Replacement parts for upstream's class of the same name; ``install`` puts them into it.

    Optimizers that upstream saves by integer ids (PEFT with expert parallelism or quantised weights) still are. What a
    file has, ids or names, the load sees from the file.
    """

    def save_optimizer(
        self,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        model: nn.Module | list[nn.Module],
        weights_path: str,
        scheduler: Any | None = None,
    ) -> None:
        """Save optimizer and scheduler to ``weights_path/optim``; the live run is not moved.

        Args:
            optimizer: The optimizer, or one a model part.
            model: The model, or its parts on this rank.
            weights_path: Directory of the checkpoint.
            scheduler: Scheduler, or schedulers of which the first is saved; ``None`` for none.

        Raises:
            OptimizerStateError: On every rank alike, with nothing written, if the ranks do not agree on the state.
        """
        models, optimizers, schedulers = _listed(model), _listed(optimizer), _listed(scheduler)
        by_position = _by_position(self, models)
        path = os.path.join(weights_path, "optim")
        os.makedirs(path, exist_ok=True)
        validate_optimizers_for_save(models, optimizers, by_position=by_position)
        optim: dict[str, Any] = {}
        if by_position:
            optim = positional_optimizer_state_dict(models, optimizers)
        else:
            for part, owner in zip(models, optimizers, strict=False):
                optim.update(optimizer_state_dict(part, owner))
        state: dict[str, Any] = {"optim": optim}
        if schedulers:
            state["sched"] = schedulers[0].state_dict()
        self._optim_ctx.future = self._do_save(state, path)

    def load_optimizer(
        self,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        model: nn.Module | list[nn.Module],
        weights_path: str,
        scheduler: Any | None = None,
        *,
        allow_new_parameters: bool | None = None,
    ) -> None:
        """Load optimizer and scheduler from ``weights_path/optim``; what was saved without state stays without.

        Args:
            optimizer: The optimizer, or one a model part.
            model: The model, or its parts on this rank.
            weights_path: Directory of the checkpoint.
            scheduler: Scheduler or schedulers to load; ``None`` leaves them alone.
            allow_new_parameters: Start parameters that the checkpoint does not list without state. ``None`` takes
                the field of that name from the checkpointing config, where it has one.

        Raises:
            OptimizerStateError: On every rank alike, with nothing changed, if the checkpoint does not fit.
        """
        models, optimizers, schedulers = _listed(model), _listed(optimizer), _listed(scheduler)
        if allow_new_parameters is None:
            allow_new_parameters = getattr(self.config, "allow_new_parameters", False)
        load_optimizer_state(
            models,
            optimizers,
            schedulers,
            os.path.join(weights_path, "optim"),
            allow_new_parameters=allow_new_parameters,
        )


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _by_position(checkpointer: Any, models: list[nn.Module]) -> bool:
    modules = [module for model in models for module in model.modules()]
    return bool(checkpointer.config.is_peft) and any(
        getattr(module, "ep_size", 1) > 1 or getattr(module, "quant_state", None) is not None for module in modules
    )

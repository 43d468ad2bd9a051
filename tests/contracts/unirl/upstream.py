# SPDX-License-Identifier: Apache-2.0
"""The upstream names that contracts use, from whichever tree this side imports.

The release needs a Python from 3.12 up and ray.  Neither the optimizer boundary nor the FSDP backend needs either to
run, so where ray is not installed a stand-in takes its place, and the side runs on the Python that there is.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

_RAY = ("ray", "ray.exceptions", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")


class _StandIn(types.ModuleType):
    """A package in which every public name is an empty class."""

    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (), {})


if importlib.util.find_spec("ray") is None:
    sys.modules.update({name: _StandIn(name) for name in _RAY})

from unirl.train.backend import sharded_state  # noqa: E402
from unirl.train.backend.base import LrSchedulerConfig, OptimizerConfig  # noqa: E402
from unirl.train.backend.fsdp.backend import FSDPBackend  # noqa: E402
from unirl.train.configs import FSDPConfig  # noqa: E402
from unirl.train.lora import FrozenAdapters  # noqa: E402

__all__ = ["PRELOAD", "backend_of", "sharded_state"]

PRELOAD = (__name__,)


def backend_of(
    model: nn.Module,
    checkpoint_format: str,
    optimizer: Any = None,
    scheduler: LRScheduler | None = None,
) -> FSDPBackend:
    """The release's FSDP backend around ``model``, which is wrapped (or not) already.

    Its ``__init__`` is left out: that loads a bundle of weights.  What it sets up at its end is called as it is.
    """
    backend = object.__new__(FSDPBackend)
    backend._frozen_adapters = FrozenAdapters()
    backend._finalize_construction(
        model,
        None,
        optimizer_cfg=OptimizerConfig(1e-2, 0.9, 0.999, 1e-8, 1e-2),
        scheduler_cfg=LrSchedulerConfig("cosine", 0, 100),
        lora_cfg=None,
        ema_lora_cfg=None,
        ema_cfg=None,
        fsdp_cfg=FSDPConfig(checkpoint_format=checkpoint_format),
    )
    if optimizer is not None:
        backend.optimizer, backend.scheduler = optimizer, scheduler
    return backend

# SPDX-License-Identifier: Apache-2.0
"""The upstream names that contracts use and every release has, from whichever tree this side imports.

What only some releases have is imported where it is used, so that the other contracts run without it.

Rank processes import this module before anything else, so that a side that runs with the shim has it there too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os

import torch
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from nemo_automodel.components.models.common.utils import BackendConfig
from nemo_automodel.components.moe import layers as moe_layers
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import MoE
from nemo_automodel.components.moe.parallelizer import (
    ExpertParallel,
    apply_ac,
    apply_ep,
    apply_fsdp,
    parallelize_model,
)
from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm
from nemo_automodel.components.utils.model_utils import apply_parameter_freezing

import nemo_automodel_shim

__all__ = [
    "HAS_SELECTIVE_CHECKPOINTING",
    "MOE_OPTIONS",
    "PRELOAD",
    "BackendConfig",
    "Checkpointer",
    "CheckpointingConfig",
    "ExpertParallel",
    "MoE",
    "MoEConfig",
    "PeftConfig",
    "apply_ac",
    "apply_ep",
    "apply_fsdp",
    "apply_lora_to_linear_modules",
    "apply_parameter_freezing",
    "cpu_backend",
    "parallelize_model",
    "plain_checkpointer",
    "scale_grads_and_clip_grad_norm",
]

# For the world launcher: with this imported, a rank starts without importing transformers again.
PRELOAD = (__name__,)

# What 0.4.0 and commits soon after do not have.
MOE_OPTIONS = frozenset(field.name for field in dataclasses.fields(MoEConfig))
HAS_SELECTIVE_CHECKPOINTING = "selective" in inspect.signature(apply_ac).parameters


class _Stream:
    """Stands in for a CUDA stream: releases to 0.4.0, and commits soon after, run shared experts in one."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for: everything runs in order."""


if hasattr(moe_layers, "_shared_experts_stream") and not torch.cuda.is_available():
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()

if os.environ.get("AUTOMODEL_SHIM_INSTALL") == "1":
    nemo_automodel_shim.install()


def cpu_backend(**options: object) -> BackendConfig:
    """The release's own torch implementations, which run on a CPU."""
    defaults = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch_fp32", "experts": "torch", "dispatcher": "torch"}
    return BackendConfig(**{**defaults, "rope_fusion": False, **options})


def plain_checkpointer(directory: os.PathLike | str, rank: int = 0, **options: object) -> Checkpointer:
    """The release's Checkpointer writing plain DCP, without Hugging Face export; ``options`` for its config."""
    # Named in full: 0.4.0 has no defaults for these.
    defaults = {
        "enabled": True,
        "checkpoint_dir": directory,
        "model_save_format": "torch_save",
        "model_cache_dir": directory,
        "model_repo_id": "none",
        "save_consolidated": False,
        "is_peft": False,
    }
    config = CheckpointingConfig(**{**defaults, **options})
    return Checkpointer(config, dp_rank=rank, tp_rank=0, pp_rank=0)

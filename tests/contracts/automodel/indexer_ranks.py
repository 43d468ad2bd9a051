# SPDX-License-Identifier: Apache-2.0
"""Rank bodies: the indexer after sharding, adapters and other passes over the parameters, and in model checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from nemo_automodel.components.utils.model_utils import freeze_deepseek_v4_indexer_params
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.contracts.automodel.tiny_models import build_deepseek_v4, indexer_parameters, seed_parameters
from tests.contracts.automodel.upstream import (
    Checkpointer,
    CheckpointingConfig,
    PeftConfig,
    apply_lora_to_linear_modules,
    apply_parameter_freezing,
    parallelize_model,
)
from tests.support.world import RankContext


def _rewrap(model: nn.Module, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    for module in list(model.model.layers["0"].self_attn.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            placement = Shard(0) if param.shape and param.shape[0] % size == 0 else Replicate()
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [placement])))


def _expert_parallel(model: nn.Module, size: int) -> None:
    world = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    moe = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    parallelize_model(model, world, moe, dp_axis_names=("dp",), ep_axis_name="ep")


def _fsdp(model: nn.Module, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _adapters(model: nn.Module, size: int) -> None:
    apply_lora_to_linear_modules(
        model, PeftConfig(target_modules=["*.wq_b", "*.weights_proj"], dim=2, use_triton=False)
    )


def _freeze_then_thaw(model: nn.Module, size: int) -> None:
    apply_parameter_freezing(model, {"freeze_language_model": True})
    model.requires_grad_(False)
    model.requires_grad_(True)


def _thaw_by_name(model: nn.Module, size: int) -> None:
    # What the recipe does with `unfreeze_modules: [self_attn]`.
    for name, param in model.named_parameters():
        if "self_attn" in name:
            param.requires_grad_(True)


PASSES: dict[str, Callable[[nn.Module, int], None]] = {
    "adapters": _adapters,
    "expert parallelism": _expert_parallel,
    "freezing and thawing": _freeze_then_thaw,
    "FSDP2": _fsdp,
    "new parameters": _rewrap,
    "thawing by name": _thaw_by_name,
}


def trainable_after_each_pass(context: RankContext) -> dict[str, Any]:
    """Build a model for each pass, freeze it as the release does, let the pass run, and make an optimizer."""
    found: dict[str, Any] = {"frozen_before": True, "trainable": {}, "others": []}
    for case, act in PASSES.items():
        model = build_deepseek_v4(num_hidden_layers=1, compress_ratios=[4]).to(torch.bfloat16)
        freeze_deepseek_v4_indexer_params(model)
        found["frozen_before"] &= not any(param.requires_grad for param in indexer_parameters(model).values())
        act(model, context.world_size)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        inside = indexer_parameters(model)
        found["trainable"][case] = [name for name, param in inside.items() if id(param) in held or param.requires_grad]
        if case != "adapters":
            found["others"] += [
                f"{name} after {case}"
                for name, param in model.named_parameters()
                if name not in inside and id(param) not in held
            ]
    return found


def save_and_load_model(context: RankContext, form: str) -> dict[str, Any]:
    """Save a model with a frozen indexer, as plain DCP or for Hugging Face, overwrite the indexer, and load it."""
    model = build_deepseek_v4(num_hidden_layers=2, compress_ratios=[0, 4])
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.bfloat16)
    seed_parameters(model, 11)
    inside = indexer_parameters(model)
    for param in inside.values():
        param.requires_grad_(False)
    before = {name: param.detach().clone() for name, param in inside.items()}
    config = CheckpointingConfig(
        checkpoint_dir=context.directory,
        model_save_format=form,
        save_consolidated=form == "safetensors",
        model_repo_id="none",
    )
    checkpointer = Checkpointer(config, dp_rank=0, tp_rank=0, pp_rank=0)
    checkpointer.save_model(model, str(context.directory))
    place = context.directory / "model"
    # Both forms have the names of the Hugging Face model.
    keys: set[str] = set()
    if form == "torch_save":
        keys |= set(dcp.FileSystemReader(place).read_metadata().state_dict_metadata)
    for file in (place / "consolidated").glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            keys |= set(content.keys())
    with torch.no_grad():
        for param in inside.values():
            param.fill_(-1.0)
    checkpointer.load_model(model, str(place))
    return {
        "frozen": sorted(inside),
        "saved": sorted(key for key in keys if ".indexer." in key),
        "changed": [name for name, param in inside.items() if not torch.equal(param, before[name])],
    }

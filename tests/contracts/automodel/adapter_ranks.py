# SPDX-License-Identifier: Apache-2.0
"""Rank bodies: adapters on experts under expert parallelism, whose optimizer the release saves by integer ids."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.contracts.automodel.checkpointing_ranks import Model, parallelize
from tests.contracts.automodel.reshard_ranks import give_gradient, in_full
from tests.contracts.automodel.upstream import (
    Checkpointer,
    CheckpointingConfig,
    PeftConfig,
    apply_lora_to_linear_modules,
)
from tests.contracts.outcomes import PreconditionError
from tests.support.world import RankContext

# Adapters of the first block are trained from the start, half of the second block's later, the others never.
USED, LATE = ("layers.0.",), ("layers.0.", "layers.1.mlp.experts.lora_down")
Run = tuple[nn.Module, torch.optim.Optimizer]


def _build(context: RankContext) -> Run:
    model = Model("hybridep", "torch_mm")
    apply_lora_to_linear_modules(model, PeftConfig(target_modules=["*experts*"], dim=2, use_triton=False))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    parallelize(context, model, "hybridep")
    trainable = [param for param in model.parameters() if param.requires_grad]
    if len(trainable) != 8 or all(getattr(module, "ep_size", 1) == 1 for module in model.modules()):
        raise PreconditionError("no adapters on experts under expert parallelism")
    return model, torch.optim.AdamW(trainable, lr=0.1)


def _train(run: Run, names: tuple[str, ...], steps: range) -> None:
    model, optimizer = run
    for step in steps:
        for name, param in model.named_parameters():
            if param.requires_grad and any(part in name for part in names):
                give_gradient(param, step)
        optimizer.step()
        optimizer.zero_grad()


def _checkpointer(path: str, rank: int) -> Checkpointer:
    config = CheckpointingConfig(
        checkpoint_dir=path,
        model_save_format="safetensors",
        save_consolidated=False,
        model_repo_id="none",
        is_peft=True,
    )
    return Checkpointer(config, dp_rank=rank, tp_rank=0, pp_rank=0)


def resume(context: RankContext, path: str, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train ``names`` for three steps, save, go on in a fresh run: the run that never stopped and the resumed one."""
    run, resumed = _build(context), _build(context)
    _train(run, names, range(3))
    _checkpointer(path, context.rank).save_optimizer(run[1], run[0], path)
    keys = dcp.FileSystemReader(os.path.join(path, "optim")).read_metadata().state_dict_metadata
    if "optim.state.0.exp_avg" not in keys:
        raise PreconditionError("the file does not have integer ids")
    with torch.no_grad():
        for mine, theirs in zip(resumed[0].parameters(), run[0].parameters(), strict=True):
            mine.copy_(theirs)
    _checkpointer(path, context.rank).load_optimizer(resumed[1], resumed[0], path)
    loaded = set(in_full(*resumed)["model.layers.0.mlp.experts.lora_down_A"])
    for each in (run, resumed):
        _train(each, LATE, range(3, 6))
    whole = in_full(*run)
    whole["loaded"] = {"entries": sorted(loaded)}
    return whole, in_full(*resumed)

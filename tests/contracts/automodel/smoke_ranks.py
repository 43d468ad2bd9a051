# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of the report's smoke run: 4-layer BF16 DeepSeek-V4, EP over all ranks, FSDP2 over the same ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.contracts.automodel.tiny_models import VOCABULARY, build_deepseek_v4, logits_of, seed_parameters
from tests.contracts.automodel.upstream import parallelize_model, plain_checkpointer
from tests.contracts.outcomes import PreconditionError
from tests.support.training import differences, snapshot
from tests.support.world import RankContext

# Long enough that the 128-token window of layer 3 closes, so that its compressor gets a gradient.
SEQUENCE = 160
STEPS_AFTER = 4


@dataclasses.dataclass
class Trainer:
    """One rank's model, optimizer and scheduler."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    rank: int

    def step(self, number: int) -> float:
        """One optimizer step on this rank's own seeded tokens; returns the loss."""
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE), generator=generator)
        logits = logits_of(self.model(tokens))
        loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss)

    def snapshot(self) -> dict[str, Any]:
        """All that this rank goes on from."""
        return snapshot(self.model, self.optimizer, self.scheduler)


def build_trainer(context: RankContext, seed: int, **options: object) -> Trainer:
    """Build the model directly, initialise it, shard it as upstream does, and give it AdamW and ``LambdaLR``."""
    model = build_deepseek_v4(**options)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.bfloat16)
    seed_parameters(model, seed)
    precision = {}
    if len({param.dtype for param in model.parameters()}) > 1 and hasattr(model, "_keep_in_fp32_modules_strict"):
        # 0.7.0 keeps some parameters in fp32, and does not shard them together with BF16 ones.
        for param in model.parameters():
            param.data = param.data.float()
        precision["lm_head_precision"] = "float32"
    world = init_device_mesh(context.device.type, (context.world_size,), mesh_dim_names=("dp",))
    moe = init_device_mesh(context.device.type, (context.world_size,), mesh_dim_names=("ep",))
    parallelize_model(model, world, moe, dp_axis_names=("dp",), ep_axis_name="ep", **precision)
    if not isinstance(model.model.layers["0"].mlp.experts.down_projs, DTensor):
        raise PreconditionError("the experts are not sharded")
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return Trainer(model, optimizer, scheduler, context.rank)


def train_and_save(context: RankContext, path: str, options: dict[str, object]) -> dict[str, Any]:
    """Train one step, save to ``path``, go on, and leave each rank's end state beside the checkpoint."""
    trainer = build_trainer(context, seed=21, **options)
    loss = trainer.step(0)
    checkpointer = plain_checkpointer(path, context.rank)
    checkpointer.save_model(trainer.model, path)
    checkpointer.save_optimizer(trainer.optimizer, trainer.model, path, trainer.scheduler)
    for number in range(1, 1 + STEPS_AFTER):
        trainer.step(number)
    torch.save(trainer.snapshot(), Path(path) / f"end-{context.rank}.pt")
    return {"loss": loss, "parameters": len(trainer.optimizer.param_groups[0]["params"])}


def key_difference(context: RankContext, path: str, options: dict[str, object]) -> dict[str, Any]:
    """Keys that torch's dense template would ask for, against those in the checkpoint's metadata."""
    trainer = build_trainer(context, seed=22, **options)
    template = get_optimizer_state_dict(
        trainer.model, trainer.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    expected = {f"optim.{key}" for key in template} | {f"sched.{key}" for key in trainer.scheduler.state_dict()}
    saved = set(dcp.FileSystemReader(Path(path) / "optim").read_metadata().state_dict_metadata)
    return {
        "expected": len(expected),
        "saved": len(saved),
        "missing": sorted(expected - saved),
        "extra": sorted(saved - expected),
    }


def resume(context: RankContext, path: str, options: dict[str, object]) -> list[str]:
    """Load in the order of NeMo-RL (model, then optimizer), go on, and compare with the run that was not stopped."""
    trainer = build_trainer(context, seed=23, **options)
    checkpointer = plain_checkpointer(path, context.rank)
    checkpointer.load_model(trainer.model, str(Path(path) / "model"))
    checkpointer.load_optimizer(trainer.optimizer, trainer.model, path, trainer.scheduler)
    for number in range(1, 1 + STEPS_AFTER):
        trainer.step(number)
    expected = torch.load(Path(path) / f"end-{context.rank}.pt", weights_only=False)
    return differences(expected, trainer.snapshot())


def resume_sparse_file(context: RankContext, path: str) -> dict[str, Any]:
    """Load a checkpoint that an unpatched tree saved, and go on beside a twin whose state is put in by hand."""
    trainer, twin = build_trainer(context, seed=24), build_trainer(context, seed=25)
    checkpointer = plain_checkpointer(path, context.rank)
    checkpointer.load_model(trainer.model, str(Path(path) / "model"))
    checkpointer.load_optimizer(trainer.optimizer, trainer.model, path, trainer.scheduler)
    names = {id(param): name for name, param in trainer.model.named_parameters()}
    held = [names[id(param)] for param in trainer.optimizer.param_groups[0]["params"]]
    warm = {names[id(param)] for param, state in trainer.optimizer.state.items() if state}

    checkpointer.load_model(twin.model, str(Path(path) / "model"))
    fill_by_hand(twin, Path(path) / "optim")
    found = {
        "held": held,
        "cold": sorted(set(held) - warm),
        "after_load": differences(trainer.snapshot(), twin.snapshot()),
    }
    losses = [each.step(number) for number in range(1, 1 + STEPS_AFTER) for each in (trainer, twin)]
    steps = {name: int(state["step"]) for name, state in trainer.snapshot()["state"].items()}
    return found | {
        "finite": all(torch.isfinite(torch.tensor(losses)).tolist()),
        "steps": steps,
        "after_training": differences(trainer.snapshot(), twin.snapshot()),
    }


def fill_by_hand(trainer: Trainer, path: Path) -> None:
    """Give the optimizer what the file holds for its parameters, entry by entry, without any loader."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = {id(param): name for name, param in trainer.model.named_parameters()}
    params = trainer.optimizer.param_groups[0]["params"]
    wanted: dict[str, Any] = {}
    for param in params:
        name = names[id(param)]
        for entry in ("step", "exp_avg", "exp_avg_sq"):
            if f"optim.state.{name}.{entry}" in metadata:
                blank = torch.zeros(()) if entry == "step" else torch.zeros_like(param).detach()
                wanted[f"optim.state.{name}.{entry}"] = blank
    scheduler = dict.fromkeys(f"sched.{key}" for key in trainer.scheduler.state_dict())
    options = {option: f"optim.param_groups.{names[id(params[0])]}.{option}" for option in trainer.optimizer.defaults}
    options["initial_lr"] = f"optim.param_groups.{names[id(params[0])]}.initial_lr"
    everything = wanted | scheduler | dict.fromkeys(options.values())
    dcp.load(everything, checkpoint_id=str(path))
    for param in params:
        prefix = f"optim.state.{names[id(param)]}."
        state = {key.removeprefix(prefix): everything[key] for key in wanted if key.startswith(prefix)}
        if state:
            trainer.optimizer.state[param] = state
    trainer.optimizer.param_groups[0].update({option: everything[key] for option, key in options.items()})
    trainer.scheduler.load_state_dict({key.removeprefix("sched."): everything[key] for key in scheduler})
    dist.barrier()

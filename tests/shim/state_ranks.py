# SPDX-License-Identifier: Apache-2.0
"""Rank bodies of loads that succeed on some ranks only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from nemo_automodel_shim.components.checkpoint.live_optimizer import iter_named_parameters
from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    OptimizerStateError,
    load_optimizer_state,
    optimizer_state_dict,
    validate_optimizers_for_save,
)
from tests.support.training import Run, differences, snapshot, start_run
from tests.support.world import RankContext


def _saved(context: RankContext) -> str:
    path = str(context.directory / "optim")
    run = start_run()
    run.train(range(3), ["used"])
    dcp.save(
        {"optim": optimizer_state_dict(run.model, run.optimizer), "sched": run.scheduler.state_dict()},
        checkpoint_id=path,
    )
    dist.barrier()
    return path


def _attempt(run: Any, path: str) -> dict[str, Any]:
    before = run.snapshot()
    text = None
    try:
        load_optimizer_state([run.model], [run.optimizer], [run.scheduler], path)
    except OptimizerStateError as failure:
        text = str(failure)
    changed = differences(before, run.snapshot())
    # Training can go on after a refusal.
    run.train(range(3, 5), ["used", "late"])
    return {"text": text, "changed": changed}


def one_rank_cannot_look(context: RankContext) -> dict[str, Any]:
    """Rank 1 alone has a parameter that the checkpoint does not list."""
    path = _saved(context)
    names = ("used", "late", "never", "added") if context.rank == 1 else ("used", "late", "never")
    return _attempt(start_run(names), path)


def one_rank_cannot_act(context: RankContext) -> dict[str, Any]:
    """On rank 1 alone the scheduler refuses its state, after the optimizer has taken its own."""
    path = _saved(context)
    run = start_run()
    run.train(range(2), ["late"])
    if context.rank == 1:

        def refuse(state: dict[str, Any]) -> None:
            run.scheduler.last_epoch = 99
            raise ValueError("no such schedule")

        run.scheduler.load_state_dict = refuse
    return _attempt(run, path)


class Gain:
    """A callable schedule with state of its own."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        return self.factor / (1 + step)


def _nested_run() -> Run:
    run = start_run()
    lambdas = torch.optim.lr_scheduler.LambdaLR(run.optimizer, Gain())
    steps = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [4, 6])
    return Run(run.model, run.optimizer, torch.optim.lr_scheduler.ChainedScheduler([lambdas, steps]))


def one_rank_cannot_act_on_nested_schedulers(context: RankContext) -> dict[str, Any]:
    """As above, with schedulers that hold schedulers: those of the other ranks have taken their state by then."""
    run = _nested_run()
    run.train(range(3), ["used"])
    run.scheduler._schedulers[0].lr_lambdas[0].factor = 0.5
    path = str(context.directory / "optim")
    dcp.save(
        {"optim": optimizer_state_dict(run.model, run.optimizer), "sched": run.scheduler.state_dict()},
        checkpoint_id=path,
    )
    dist.barrier()
    fresh = _nested_run()
    if context.rank == 1:

        def refuse(state: dict[str, Any]) -> None:
            raise ValueError("no such schedule")

        fresh.scheduler.load_state_dict = refuse
    gain = fresh.scheduler._schedulers[0].lr_lambdas[0]
    found = _attempt(fresh, path)
    return found if gain.factor == 1.0 else {**found, "changed": [*found["changed"], "gain"]}


def one_rank_fails_without_a_text(context: RankContext) -> dict[str, Any]:
    """On rank 1 the scheduler raises an exception whose own text cannot be had."""

    class Mute(ValueError):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    path = _saved(context)
    run = start_run()
    if context.rank == 1:

        def refuse(state: dict[str, Any]) -> None:
            raise Mute

        run.scheduler.load_state_dict = refuse
    return _attempt(run, path)


def one_stage_is_all_new(context: RankContext) -> int:
    """Two pipeline stages, one of which holds new parameters only, which the caller admits."""
    path = _saved(context)
    run = start_run([("used", "late", "never"), ("added",)][context.rank])
    load_optimizer_state([run.model], [run.optimizer], None, path, allow_new_parameters=True)
    return len(run.optimizer.state)


def nothing_is_listed_anywhere(context: RankContext) -> str:
    """No rank holds a parameter of the file, although new ones are admitted."""
    path = _saved(context)
    run = start_run((["added", "other"][context.rank],))
    try:
        load_optimizer_state([run.model], [run.optimizer], None, path, allow_new_parameters=True)
    except OptimizerStateError as failure:
        return str(failure)
    return ""


def scalar_parameter(context: RankContext) -> list[str]:
    """A 0-dimensional DTensor: its moments are DTensors, its step is not."""
    mesh = init_device_mesh("cpu", (context.world_size,))
    path = str(context.directory / "optim")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        model.scale = nn.Parameter(distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (model.scale * model.scale).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer)
    dcp.save({"optim": optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    other, fresh = build()
    with torch.no_grad():
        other.scale.copy_(model.scale)
    load_optimizer_state([other], [fresh], None, path)
    for pair in ((model, optimizer), (other, fresh)):
        train(*pair)
    return differences(snapshot(model, optimizer, Silent()), snapshot(other, fresh, Silent()))


def names_below_ddp(context: RankContext) -> bool:
    """Whether the names below DDP are the keys of torch's own state dict."""
    run = start_run()
    wrapped = nn.parallel.DistributedDataParallel(run.model)
    names = [name for name, _ in iter_named_parameters(wrapped)]
    return names == list(get_model_state_dict(wrapped))


class Silent:
    """Stands where a snapshot asks for a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


def everything_is_listed_somewhere(context: RankContext) -> list[str]:
    """Each rank holds one layer, as pipeline stages do; the report must not call the others' dropped."""
    path = _saved(context)
    run = start_run((["used", "late"][context.rank],))
    messages: list[str] = []
    import logging

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nemo_automodel_shim").addHandler(handler)
    load_optimizer_state([run.model], [run.optimizer], None, path)
    return messages


def save_stages_by_position(context: RankContext) -> str:
    """Pipeline stages have other parameters under the same integer ids: what the save says."""
    run = start_run((f"stage{context.rank}",))
    run.train(range(1), [f"stage{context.rank}"])
    try:
        validate_optimizers_for_save([run.model], [run.optimizer], by_position=True)
    except OptimizerStateError as exc:
        return str(exc)
    return "saved"

# SPDX-License-Identifier: Apache-2.0
"""Runs with parameters that are used, used late and never used, and the ways to carry one over into another."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.contracts.outcomes import PreconditionError
from tests.contracts.unirl.upstream import backend_of, sharded_state
from tests.support.training import WIDTH, Run, differences

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_OPTIM = torch.optim
ADAMW: Factory = lambda params: _OPTIM.AdamW(params, lr=1e-2, weight_decay=1e-2)  # noqa: E731
OPTIMIZERS: dict[str, Factory] = {
    "AdamW": ADAMW,
    "AdamW-amsgrad-maximize": lambda params: _OPTIM.AdamW(params, lr=1e-2, amsgrad=True, maximize=True),
    "AdamW-fused": lambda params: _OPTIM.AdamW(params, lr=1e-2, fused=True),
    "AdamW-foreach": lambda params: _OPTIM.AdamW(params, lr=1e-2, foreach=True),
    "AdamW-tensor-lr": lambda params: _OPTIM.AdamW(params, lr=torch.tensor(1e-2)),
    "Adam-L2": lambda params: _OPTIM.Adam(params, lr=1e-2, weight_decay=1e-2),
    "NAdam": lambda params: _OPTIM.NAdam(params, lr=1e-2, weight_decay=1e-2),
    "RAdam": lambda params: _OPTIM.RAdam(params, lr=1e-2, weight_decay=1e-2),
    "Adamax": lambda params: _OPTIM.Adamax(params, lr=1e-2),
    "Adagrad": lambda params: _OPTIM.Adagrad(params, lr=1e-2, lr_decay=1e-2, initial_accumulator_value=0.1),
    "Adadelta": lambda params: _OPTIM.Adadelta(params, lr=1e-1),
    "RMSprop": lambda params: _OPTIM.RMSprop(params, lr=1e-2),
    "RMSprop-centred": lambda params: _OPTIM.RMSprop(params, lr=1e-2, centered=True, momentum=0.9),
    "Rprop": lambda params: _OPTIM.Rprop(params, lr=1e-2),
    "ASGD": lambda params: _OPTIM.ASGD(params, lr=1e-2),
    "Adafactor": lambda params: _OPTIM.Adafactor(params, lr=1e-2),
    "Muon": lambda params: _OPTIM.Muon([param for param in params if param.ndim == 2], lr=1e-2),
    "SGD": lambda params: _OPTIM.SGD(params, lr=1e-2),
    "SGD-momentum": lambda params: _OPTIM.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "SGD-nesterov": lambda params: _OPTIM.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
}

USED, LATE, ALL = ["used"], ["used", "late"], ["used", "late", "never"]
CONTENTS = {"partial": (3, USED), "cold": (0, []), "dense": (3, ALL)}
FORMS = ("gathered", "sharded", "torch", "dcp")  # the first two in memory, the others as the backend's files
INTO = ("fresh", "warm")


class Cell(NamedTuple):
    """One case of a matrix."""

    optimizer: str
    content: str
    form: str
    into: str

    def __str__(self) -> str:
        return " ".join(self)


def cells(optimizers: Iterable[str], forms: Iterable[str] = FORMS) -> list[Cell]:
    """Every content and every target for these optimizers and forms."""
    return [Cell(*each) for each in itertools.product(optimizers, CONTENTS, forms, INTO)]


def start(factory: Factory = ADAMW, *, seed: int = 1, shard: bool = False, names: Iterable[str] = ALL) -> Run:
    """A fresh run over layers of ``WIDTH`` inputs and 3 outputs: over 4 ranks, one has an empty shard."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(WIDTH, 3) for name in names})
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    if shard:
        for layer in model.values():
            fully_shard(layer)
    return with_optimizer(model, factory)


def with_optimizer(model: nn.Module, factory: Factory = ADAMW) -> Run:
    """``model`` with an optimizer for its trainable parameters, and a scheduler."""
    optimizer = factory([param for param in model.parameters() if param.requires_grad])
    return Run(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))


def take_weights(run: Run, other: Run) -> None:
    """Give ``other`` the weights and the scheduler of ``run``: what no optimizer state dict carries."""
    other.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    other.scheduler.load_state_dict(copy.deepcopy(run.scheduler.state_dict()))


def carry(run: Run, other: Run, form: str, path: Path) -> None:
    """Save ``run`` in ``form`` and load it into ``other``."""
    if form == "gathered":
        state = sharded_state.gather_optimizer_state_dict(run.model, run.optimizer)
        take_weights(run, other)
        sharded_state.load_optimizer_state_dict(other.model, other.optimizer, state)
    elif form == "sharded":
        state = copy.deepcopy(sharded_state.sharded_optimizer_state_dict(run.model, run.optimizer))
        take_weights(run, other)
        sharded_state.load_sharded_optimizer_state_dict(other.model, other.optimizer, state)
    else:
        backend_of(run.model, form, run.optimizer, run.scheduler).save(str(path), step=3)
        dist.barrier()  # rank 0 writes the torch format, and the others need not wait for it
        step = backend_of(other.model, form, other.optimizer, other.scheduler).load(str(path))
        if step != 3:
            raise PreconditionError(f"the backend resumed at step {step}")


def try_cell(cell: Cell, path: Path, *, shard: bool = False) -> str | None:
    """Return what is wrong in a cell, or None if it is exact."""
    factory = OPTIMIZERS[cell.optimizer]
    run = start(factory, shard=shard)
    steps, names = CONTENTS[cell.content]
    run.train(range(steps), names)
    other = start(factory, seed=2, shard=shard)
    if cell.into == "warm":
        other.train(range(50, 52), ALL)
    before = run.snapshot()
    try:
        carry(run, other, cell.form, path)
        return difference_of(run, before, other, steps)
    except PreconditionError:
        raise
    except BaseException as failure:  # CheckpointException of torch derives from BaseException
        if isinstance(failure, KeyboardInterrupt):
            raise
        return short(failure)


def resume(run: Run, other: Run, form: str, path: Path) -> None:
    """``carry``, where a refusal is a failed assertion."""
    try:
        carry(run, other, form, path)
    except PreconditionError:
        raise
    except BaseException as failure:  # CheckpointException of torch derives from BaseException
        if isinstance(failure, KeyboardInterrupt):
            raise
        raise AssertionError(f"the resume was refused: {short(failure)}") from failure


def short(failure: BaseException) -> str:
    """One line of an exception: what DCP's nested tracebacks come to."""
    return f"{type(failure).__name__}: {str(failure).strip().splitlines()[-1].strip()[:200]}"


def difference_of(run: Run, before: dict[str, Any], other: Run, steps: int) -> str | None:
    """What the save moved, or what is not equal bit for bit, now or after four more steps; None if nothing."""
    moved = differences(before, run.snapshot())
    if moved:
        return f"the save moved the live run: {moved[:2]}"
    at_once = differences(run.snapshot(), other.snapshot())
    if at_once:
        return f"not equal after the load: {at_once[:2]}"
    for each in (run, other):
        each.train(range(steps, steps + 4), LATE)
    later = differences(run.snapshot(), other.snapshot())
    return f"not equal four steps later: {later[:2]}" if later else None

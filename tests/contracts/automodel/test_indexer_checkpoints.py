# SPDX-License-Identifier: Apache-2.0
"""An indexer in checkpoints: its weights are there whatever the flag; its optimizer state follows the flag."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.contracts.automodel import indexer_ranks
from tests.contracts.automodel.tiny_models import VOCABULARY, build_deepseek_v4, indexer_parameters, seed_parameters
from tests.contracts.automodel.upstream import PRELOAD, plain_checkpointer
from tests.contracts.outcomes import PreconditionError
from tests.support.training import Run, differences
from tests.support.world import run_world

OPTIONS = {"num_hidden_layers": 2, "compress_ratios": [0, 4]}


class Language(Run):
    """A DeepSeek-V4 of two layers, of which one has an indexer, with AdamW in two groups and ``LambdaLR``."""

    def train(self, steps: range, names: list[str] | None = None) -> None:
        """Step through seeded sequences of 40 tokens."""
        for step in steps:
            tokens = torch.randint(0, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(step))
            logits = self.model(tokens).logits
            nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()


def start(train_indexer: bool, lr: float, weight_decay: float) -> Language:
    """A fresh run; the indexer's parameters, if trained, are the first of their group.

    Where the release takes no flag, the indexer is frozen by hand, as its builder does.
    """
    model = build_deepseek_v4(train_indexer=train_indexer, **OPTIONS)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.bfloat16)
    seed_parameters(model, 11)
    inside = indexer_parameters(model)
    if not inside:
        raise PreconditionError("the model has no indexer")
    for param in inside.values():
        param.requires_grad_(train_indexer)
    held = {name: param for name, param in model.named_parameters() if param.requires_grad}
    first = [param for name, param in held.items() if name in inside]
    wide = [param for name, param in held.items() if name not in inside and param.ndim >= 2]
    narrow = [param for name, param in held.items() if name not in inside and param.ndim < 2]
    groups = [{"params": first + wide, "lr": lr, "weight_decay": weight_decay}, {"params": narrow, "lr": lr / 2}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    return Language(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))


def shared(run: Language) -> dict[str, Any]:
    """What the run goes on from, without the indexer's optimizer state."""
    found = run.snapshot()
    found["state"] = {name: state for name, state in found["state"].items() if ".indexer." not in name}
    return found


def saved(path: Path, train_indexer: bool) -> Language:
    """Train two steps, save model and optimizer, and return the run that goes on."""
    run = start(train_indexer, lr=1e-2, weight_decay=0.1)
    run.train(range(2))
    if any(run.optimizer.state.get(param) for param in indexer_parameters(run.model).values()):
        raise PreconditionError("the indexer was updated")
    checkpointer = plain_checkpointer(path)
    checkpointer.save_model(run.model, str(path))
    checkpointer.save_optimizer(run.optimizer, run.model, str(path), run.scheduler)
    return run


@pytest.mark.contract("indexer.in-model-checkpoint", meaning="a frozen indexer is saved and loaded with the model")
@pytest.mark.parametrize("form", ["torch_save", "safetensors"])
def test_frozen_indexer_is_in_the_model_checkpoint(form: str, tmp_path: Path) -> None:
    # In a process of its own: torch's planner remembers the plan of the form that a process saved first.
    (found,) = run_world(indexer_ranks.save_and_load_model, 1, tmp_path, (form,), preload=PRELOAD)
    if not found["frozen"]:
        raise PreconditionError("the model has no frozen indexer")
    assert len(found["saved"]) == len(found["frozen"]), found
    assert found["changed"] == []


@pytest.mark.contract("indexer.not-in-optimizer", meaning="a frozen indexer takes no room in the optimizer or its file")
def test_frozen_indexer_is_not_in_the_optimizer(tmp_path: Path) -> None:
    model = build_deepseek_v4(**OPTIONS)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.bfloat16)
    seed_parameters(model, 11)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    run = Language(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    run.train(range(1))
    plain_checkpointer(tmp_path).save_optimizer(optimizer, model, str(tmp_path), run.scheduler)
    keys = dcp.FileSystemReader(tmp_path / "optim").read_metadata().state_dict_metadata
    inside = [name for name in indexer_parameters(model) if any(f".{name}." in key for key in keys)]
    assert not inside, f"{len(inside)} indexer parameters are in the optimizer's file"


@pytest.mark.contract("indexer.frozen-since", meaning="saved with it trained, resumed frozen: exact, and reported")
def test_indexer_frozen_since_the_save_is_dropped_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = saved(tmp_path, train_indexer=True)
    resumed = start(False, lr=1.0, weight_decay=0.5)
    checkpointer = plain_checkpointer(tmp_path)
    checkpointer.load_model(resumed.model, str(tmp_path / "model"))
    with caplog.at_level(logging.INFO):
        checkpointer.load_optimizer(resumed.optimizer, resumed.model, str(tmp_path), resumed.scheduler)
    assert differences(shared(run), shared(resumed)) == []
    for each in (run, resumed):
        each.train(range(2, 6))
    assert differences(shared(run), shared(resumed)) == []
    inside = indexer_parameters(resumed.model)
    assert not any(resumed.optimizer.state.get(param) for param in inside.values())
    reports = [text for text in caplog.messages if "dropped" in text]
    count = f"{len(inside)} saved parameters"
    told = len(reports) == 1 and count in reports[0] and any(name in reports[0] for name in inside)
    assert told, f"nothing says that {count} were dropped: {json.dumps(reports)}"


@pytest.mark.contract("indexer.trained-since", meaning="saved frozen, resumed with it trained: refused, or opted in")
def test_indexer_trained_since_the_save_is_refused_unless_opted_in(tmp_path: Path) -> None:
    run = saved(tmp_path, train_indexer=False)
    resumed = start(True, lr=1.0, weight_decay=0.5)
    inside = indexer_parameters(resumed.model)
    if resumed.optimizer.param_groups[0]["params"][0] not in set(inside.values()):
        raise PreconditionError("the first parameter of the group is not the indexer's")
    checkpointer = plain_checkpointer(tmp_path)
    checkpointer.load_model(resumed.model, str(tmp_path / "model"))
    before = resumed.snapshot()
    with pytest.raises(BaseException) as failure:  # CheckpointException of torch derives from BaseException
        checkpointer.load_optimizer(resumed.optimizer, resumed.model, str(tmp_path), resumed.scheduler)
    text = str(failure.value).strip()
    named = any(name in text for name in inside) and "allow_new_parameters" in text
    assert named, f"unhelpful refusal: {text.splitlines()[-1].strip()}"
    assert differences(before, resumed.snapshot()) == []

    checkpointer.load_optimizer(
        resumed.optimizer, resumed.model, str(tmp_path), resumed.scheduler, allow_new_parameters=True
    )
    kept = [(group["lr"], group["initial_lr"], group["weight_decay"]) for group in run.optimizer.param_groups]
    assert kept == [(1e-2 * (1 / 3), 1e-2, 0.1), (5e-3 * (1 / 3), 5e-3, 0.0)]
    assert kept == [
        (group["lr"], group["initial_lr"], group["weight_decay"]) for group in resumed.optimizer.param_groups
    ]
    assert not any(resumed.optimizer.state.get(param) for param in inside.values())
    assert differences(run.snapshot(), resumed.snapshot()) == []
    for each in (run, resumed):
        each.train(range(2, 6))
    assert differences(run.snapshot(), resumed.snapshot()) == []

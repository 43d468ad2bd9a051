# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 as built: the indexer's policy, and that every parameter is initialised."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest
import torch
from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM
from torch import nn

from tests.contracts.automodel import indexer_ranks
from tests.contracts.automodel.tiny_models import build_deepseek_v4, indexer_parameters
from tests.contracts.automodel.upstream import PRELOAD, cpu_backend
from tests.contracts.outcomes import PreconditionError
from tests.support.world import run_world

INDEXER_PARAMETERS = 6
CPU = torch.device("cpu")


def owned(model: nn.Module) -> dict[str, nn.Parameter]:
    """The indexer's parameters; the tiny model has one indexer."""
    found = indexer_parameters(model)
    if len(found) != INDEXER_PARAMETERS:
        raise PreconditionError(f"{INDEXER_PARAMETERS} indexer parameters expected, found {sorted(found)}")
    return found


def from_config(monkeypatch: pytest.MonkeyPatch, **options: object) -> nn.Module:
    """The model as the library's builder makes it: on the meta device, then materialised and initialised.

    The builder takes the CUDA device that torch names, and so does ``initialize_weights``: here both are given a CPU.
    """
    config = build_deepseek_v4(**options).config
    config.architectures = [DeepseekV4ForCausalLM.__name__]
    initialize = DeepseekV4ForCausalLM.initialize_weights
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)
    monkeypatch.setattr(
        DeepseekV4ForCausalLM,
        "initialize_weights",
        lambda self, **given: initialize(self, **{"buffer_device": CPU, **given}),
    )
    auto = importlib.import_module("nemo_automodel").NeMoAutoModelForCausalLM
    return auto.from_config(config, backend=cpu_backend())


@pytest.mark.contract("indexer.frozen-by-default", meaning="what no gradient can reach is not in the optimizer")
@pytest.mark.parametrize("path", ["direct", "initialised", "meta-then-materialised"])
def test_indexer_is_frozen_by_default(path: str) -> None:
    if path == "meta-then-materialised":
        with torch.device("meta"):
            model = build_deepseek_v4()
        model.to_empty(device="cpu")
    else:
        model = build_deepseek_v4()
    if path != "direct":
        model.initialize_weights(buffer_device=CPU, dtype=torch.bfloat16)
    frozen_alone(model)


@pytest.mark.contract("indexer.frozen-by-builder", meaning="the library's own builder freezes the indexer, as before")
def test_indexer_is_frozen_by_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen_alone(from_config(monkeypatch))


def frozen_alone(model: nn.Module) -> None:
    """Hold that the indexer is frozen, and nothing else."""
    trainable = sorted(name for name, param in owned(model).items() if param.requires_grad)
    assert not trainable, f"{len(trainable)} indexer parameters are trainable: {trainable}"
    others = [name for name, param in model.named_parameters() if not param.requires_grad and name not in owned(model)]
    assert not others, f"frozen beside the indexer: {others}"


@pytest.mark.contract("indexer.train-flag", meaning="train_indexer=True keeps the old behaviour, with a warning")
@pytest.mark.parametrize("path", ["direct", "from_config"])
def test_flag_keeps_the_indexer_trainable_and_warns_once(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "direct":
        with caplog.at_level(logging.WARNING):
            model = build_deepseek_v4(train_indexer=True)
    else:
        with caplog.at_level(logging.WARNING):
            model = from_config(monkeypatch, train_indexer=True)
    warnings = [text for text in caplog.messages if all(name in text for name in owned(model))]
    # The builder's own model, and the one whose config it was given.
    expected = 1 if path == "direct" else 2
    assert len(warnings) == expected, f"{len(warnings)} warnings name the indexer parameters"
    assert all(param.requires_grad for param in owned(model).values())


@pytest.mark.contract("indexer.by-type", meaning="only an indexer is frozen, not what has its name or its place")
def test_what_only_sounds_like_an_indexer_is_left_alone() -> None:
    model = build_deepseek_v4()
    model.reindexer_gate = nn.Linear(2, 2)
    model.head = nn.ModuleDict({"indexer": nn.Linear(2, 2)})
    # One with a soft selection, in the place of the hard one that this layer has none of: it does get a gradient.
    model.model.layers["3"].self_attn.compressor.indexer = nn.Linear(2, 2)
    infrastructure = importlib.import_module("nemo_automodel._transformers.infrastructure")
    infrastructure.apply_model_infrastructure(model, is_meta_device=False, device=CPU)
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    others = sorted(set(frozen) - set(owned(model)))
    assert not others, f"frozen although no indexer: {others}"


@pytest.mark.contract("indexer.stays-frozen", meaning="sharding, adapters and later passes do not bring it back")
def test_no_later_pass_brings_the_indexer_back(tmp_path: Path) -> None:
    found = run_world(indexer_ranks.trainable_after_each_pass, 2, tmp_path, preload=PRELOAD)
    assert all(rank["frozen_before"] for rank in found)
    again = sorted({case for rank in found for case, names in rank["trainable"].items() if names})
    assert not again, f"trainable again after: {', '.join(again)}"
    assert all(rank["others"] == [] for rank in found), found


@pytest.mark.contract("init.every-parameter", meaning="a model trained from scratch does not start from stale memory")
def test_initialize_weights_leaves_nothing_as_the_memory_was() -> None:
    model = build_deepseek_v4(num_nextn_predict_layers=1)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.bfloat16)
    stale = [name for name, param in model.named_parameters() if not torch.isfinite(param).all()]
    assert not stale, f"{len(stale)} parameters were not initialised: {stale}"

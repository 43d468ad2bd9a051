# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 as built: the indexer's policy, and that every parameter is initialised."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.contracts.automodel.tiny_models import build_deepseek_v4, indexer_parameters, logits_of
from tests.contracts.outcomes import PreconditionError

INDEXER_PARAMETERS = 6


def owned(model: nn.Module) -> dict[str, nn.Parameter]:
    """The indexer's parameters; the tiny model has one indexer."""
    found = indexer_parameters(model)
    if len(found) != INDEXER_PARAMETERS:
        raise PreconditionError(f"{INDEXER_PARAMETERS} indexer parameters expected, found {sorted(found)}")
    return found


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
        model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.bfloat16)
    trainable = sorted(name for name, param in owned(model).items() if param.requires_grad)
    assert not trainable, f"{len(trainable)} indexer parameters are trainable: {trainable}"
    others = [name for name, param in model.named_parameters() if not param.requires_grad and name not in owned(model)]
    assert not others, f"frozen beside the indexer: {others}"


@pytest.mark.contract("indexer.train-flag", meaning="train_indexer=True keeps the old behaviour, with a warning")
def test_flag_keeps_the_indexer_trainable_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = build_deepseek_v4(train_indexer=True)
    assert all(param.requires_grad for param in owned(model).values())
    warnings = [text for text in caplog.messages if all(name in text for name in owned(model))]
    assert len(warnings) == 1, f"{len(warnings)} warnings name the indexer parameters"


@pytest.mark.contract("indexer.no-gradient-path", meaning="freezing the indexer loses nothing: only indices leave it")
def test_no_gradient_reaches_a_trainable_indexer() -> None:
    model = build_deepseek_v4(train_indexer=True, torch_dtype="float32")
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.02)
    if not all(param.requires_grad for param in owned(model).values()):
        raise PreconditionError("the indexer is frozen although train_indexer=True")
    tokens = torch.randint(0, 256, (1, 32), generator=generator)
    logits_of(model(tokens)).float().square().mean().backward()
    reached = [name for name, param in owned(model).items() if param.grad is not None]
    assert reached == []
    assert model.model.layers["2"].self_attn.compressor.wkv.weight.grad is not None


@pytest.mark.contract("init.every-parameter", meaning="a model trained from scratch does not start from stale memory")
def test_initialize_weights_leaves_nothing_as_the_memory_was() -> None:
    model = build_deepseek_v4(num_nextn_predict_layers=1)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.bfloat16)
    stale = [name for name, param in model.named_parameters() if not torch.isfinite(param).all()]
    assert not stale, f"{len(stale)} parameters were not initialised: {stale}"

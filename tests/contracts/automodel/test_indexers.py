# SPDX-License-Identifier: Apache-2.0
"""The indexers of every model of the release: which there are, what reaches them, and what their flag is for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nemo_automodel
import pytest
import torch
from torch import nn

from tests.contracts.automodel.distillation import distillation_loss
from tests.contracts.automodel.indexer_scan import find_candidates
from tests.contracts.automodel.tiny_models import (
    INDEXERS,
    VOCABULARY,
    build_deepseek_v4,
    build_deepseek_v32,
    build_glm_moe_dsa,
    indexer_parameters,
    seed_parameters,
)
from tests.contracts.outcomes import PreconditionError

BUILDERS = {"deepseek_v4": build_deepseek_v4, "deepseek_v32": build_deepseek_v32, "glm_moe_dsa": build_glm_moe_dsa}
OWNED = {"deepseek_v4": 6, "deepseek_v32": 10, "glm_moe_dsa": 10}
# All classes that the scan finds in the releases looked at (0.5.0, 0.6.0, 0.7.0): those that hand out indices only …
HAND_OUT_INDICES = {
    "deepseek_v4/layers.py::DeepseekV4Indexer",
    "deepseek_v32/layers.py::DeepseekV32Indexer",
    "deepseek_v41/attention.py::_Indexer",
    "glm5_next/layers.py::Glm5NextKPoolIndexer",
    "glm_moe_dsa/layers.py::GlmMoeDsaIndexer",
    "minimax_m3_vl/layers.py::MiniMaxM3Indexer",
    "qwen3_8_flash_next/qsa.py::Qwen3_8_FlashNextQSAIndexer",
}
# … and those that do not: routers use the scores beside the indices, the others have no parameters to score with.
OTHERS = {
    "common/indexer_policy.py::HardTopKIndexer",
    "deepseek_v4/model.py::DeepseekV4HashGate",
    "deepseek_v4/model.py::DeepseekV4VisionGate",
    "deepseek_v41/attention.py::DeepseekV41Attention",
    "gemma4_moe/model.py::Gemma4Gate",
    "inkling/layers.py::InklingGate",
    "kimi_k3/model.py::KimiK3Gate",
    "minimax_m3_vl/cp_sparse_attn.py::MiniMaxM3CPSparseAttention",
    "minimax_m3_vl/msa.py::_SelectionPlan",
}


@pytest.fixture(params=BUILDERS)
def name(request: pytest.FixtureRequest) -> str:
    """A model with an indexer."""
    return request.param


def owned(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The parameters of the model's indexers."""
    found = indexer_parameters(model)
    if len(found) != OWNED[name]:
        raise PreconditionError(f"{OWNED[name]} indexer parameters expected, found {sorted(found)}")
    return found


def trained(name: str, **options: object) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A seeded FP32 model whose indexers are trainable."""
    model = BUILDERS[name](train_indexer=True, torch_dtype="float32", **options)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    seed_parameters(model, 3)
    if not all(param.requires_grad for param in owned(model, name).values()):
        raise PreconditionError("the indexer is frozen although train_indexer=True")
    return model, owned(model, name)


def tokens_of(length: int) -> torch.Tensor:
    """Two seeded sequences."""
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(5))


def language_model_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    found = model(tokens)
    logits = getattr(found, "logits", found).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.contract("indexer.inventory", meaning="every class that picks positions is known: indexer, or not")
def test_every_class_that_picks_positions_is_declared(measure: Callable[[str, float], None]) -> None:
    found = find_candidates(Path(nemo_automodel.__file__).parent)
    indexers = HAND_OUT_INDICES & found.keys()
    measure("indexers", len(indexers))
    if not {f"{name}.py::{kind.__name__}" for kind in INDEXERS for name in [_place(kind)]} <= indexers:
        raise PreconditionError(f"the scan does not find the indexers that are there: {sorted(found)}")
    undeclared = sorted(found.keys() - HAND_OUT_INDICES - OTHERS)
    assert not undeclared, f"undeclared: {undeclared}"


def _place(kind: type) -> str:
    return kind.__module__.partition(".models.")[2].replace(".", "/")


@pytest.mark.contract("indexer.every-model", meaning="the same policy and flag for every model that has an indexer")
def test_every_indexer_has_the_flag() -> None:
    without = []
    for key in sorted(HAND_OUT_INDICES & find_candidates(Path(nemo_automodel.__file__).parent).keys()):
        file, _, kind = key.partition("::")
        place = f"nemo_automodel.components.models.{file.removesuffix('.py').replace('/', '.')}"
        if not hasattr(getattr(importlib.import_module(place), kind), "train_indexer"):
            without.append(key)
    assert not without, f"indexers without the flag: {without}"


@pytest.mark.contract("indexer.every-model", meaning="the same policy and flag for every model that has an indexer")
@pytest.mark.parametrize("other", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("path", ["direct", "meta-then-materialised", "flag"])
def test_other_models_follow_the_same_policy(other: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    if path == "flag":
        with caplog.at_level(logging.WARNING):
            model = BUILDERS[other](train_indexer=True)
        warnings = [text for text in caplog.messages if all(name in text for name in owned(model, other))]
        assert len(warnings) == 1, f"{len(warnings)} warnings name the indexer parameters"
        assert all(param.requires_grad for param in owned(model, other).values())
        assert type(model.config).from_dict(model.config.to_dict()).train_indexer is True
        return
    with torch.device("cpu" if path == "direct" else "meta"):
        model = BUILDERS[other]()
    if path != "direct":
        model.to_empty(device="cpu")
        model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    trainable = sorted(name for name, param in owned(model, other).items() if param.requires_grad)
    assert not trainable, f"{len(trainable)} indexer parameters are trainable: {trainable}"
    others = [name for name, param in model.named_parameters() if not param.requires_grad]
    assert sorted(others) == sorted(owned(model, other))


def reached(loss: torch.Tensor) -> set[int]:
    """Identities of the leaves that the autograd graph of ``loss`` leads to."""
    leaves, seen, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves


@pytest.mark.contract("indexer.no-gradient-path", meaning="freezing the indexer loses nothing: only indices leave it")
def test_no_path_leads_from_the_loss_to_an_indexer(name: str) -> None:
    model, parameters = trained(name)
    loss = language_model_loss(model, tokens_of(64))
    leaves = reached(loss)
    others = [param for key, param in model.named_parameters() if key not in parameters and param.requires_grad]
    # A compressor that waits for 128 tokens, and a hash table's stand-in, are all that a walk may miss.
    if sum(id(param) in leaves for param in others) < 0.8 * len(others):
        raise PreconditionError("the walk does not even find the other parameters")
    assert [key for key, param in parameters.items() if id(param) in leaves] == []
    loss.backward()
    assert [key for key, param in parameters.items() if param.grad is not None] == []


@pytest.mark.contract("indexer.selection-only", meaning="with the selection held, an indexer's weights do not matter")
def test_loss_depends_on_the_selection_alone(name: str) -> None:
    model, parameters = trained(name)
    tokens = tokens_of(64)
    indexers = [module for module in model.modules() if isinstance(module, INDEXERS)]
    kept: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    keeping = [module.register_forward_hook(lambda _, __, indices: kept.append(indices)) for module in indexers]
    with torch.no_grad():
        loss = language_model_loss(model, tokens)
        for hook in keeping:
            hook.remove()
        generator = torch.Generator().manual_seed(7)
        for param in parameters.values():
            param.copy_(torch.randn(param.shape, generator=generator))
        held = iter(kept)

        def hold(module: nn.Module, inputs: Any, indices: torch.Tensor) -> torch.Tensor:
            chosen.append(indices)
            return next(held)

        for module in indexers:
            module.register_forward_hook(hold)
        again = language_model_loss(model, tokens)
    if any(torch.equal(*pair) for pair in zip(kept, chosen, strict=True)):
        raise PreconditionError("other weights choose the same positions: there is nothing to hold")
    assert torch.equal(loss, again)


@pytest.mark.contract("indexer.distillation", meaning="with the flag on, a loss of its own trains an indexer")
@pytest.mark.parametrize("other", ["deepseek_v32", "glm_moe_dsa"])
def test_a_loss_of_its_own_trains_an_indexer(other: str) -> None:
    model, parameters = trained(other)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(5.0 if param.ndim >= 2 else 1.0)  # else all attention is as good as uniform
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    losses = []
    for _ in range(20):
        loss = distillation_loss(model, tokens_of(32), INDEXERS)
        torch.autograd.backward(loss, inputs=list(parameters.values()))
        silent = [name for name, param in parameters.items() if param.grad is None or not param.grad.any()]
        assert silent == []
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0], losses
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert moved == set(parameters)

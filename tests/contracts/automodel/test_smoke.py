# SPDX-License-Identifier: Apache-2.0
"""The smoke run of the original report: DeepSeek-V4 under EP=8 saves after one step and will not resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.contracts.automodel import smoke_ranks
from tests.contracts.automodel.tiny_models import DeepseekV4Indexer
from tests.contracts.automodel.upstream import PRELOAD
from tests.contracts.outcomes import ContractNotApplicable, PreconditionError
from tests.support.world import run_world

WORLD_SIZE = 8
PRELOADED = (*PRELOAD, smoke_ranks.__name__)
# The report's list, with the names that these parameters have in 0.5.0; `ape` was a parameter of its own before.
APE = "ape_param.weight" if isinstance(getattr(DeepseekV4Indexer, "ape", None), property) else "ape"
GATES = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(4)]
INDEXER = [
    f"model.layers.2.self_attn.compressor.indexer.{name}"
    for name in (APE, "kv_norm.weight", "wgate.weight", "wkv.weight", "wq_b.weight", "weights_proj.weight")
]


def state_keys(names: list[str]) -> list[str]:
    """The keys of these parameters' AdamW state."""
    return sorted(f"optim.state.{name}.{entry}" for name in names for entry in ("step", "exp_avg", "exp_avg_sq"))


# Releases that gather the routing weights with a backward lack the indexer's part alone.
REPORTED = {"gates and indexer": state_keys(GATES + INDEXER), "indexer": state_keys(INDEXER)}


def saved_by_this_side(path: Path, options: dict[str, object]) -> Path:
    """A checkpoint that this side saved after one step, with the end state of the run that went on."""
    path.mkdir()
    found = run_world(
        smoke_ranks.train_and_save, WORLD_SIZE, path / "world", (str(path), options), preload=PRELOADED, deadline=120.0
    )
    losses = [rank["loss"] for rank in found]
    if not all(math.isfinite(loss) and abs(loss - math.log(256)) < 0.5 for loss in losses):
        raise PreconditionError(f"the loss should be near ln 256 = 5.545 on every rank: {losses}")
    return path


@pytest.fixture(scope="module")
def checkpoint(contract_side: str, artifacts: Path) -> Path:
    """The checkpoint of the default model."""
    return saved_by_this_side(artifacts / f"smoke-{contract_side}", {})


@pytest.mark.contract(
    "smoke.key-difference", meaning="what is saved is what a resume will ask for (the reported count)"
)
def test_saved_keys_are_the_keys_a_resume_asks_for(
    checkpoint: Path, tmp_path: Path, measure: Callable[[str, float], None]
) -> None:
    found = run_world(
        smoke_ranks.key_difference, WORLD_SIZE, tmp_path, (str(checkpoint), {}), preload=PRELOADED, deadline=120.0
    )
    if any(rank != found[0] for rank in found):
        raise PreconditionError("the ranks disagree about the keys")
    keys = found[0]
    counts = {name: keys[name] if isinstance(keys[name], int) else len(keys[name]) for name in keys}
    for name, number in counts.items():
        measure(name, number)
    line = " ".join(f"{name}={number}" for name, number in counts.items())
    if keys["missing"] and keys["missing"] not in REPORTED.values():
        raise PreconditionError(f"{line}, but not the report's names: {keys['missing']}")
    assert not keys["missing"] + keys["extra"], line


@pytest.mark.contract("smoke.resume", meaning="the reported 8-rank run saves, resumes and continues bit for bit")
@pytest.mark.parametrize("train_indexer", [False, True], ids=["default", "indexer-trainable"])
def test_resume_continues_bit_for_bit(train_indexer: bool, checkpoint: Path, tmp_path: Path) -> None:
    # With a trainable indexer the checkpoint is sparse on a patched tree too: nothing ever updates the indexer.
    options: dict[str, object] = {"train_indexer": True} if train_indexer else {}
    path = saved_by_this_side(tmp_path / "trainable", options) if train_indexer else checkpoint
    found = run_world(
        smoke_ranks.resume, WORLD_SIZE, tmp_path / "resume", (str(path), options), preload=PRELOADED, deadline=120.0
    )
    assert found == [[]] * WORLD_SIZE


@pytest.mark.contract("smoke.stock-checkpoint", meaning="a checkpoint that the unpatched tree saved resumes exactly")
def test_checkpoint_of_the_stock_tree_resumes(
    contract_side: str, checkpoint: Path, artifacts: Path, tmp_path: Path
) -> None:
    unpatched = artifacts / "smoke-stock" if contract_side != "as-is" else checkpoint
    if not unpatched.is_dir():
        raise ContractNotApplicable("there is no checkpoint of the stock side in this run")
    found = run_world(
        smoke_ranks.resume_sparse_file, WORLD_SIZE, tmp_path, (str(unpatched),), preload=PRELOADED, deadline=120.0
    )
    saved = dcp.FileSystemReader(unpatched / "optim").read_metadata().state_dict_metadata
    for rank in found:
        cold = sorted(name for name in rank["held"] if f"optim.state.{name}.step" not in saved)
        if contract_side == "as-is" and not cold:
            raise ContractNotApplicable("this tree saves no sparse checkpoint that could be resumed from")
        assert rank["cold"] == cold
        assert rank["after_load"] == []
        assert rank["after_training"] == []
        assert rank["finite"]
        # What was cold starts with its first gradient; everything else goes on from the saved step.
        trained = [name for name in rank["held"] if name not in INDEXER]
        assert {name: rank["steps"][name] for name in trained} == {
            name: smoke_ranks.STEPS_AFTER + (name not in cold) for name in trained
        }

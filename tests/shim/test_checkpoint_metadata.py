# SPDX-License-Identifier: Apache-2.0
"""The table of a checkpoint's metadata against what torch itself reads from the same file."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nemo_automodel_shim.components.checkpoint.checkpoint_metadata import CheckpointMetadata


def _table(metadata: Any) -> CheckpointMetadata:
    return CheckpointMetadata(io.BytesIO(pickle.dumps(metadata)))


def _assert_alike(table: CheckpointMetadata, theirs: Metadata) -> None:
    assert list(table) == list(theirs.state_dict_metadata)
    ours = table.subset(table)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for index, piece in ours.storage_data.items():
        info = theirs.storage_data[index]
        assert piece[:3] == (info.relative_path, info.offset, info.length)
        assert (piece.transform_descriptors or ()) == tuple(info.transform_descriptors or ())


def test_a_file_that_dcp_wrote(tmp_path: Path) -> None:
    state = {
        "optim": {
            "state.a.exp_avg": torch.ones(3, 2),
            "state.a.step": torch.tensor(1.0),
            "state.b.codes": torch.ones(4, dtype=torch.int8),
            "param_groups.a.betas": (0.9, 0.95),
            "param_groups.a.nested": {"x": 1, "y": torch.zeros(())},
        },
        "sched": {"last_epoch": 3, "base_lrs": [0.1]},
    }
    dcp.save(state, checkpoint_id=tmp_path)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    with (tmp_path / ".metadata").open("rb") as file:
        table = CheckpointMetadata(file)
    _assert_alike(table, theirs)
    # The paths that a key does not tell by itself, and no others.
    assert table.paths == {
        key: path for key, path in theirs.planner_data.items() if path[0] == "sched" or path[-1] in ("x", "y")
    }
    assert len(table.paths) == 4
    assert table.stored("optim.param_groups.a.betas") is None


def test_a_tensor_in_chunks_over_several_files() -> None:
    half = TensorProperties(dtype=torch.bfloat16)
    chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([2, 3])) for at in (0, 2, 4)]
    # In another order than the keys, with a value between the chunks.
    places = [("w", 2, "b"), ("other", None, "a"), ("w", 0, "a"), ("w", 4, "c")]
    theirs = Metadata(
        {
            "w": TensorStorageMetadata(half, torch.Size([6, 3]), chunks),
            "other": BytesStorageMetadata(),
            "v": TensorStorageMetadata(half, torch.Size([6, 3]), chunks),
            "nowhere": BytesStorageMetadata(),
        },
        storage_data={
            MetadataIndex(key, None if at is None else (at, 0), index=number): _StorageInfo(
                f"{file}.distcp", 10**10 + number, number, ["zstd"] if file == "c" else None
            )
            for number, (key, at, file) in enumerate(places)
        },
    )
    table = _table(theirs)
    _assert_alike(table, theirs)
    assert [piece.relative_path for piece in table.pieces("w")] == ["b.distcp", "a.distcp", "c.distcp"]
    assert [piece.transform_descriptors for piece in table.pieces("w")] == [None, None, ("zstd",)]
    assert table.pieces("nowhere") == []
    assert list(table.subset(["other"]).storage_data) == [MetadataIndex("other")]
    # Equal descriptions are one object: that is what the table saves memory by.
    assert table.stored("w") is table.stored("v")


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="it holds dict"):
        _table({"state_dict_metadata": {}})
    info = _StorageInfo("a.distcp", 0, 1)
    with pytest.raises(ValueError, match="2 entries have 2 keys and 1 pieces"):
        _table(Metadata({}, storage_data={MetadataIndex("a"): info, MetadataIndex("b"): info}))

# SPDX-License-Identifier: Apache-2.0
"""The ``.metadata`` of a DCP checkpoint as a table.

A flattened optimizer of 10,000 parameters has 140,000 keys, and ``pickle.load`` makes about ten objects of each. Here
what would be an instance of a key's place, its length in the file or its description is a row or a shared value, and
``Metadata`` is built of the keys that are about to be read.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class Piece(NamedTuple):
    """Where the bytes of one tensor chunk, or of another value, lie."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None


class CheckpointMetadata:
    """The keys of a DCP checkpoint, what they hold, and where.

    ``paths`` has where a key stood in the state dict before DCP flattened it, if that is not what the key itself says.

    Args:
        file: The ``.metadata`` that ``torch.distributed.checkpoint.FileSystemWriter`` wrote, open to read bytes.

    Raises:
        TypeError: If the file holds something else.
        ValueError: If it contradicts itself.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._table = table = _Table()
        loaded = _Unpickler(file, _stand_ins(table)).load()
        if not isinstance(loaded, Metadata):
            raise TypeError(f"it holds {type(loaded).__name__}")
        places = loaded.storage_data or {}
        if not len(places) == len(table.keys) == len(table.offsets):
            raise ValueError(f"{len(places)} entries have {len(table.keys)} keys and {len(table.offsets)} pieces")
        self._held: dict[str, TensorStorageMetadata | None] = {
            key: getattr(held, "real", None) for key, held in loaded.state_dict_metadata.items()
        }
        self.paths: dict[str, tuple[Any, ...]] = {
            key: path
            for key, path in (loaded.planner_data or {}).items()
            if isinstance(path, tuple) and (len(path) != 2 or path[0] != "optim" or key != f"optim.{path[1]}")
        }
        self._rows: dict[str, int | list[int]] = {}
        for row, key in enumerate(table.keys):
            before = self._rows.setdefault(key, row)
            if before != row:
                self._rows[key] = [*before, row] if isinstance(before, list) else [before, row]
        table.keys.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def stored(self, key: str) -> TensorStorageMetadata | None:
        """Return size, dtype and chunks of a tensor, or ``None`` where ``key`` is another value.

        Raises:
            KeyError: If there is no such key.
        """
        return self._held[key]

    def pieces(self, key: str) -> list[Piece]:
        """Return the pieces of ``key``: one of another value, one a chunk of a tensor, none if the file lists none."""
        return [self._table.piece(row) for row in self._rows_of(key)]

    def subset(self, keys: Iterable[str]) -> Metadata:
        """Return the part that a ``FileSystemReader`` and a load planner need for ``keys``."""
        keys = list(keys)
        return Metadata(
            {key: self._held[key] or BytesStorageMetadata() for key in keys},
            storage_data={
                MetadataIndex(key, self._table.chunks[row]): self._table.piece(row)
                for key in keys
                for row in self._rows_of(key)
            },
        )

    def _rows_of(self, key: str) -> list[int]:
        rows = self._rows.get(key, [])
        return rows if isinstance(rows, list) else [rows]


class _Table:
    """One row a piece, in the order of the file."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.chunks: list[torch.Size | None] = []  # where the chunk begins within its tensor
        self.offsets, self.lengths, self._files = array("q"), array("q"), array("I")
        self._transforms: dict[int, tuple[str, ...]] = {}
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def add_key(self, state: dict[str, Any]) -> None:
        self.keys.append(state["fqn"])
        self.chunks.append(state.get("offset"))

    def add_piece(self, state: dict[str, Any]) -> None:
        if state.get("transform_descriptors"):
            self._transforms[len(self.offsets)] = tuple(state["transform_descriptors"])
        name = state["relative_path"]
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        self._files.append(self._numbers[name])
        self.offsets.append(state["offset"])
        self.lengths.append(state["length"])

    def piece(self, row: int) -> Piece:
        name = self._names[self._files[row]]
        return Piece(name, self.offsets[row], self.lengths[row], self._transforms.get(row))


class _Unpickler(pickle.Unpickler):
    # The trust that torch.distributed.checkpoint itself places in a checkpoint: any class but these is the real one.
    def __init__(self, file: BinaryIO, stand_ins: dict[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        return self._stand_ins.get((module, name)) or super().find_class(module, name)


def _stand_ins(table: _Table) -> dict[tuple[str, str], Any]:
    """What to make in place of the small objects; by module and name.

    A pickle keeps until its end what it has made, with the dict that an object's state came in: hence ``clear``.
    """
    sizes: dict[tuple[int, ...], torch.Size] = {}
    properties: dict[Any, TensorProperties] = {}
    tensors: dict[Any, TensorStorageMetadata] = {}

    class Key:
        __slots__ = ()

        def __setstate__(self, state: dict[str, Any]) -> None:
            table.add_key(state)
            state.clear()

    class Info:
        __slots__ = ()

        def __new__(cls) -> Info:
            return info

        def __setstate__(self, state: dict[str, Any]) -> None:
            table.add_piece(state)
            state.clear()

    class Bytes:
        __slots__ = ()

        def __new__(cls) -> Bytes:
            return other

    class Properties:
        __slots__ = ("real",)

        def __setstate__(self, state: Any) -> None:
            self.real = properties.get(state)
            if self.real is None:
                self.real = properties[state] = TensorProperties()
                self.real.__setstate__(state)

    class Chunk:
        __slots__ = ("place",)

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.place = (state["offsets"], state["sizes"])
            state.clear()

    class Tensor:
        __slots__ = ("real",)

        def __setstate__(self, state: dict[str, Any]) -> None:
            places = tuple(chunk.place for chunk in state["chunks"])
            held = state["properties"].real
            what = (id(held), state["size"], places)
            self.real = tensors.get(what)
            if self.real is None:
                chunks = [ChunkStorageMetadata(*place) for place in places]
                self.real = tensors[what] = TensorStorageMetadata(held, state["size"], chunks)
            state.clear()

    def size(dims: Iterable[int] = ()) -> torch.Size:
        dims = tuple(dims)
        if dims not in sizes:
            sizes[dims] = torch.Size(dims)
        return sizes[dims]

    info, other = object.__new__(Info), object.__new__(Bytes)
    return {
        (_METADATA, "MetadataIndex"): Key,
        (_FILESYSTEM, "_StorageInfo"): Info,
        (_METADATA, "BytesStorageMetadata"): Bytes,
        (_METADATA, "TensorProperties"): Properties,
        (_METADATA, "ChunkStorageMetadata"): Chunk,
        (_METADATA, "TensorStorageMetadata"): Tensor,
        ("torch", "Size"): size,
    }

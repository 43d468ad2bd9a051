# SPDX-License-Identifier: Apache-2.0
"""Read optimizer state from a DCP checkpoint, by one rank alone and by name.

The layout on disk is the one of ``StateDictOptions(flatten_optimizer_state_dict=True)``:
``optim.state.<name>.<entry>``, ``optim.param_groups.<name>.<option>`` and ``sched.<entry>``. Beside them a file that
was saved sparse has ``optim.never_updated.<name>`` for each parameter that was saved without state, which other readers
do not ask for.

Where the optimizer's own state dict was saved there are integer ids in place of names: ``optim.state.<id>.<entry>``,
``optim.param_groups.<group>.<option>`` and ``optim.never_updated.<id>``, or the same further down, a pipeline part.
"""

from __future__ import annotations

import gc
import io
import itertools
import os
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any, BinaryIO

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from nemo_automodel_shim.components.checkpoint.checkpoint_metadata import CheckpointMetadata, Piece
from nemo_automodel_shim.components.checkpoint.rank_agreement import bytes_of_rank_0, describe_error, world_size

STATE = "optim.state."
GROUPS = "optim.param_groups."
NEVER_UPDATED = "optim.never_updated."
# Wrappers that torch leaves out of a fully qualified name; a file written with them names the same parameters.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_SMALL = 1 << 16  # bytes: tensors up to this size are rebuilt here, larger ones are streamed by torch
_REMEMBERED = 256
_BATCH = 2000  # keys: DCP makes several objects of each key that it reads


class OptimizerStateError(RuntimeError):
    """The optimizer state does not fit; nothing was changed on any rank, and nothing written.

    The text is the same on every rank. It names the checkpoint, the parameters and what to do next.
    """


def plain_name(name: str) -> str:
    """Return a fully qualified name without the parts that compile and activation-checkpoint wrappers add."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@contextmanager
def without_collections() -> Iterator[None]:
    """Hold Python's cyclic collector off: it costs most of the time in which a large metadata file is unpickled."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class OptimizerCheckpoint:
    """A DCP checkpoint of optimizer state.

    ``options`` has for each listed parameter the keys of its group's options, by the option's name and the place within
    an option that is itself a container; ``entries`` the keys of its state; ``never_updated`` the parameters that the
    file says were saved without state, or ``None`` where it does not say.

    Args:
        path: Directory of the checkpoint.
        metadata: Its ``.metadata`` file, open to read bytes (see ``open_metadata``). It is closed.
        live_names: Names of the live parameters; they tell where in a key a name ends.

    Raises:
        OptimizerStateError: If this is no optimizer checkpoint, or it contradicts itself.
    """

    def __init__(self, path: str, metadata: BinaryIO, live_names: set[str]) -> None:
        self.path = path
        try:
            with metadata:
                self.metadata = CheckpointMetadata(metadata)
        except Exception as exc:
            raise OptimizerStateError(_unreadable(path, describe_error(exc))) from exc
        self._reader = _Reader(path)
        self._values: dict[bytes, Any] = {}
        self.options: dict[str, dict[tuple[Any, ...], str]] = defaultdict(dict)
        self.entries: dict[str, dict[str, str]] = defaultdict(dict)
        never_updated, state_keys = set(), []
        places: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # equal ones are one object
        for key in self.metadata:
            if key.startswith(GROUPS):
                path_of_key = self.metadata.paths.get(key, ())
                flat, *inner = path_of_key[1:] if len(path_of_key) > 1 else (key.removeprefix("optim."),)
                name, option = _split_option(plain_name(flat.removeprefix("param_groups.")), live_names)
                place = (option, *inner)
                self.options[name][places.setdefault(place, place)] = key
            elif key.startswith(STATE):
                state_keys.append(key)
            elif key.startswith(NEVER_UPDATED):
                never_updated.add(plain_name(key[len(NEVER_UPDATED) :]))
        self.never_updated = never_updated or None
        self.by_position = False
        if any(_is_option_by_position(path_of_key) for path_of_key in self.metadata.paths.values()):
            self.by_position = True  # see name_positions
            return
        if not self.options:
            raise OptimizerStateError(
                f"{path} holds no parameter groups ({GROUPS}*): it is no optimizer checkpoint of this layout."
            )
        for key in state_keys:
            name, entry = self._split(plain_name(key[len(STATE) :]))
            self.entries[name][sys.intern(entry)] = key

    def name_positions(self, parts: dict[tuple[str, ...], list[list[str]]]) -> None:
        """Take integer ids for the names of the live parameters in the same places.

        Args:
            parts: Names of the live parameters by group, of each optimizer; its key is where its state dict lies below
                ``optim``, the empty tuple for ``optim`` itself.

        Raises:
            OptimizerStateError: If the file has other parts, or its groups are not of the same lengths.
        """
        self.options, self.entries = defaultdict(dict), defaultdict(dict)
        never_updated = set()
        for part, groups in parts.items():
            options: dict[int, dict[tuple[Any, ...], str]] = defaultdict(dict)
            entries: dict[str, dict[str, str]] = defaultdict(dict)
            marks = []
            for key, (place, *path) in self.metadata.paths.items():
                if place != "optim" or tuple(path[: len(part)]) != part:
                    continue
                kind, number, *rest = path[len(part) :]
                if kind == "param_groups":
                    options[number][tuple(rest)] = key
                elif kind == "state":
                    entries[str(number)][".".join(map(str, rest))] = key
                elif kind == "never_updated":
                    marks.append(str(number))
            names = self._names_by_id(
                part, groups, [options[number].pop(("params",), None) for number in sorted(options)]
            )
            for number, (name, index) in names.items():
                self.options[name] = options[index]
                if number in entries:
                    self.entries[name] = entries[number]
            never_updated |= {names[number][0] for number in marks if number in names}
        self.never_updated = never_updated or None

    def _names_by_id(
        self, part: tuple[str, ...], groups: list[list[str]], keys: list[str | None]
    ) -> dict[str, tuple[str, int]]:
        values, _ = self.read_values(key for key in keys if key is not None)
        saved = [values.get(key, []) for key in keys]
        if [len(group) for group in saved] != [len(group) for group in groups]:
            raise OptimizerStateError(
                f"{self.path} has integer ids in place of names, for groups of {[len(group) for group in saved]} "
                f"parameters{''.join(f' in {name}' for name in part[-1:])}; the live groups have "
                f"{[len(group) for group in groups]}. Which of them are new cannot be told: build the optimizer over "
                "the parameters, and the pipeline parts, that it was saved with."
            )
        return {
            str(number): (name, index)
            for index, (group, its_ids) in enumerate(zip(groups, saved, strict=True))
            for name, number in zip(group, its_ids, strict=True)
        }

    def stored(self, key: str) -> TensorStorageMetadata | None:
        """Return size and dtype of a tensor, or ``None`` where ``key`` is another value."""
        return self.metadata.stored(key)

    def read_values(self, keys: Iterable[str]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return values by key, and the bytes of those that are no tensors.

        Equal bytes give one object: a group's options stand in the file once a parameter.
        """
        values: dict[str, Any] = {}
        raw: dict[str, bytes] = {}
        by_file: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for batch in _batches(dict.fromkeys(keys)):
            by_file.clear()
            template: dict[str, Any] = {}
            for key in batch:
                stored = self.stored(key)
                piece = self._piece(key) if stored is None else None
                if piece is not None and not piece.transform_descriptors:
                    by_file[piece.relative_path].append((key, piece))
                else:
                    template[key] = None if stored is None else torch.empty(stored.size, dtype=stored.properties.dtype)
            self._read_batch(template)
            values |= template
            for name, located in by_file.items():
                self._read_raw(name, located, values, raw)
        return values, raw

    def read(self, template: dict[str, Any]) -> None:
        """Fill ``template`` in place: tensors by copy, other values by assignment. Local to this rank."""
        for batch in _batches(template):
            part = {key: template[key] for key in batch}
            self._read_batch(part)
            template |= part

    def _read_batch(self, template: dict[str, Any]) -> None:
        if not template:
            return
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            metadata = self.metadata.subset(template)
            planner.set_up_planner(template, metadata, False)
            self._reader.set_up_storage_reader(metadata, False)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            plan = planner.finish_plan(self._reader.prepare_global_plan([plan])[0])
            self._reader.read_data(plan, planner).wait()
        except Exception as exc:
            raise OptimizerStateError(self._cannot_be_read(template, exc)) from exc

    def _piece(self, key: str) -> Piece:
        pieces = self.metadata.pieces(key)
        if len(pieces) != 1:
            raise OptimizerStateError(f"{self.path}: .metadata does not say where {key} lies; it is damaged.")
        return pieces[0]

    def _read_raw(
        self, name: str, located: list[tuple[str, Piece]], values: dict[str, Any], raw: dict[str, bytes]
    ) -> None:
        try:
            # Seek and read: the pages of a mapped file would count as this process's memory.
            with self._reader.open(name) as file:
                for key, piece in located:
                    file.seek(piece.offset)
                    data = file.read(piece.length)
                    if len(data) != piece.length:
                        raise EOFError(f"{name} ends before {key}")
                    if data not in self._values:
                        self._values[data] = (data, torch.load(io.BytesIO(data), weights_only=False))
                    raw[key], values[key] = self._values[data]
        except Exception as exc:
            raise OptimizerStateError(self._cannot_be_read((key for key, _ in located), exc)) from exc

    def _cannot_be_read(self, keys: Iterable[str], exc: Exception) -> str:
        return f"{self._blame(set(keys))} cannot be read ({describe_error(exc)}); is the checkpoint complete?"

    def _blame(self, keys: set[str]) -> str:
        # torch's message rarely says which file: name those of the keys that were asked for that are gone or short.
        ends: dict[str, int] = {}
        for piece in (piece for key in keys for piece in self.metadata.pieces(key)):
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
        files = []
        for name, end in sorted(ends.items()):
            file = os.path.join(self.path, name)
            size = os.path.getsize(file) if os.path.exists(file) else None
            if size is None or size < end:
                files.append(f"{file} ({'absent' if size is None else f'{size} bytes, {end} needed'})")
        return ", ".join(files) or self.path

    def _split(self, rest: str) -> tuple[str, str]:
        # Entries may be nested and names may be prefixes of one another: the longest listed name owns the key.
        name = rest
        while name not in self.options:
            name, dot, _ = name.rpartition(".")
            if not dot:
                raise OptimizerStateError(
                    f"{self.path} holds state ({STATE}{rest}) of a parameter that its groups do not list; "
                    "the file is damaged."
                )
        return name, rest[len(name) + 1 :]


def open_metadata(path: str) -> tuple[BinaryIO, str | None]:
    """Return the ``.metadata`` of a checkpoint, read by rank 0 and sent to all, or why it cannot be read.

    Args:
        path: Directory of the checkpoint.
    """
    place = os.path.join(path, ".metadata")
    if world_size() == 1:
        try:
            return open(place, "rb"), None
        except OSError as exc:
            return io.BytesIO(), _unreadable(path, describe_error(exc))

    def read() -> bytes:
        with open(place, "rb") as file:
            return file.read()

    data, error = bytes_of_rank_0(read)
    return io.BytesIO(data), None if error is None else _unreadable(path, error)


class _Reader(FileSystemReader):
    """Rebuilds small tensors without unpickling each: most differ from an earlier one in their numbers alone."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._layouts: dict[tuple[bytes, ...], torch.Tensor] = {}
        self._tensors: dict[bytes, torch.Tensor] = {}

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file of the checkpoint as ``FileSystemReader`` does."""
        return self.fs.create_stream(self.fs.concat_path(self.path, name), "rb")

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        small: dict[str, list[tuple[int, int, ReadItem]]] = defaultdict(list)
        rest = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if (
                item.type == LoadItemType.TENSOR
                and info.length <= _SMALL
                and not getattr(info, "transform_descriptors", None)
            ):
                small[info.relative_path].append((info.offset, info.length, item))
            else:
                rest.append(item)
        for name, items in small.items():
            with self.open(name) as file:
                for offset, length, item in sorted(items, key=lambda each: each[0]):
                    file.seek(offset)
                    tensor = self._tensor(file.read(length))
                    for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        tensor = tensor.narrow(dim, start, size)
                    target = planner.resolve_tensor(item).detach()
                    if target.size() != tensor.size():
                        raise ValueError(f"{item.storage_index.fqn}: {list(tensor.size())} for {list(target.size())}")
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
        if rest:
            return super().read_data(LoadPlan(rest), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tensor(self, raw: bytes) -> torch.Tensor:
        tensor = self._tensors.get(raw)  # steps are equal bytes
        if tensor is None:
            tensor = self._rebuild(raw)
            if len(self._tensors) == _REMEMBERED:
                self._tensors.clear()
            self._tensors[raw] = tensor
        return tensor

    def _rebuild(self, raw: bytes) -> torch.Tensor:
        try:
            archive = zipfile.ZipFile(io.BytesIO(raw))
        except zipfile.BadZipFile:
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        with archive:
            names = archive.namelist()
            root = names[0].partition("/")[0]
            data = [name for name in names if name.startswith(f"{root}/data/")]
            # Everything but the numbers: dtype, shape, strides, byte order.
            layout = tuple(
                archive.read(f"{root}/{part}") for part in ("data.pkl", "byteorder") if f"{root}/{part}" in names
            )
            like = self._layouts.get(layout)
            numbers = archive.read(data[0]) if len(data) == 1 else b""  # zipfile compares the checksum
        if like is not None and numbers:
            return torch.frombuffer(bytearray(numbers), dtype=like.dtype).as_strided(like.size(), like.stride())
        tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        if (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.storage_offset() == 0
            and len(layout) == 2
            and layout[1].decode() == sys.byteorder
            and numbers
            and len(numbers) == tensor.untyped_storage().nbytes()
        ):
            self._layouts[layout] = tensor
        return tensor


def _is_option_by_position(path: tuple[Any, ...]) -> bool:
    # Where names stand in the file, a group's options are not nested: ``("optim", "param_groups.<name>.<option>")``.
    at = path.index("param_groups") + 1 if path[:1] == ("optim",) and "param_groups" in path else len(path)
    return at < len(path) and isinstance(path[at], int)


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    waiting = iter(keys)
    while batch := list(itertools.islice(waiting, _BATCH)):
        yield batch


def _unreadable(path: str, error: str) -> str:
    return f"{os.path.join(path, '.metadata')} cannot be read ({error}); is the checkpoint complete?"


def _split_option(rest: str, live_names: set[str]) -> tuple[str, str]:
    # An option's name may hold dots: a live parameter's name decides where it begins.
    name, _, option = rest.rpartition(".")
    longest = name
    while longest and longest not in live_names:
        longest = longest.rpartition(".")[0]
    return (longest, rest[len(longest) + 1 :]) if longest else (name, option)

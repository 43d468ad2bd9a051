# SPDX-License-Identifier: Apache-2.0
"""Small exchanges between the ranks of the default process group, so that all of them reach one verdict.

Only text, numbers and bytes travel, never an exception: one that cannot be pickled would leave the others waiting.
Without a process group there is one rank, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def world_size() -> int:
    """Return the number of ranks of the default process group, 1 without one."""
    return _world()[0]


def describe_error(exc: BaseException) -> str:
    """Return type and message of an exception on one line, also where the message cannot be had."""
    try:
        return " ".join(f"{type(exc).__name__}: {exc}".split())
    except Exception:
        return type(exc).__name__


def format_ranks(ranks: list[int]) -> str:
    """Return ascending rank numbers as text: ``[0, 1, 2, 5]`` is ``"0-2, 5"``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def bytes_of_rank_0(produce: Callable[[], bytes]) -> tuple[bytes, str | None]:
    """Return what ``produce`` gives on rank 0, to every rank; two broadcasts.

    Args:
        produce: Called on rank 0 alone.

    Returns:
        The bytes and ``None``, or no bytes and the error of rank 0 as text. Alike on every rank.
    """
    world, rank = _world()
    data, error = b"", None
    if rank == 0:
        try:
            data = produce()
        except Exception as exc:
            error = describe_error(exc)
    if world == 1:
        return data, error
    sent = data if error is None else error.encode()
    head = torch.tensor([error is not None, len(sent)], dtype=torch.int64, device=_device())
    dist.broadcast(head, src=0)
    failed, length = head.tolist()
    body = torch.empty(length, dtype=torch.uint8, device=head.device)
    if rank == 0 and length:
        body.copy_(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
    if length:
        dist.broadcast(body, src=0)
    received = sent if rank == 0 else body.cpu().numpy().tobytes()
    return (b"", received.decode()) if failed else (received, None)


def gather_texts(text: str | None, *flags: bool) -> tuple[list[str | None], list[list[bool]]]:
    """Return every rank's text and flags, by rank.

    One all-gather of a few numbers where no rank has a text; one more where some rank has.

    Args:
        text: What this rank has to say, or ``None``.
        flags: As many on every rank.
    """
    world, _ = _world()
    if world == 1:
        return [text], [list(flags)]
    data = b"" if text is None else text.encode()
    mine = torch.tensor([text is not None, len(data), *flags], dtype=torch.int64, device=_device())
    heads = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(heads, mine)
    rows = [head.tolist() for head in heads]
    said = [[bool(flag) for flag in row[2:]] for row in rows]
    if not any(row[0] for row in rows):
        return [None] * world, said
    longest = max(row[1] for row in rows)
    padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8).to(mine.device)
    texts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(texts, padded)
    return [
        found.cpu().numpy().tobytes()[: row[1]].decode() if row[0] else None
        for found, row in zip(texts, rows, strict=True)
    ], said


def any_rank(flags: list[bool]) -> list[bool]:
    """Return for each flag whether any rank has set it; one all-reduce. As many flags on every rank."""
    world, _ = _world()
    if world == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.uint8, device=_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def same_on_all_ranks(digest: bytes) -> bool:
    """Return whether all ranks pass the same bytes; one all-gather. As many bytes on every rank."""
    world, _ = _world()
    if world == 1:
        return True
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(_device())
    found = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(found, mine)
    return all(torch.equal(each, found[0]) for each in found)


def _world() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 1, 0
    return dist.get_world_size(), dist.get_rank()


def _device() -> torch.device:
    """The CPU where the process group has a backend for it, else this rank's accelerator."""
    devices = [entry.partition(":")[0] for entry in str(dist.get_backend_config()).split(",")]
    return (
        torch.device("cpu") if "cpu" in devices else torch.device(devices[0], torch.accelerator.current_device_index())
    )

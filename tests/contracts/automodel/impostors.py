# SPDX-License-Identifier: Apache-2.0
"""Gathers that are almost right, as test doubles: each must be caught by a contract.

``$GATHER_IMPOSTOR`` names the one that rank bodies put in place of the gather of the routing weights; the hidden
states keep the real one. ``python -m ci.impostors`` says which contract catches which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.contracts.outcomes import PreconditionError

VARIABLE = "GATHER_IMPOSTOR"


def _rows(grad: torch.Tensor, counts: list[int], rank: int) -> torch.Tensor:
    return grad.narrow(0, sum(counts[:rank]), counts[rank]).contiguous()


def _summed(grad: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = grad.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def slices(grad: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Cut out this rank's rows without summing what the other ranks contributed."""
    return _rows(grad, counts, dist.get_rank(group))


def averages(grad: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Average over the ranks instead of summing."""
    return _rows(_summed(grad, group), counts, dist.get_rank(group)) / len(counts)


def detaches(grad: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> None:
    """Hand no gradient on."""
    return None


def zeroes(grad: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """A gradient that exists, and says nothing."""
    return torch.zeros_like(_rows(grad, counts, dist.get_rank(group)))


def sums_twice(grad: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum what has been summed."""
    return _rows(_summed(_summed(grad, group), group), counts, dist.get_rank(group))


def sums_over_the_world(grad: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over all ranks instead of the EP group; right where they are the same."""
    longest = torch.tensor([grad.size(0)], device=grad.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = grad.new_zeros(int(longest), *grad.shape[1:])
    padded[: grad.size(0)] = grad
    return _rows(_summed(padded, None), counts, dist.get_rank(group))


def sums_in_place(grad: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum into the tensor that was handed in, whoever else holds it."""
    grad = grad.contiguous()
    dist.all_reduce(grad, group=group)
    return _rows(grad, counts, dist.get_rank(group))


def rows_of_even_ranks(grad: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum, then cut as if every rank had as many tokens as this one."""
    rank, total = dist.get_rank(group), _summed(grad, group)
    start = min(rank * counts[rank], total.size(0) - counts[rank])
    return total.narrow(0, start, counts[rank]).contiguous()


IMPOSTORS: dict[str, Callable[..., torch.Tensor | None]] = {
    "slices": slices,
    "averages": averages,
    "detaches": detaches,
    "zeroes": zeroes,
    "sums-twice": sums_twice,
    "sums-over-the-world": sums_over_the_world,
    "sums-in-place": sums_in_place,
    "rows-of-even-ranks": rows_of_even_ranks,
}


@contextmanager
def from_environment() -> Iterator[None]:
    """Have the impostor of ``$GATHER_IMPOSTOR`` in the release's gather while the block runs; none if it is unset.

    Raises:
        PreconditionError: The tree has no gather with a backward that an impostor could stand in for.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        yield
        return
    from nemo_automodel.components.moe import experts

    gather = getattr(experts, "_AllGatherConcatVarlenFn", None)
    if gather is None:
        raise PreconditionError("the release's gather has another name: tests/contracts/automodel/impostors.py")
    forward, backward = gather.forward, gather.backward
    wrong = IMPOSTORS[name]

    def kept(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, counts: list[int], longest: int) -> torch.Tensor:
        # Routing weights have as many columns as experts are chosen, hidden states have more.
        ctx.impostor = (counts, group) if rows.size(1) <= 2 else None
        return forward(ctx, rows, group, counts, longest)

    def swapped(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        if ctx.impostor is None:
            return backward(ctx, grad)
        return wrong(grad, *ctx.impostor), None, None, None

    gather.forward, gather.backward = staticmethod(kept), staticmethod(swapped)
    try:
        yield
    finally:
        gather.forward, gather.backward = staticmethod(forward), staticmethod(backward)

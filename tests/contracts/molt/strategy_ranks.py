# SPDX-License-Identifier: Apache-2.0
"""Rank bodies: molt's strategy sets itself up on real ranks, where its process group is gloo's."""

from __future__ import annotations

import contextlib
import io
import os
from types import SimpleNamespace

from molt.trainer.fsdp import FsdpStrategy

from tests.support.world import RankContext


def set_up(context: RankContext, dispatcher: str, mode: str) -> tuple[str | None, str]:
    """Set up expert parallelism over all ranks.

    Args:
        context: The rank.
        dispatcher: Value of ``MOLT_MOE_DISPATCHER``.
        mode: Value of ``--model.gradient_checkpoint``.

    Returns:
        The refusal, if any, and what was printed.
    """
    os.environ.pop("LOCAL_RANK", None)  # there is no device to choose
    os.environ["MOLT_MOE_DISPATCHER"] = dispatcher
    size = context.world_size
    args = SimpleNamespace(
        local_rank=-1,
        fsdp=SimpleNamespace(ep_size=size),
        model=SimpleNamespace(gradient_checkpoint=mode),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )
    strategy = FsdpStrategy(args=args, micro_train_batch_size=1, train_batch_size=size)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            strategy.setup_distributed()
    except ValueError as exc:
        return str(exc), printed.getvalue()
    return None, printed.getvalue()

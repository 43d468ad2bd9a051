# SPDX-License-Identifier: Apache-2.0
"""Settings of activation checkpointing: how they are spelt, and which combination fails. Needs no torch."""

from collections.abc import Iterable
from typing import Literal

_SPELLINGS: dict[str, bool | str] = {
    **dict.fromkeys(("full", "true", "on", "enabled", "yes"), True),
    "selective": "selective",
    **dict.fromkeys(("none", "false", "off", "disabled", "no"), False),
}

HYBRIDEP_RECOMPUTE_ISSUE = "https://github.com/NVIDIA-NeMo/Automodel/issues/3325"


def normalize_activation_checkpointing(value: bool | str | None) -> bool | Literal["selective"]:
    """Return what a configured value of ``activation_checkpointing`` means.

    Args:
        value: A bool, ``None`` (off), or a spelling of ``"full"``, ``"selective"`` or ``"none"``; case, blanks around
            it, and ``-`` against ``_`` make no difference.

    Returns:
        ``True`` for full, ``"selective"``, or ``False``.

    Raises:
        ValueError: The value is none of these. Any other non-empty string would count as full.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    key = value.strip().lower().replace("-", "_") if isinstance(value, str) else None
    if key not in _SPELLINGS:
        raise ValueError(
            f"activation_checkpointing={value!r} is not a mode. Use a bool or one of: {', '.join(_SPELLINGS)}."
        )
    return _SPELLINGS[key]


def refuse_hybridep_recompute(experts: Iterable[object], mode: str, replayable: bool = False) -> None:
    """Raise if recomputing the blocks of these experts would dispatch tokens through HybridEP a second time.

    Args:
        experts: The experts of each block that is to be checkpointed whole; None for a block without any.
        mode: The checkpointing mode, for the message.
        replayable: Whether the layout would be replayed if the router were saved, which is a third way out.

    Raises:
        ValueError: Some of them are parallel and dispatch through HybridEP.
    """
    for module in experts:
        ep_size = getattr(module, "ep_size", 1)
        if getattr(module, "dispatcher_backend", None) == "hybridep" and ep_size > 1:
            save_router = "Save the router (ignore_router_for_ac: true), so that the layout is replayed; or turn "
            raise ValueError(
                f"Activation checkpointing ({mode}) does not work with expert parallelism on the HybridEP dispatcher "
                f"here (ep_size={ep_size}, dispatcher='hybridep' in the model's backend config): backward dispatches "
                "the tokens of a checkpointed block again, HybridEP may lay them out in another number of rows "
                "although the routing is the same, and the first backward pass stops with "
                f"torch.utils.checkpoint.CheckpointError. {save_router if replayable else 'Either turn '}"
                "checkpointing off (distributed.activation_checkpointing: false), or choose another dispatcher "
                f"(model.backend.dispatcher: torch). See {HYBRIDEP_RECOMPUTE_ISSUE}."
            )

# SPDX-License-Identifier: Apache-2.0
"""The peers: ways in which projects save and load optimizer state in which some parameters have none.

Each is a few lines over the same calls of a release's ``Checkpointer``, after its public origin, which is linked. Those
that are no release of their own run on 0.5.0.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

# (checkpointer, optimizer, model, directory, schedulers or None, options of the release's own call)
Action = Callable[..., None]


def save_by_release(owner: Any, optimizer: Any, model: Any, path: str, schedulers: Any, **options: Any) -> None:
    """What the release does.

    Origin: https://github.com/NVIDIA-NeMo/Automodel/blob/v0.5.0/nemo_automodel/components/checkpoint/checkpointing.py
    """
    owner.save_optimizer(optimizer, model, path, schedulers)


def load_by_release(owner: Any, optimizer: Any, model: Any, path: str, schedulers: Any, **options: Any) -> None:
    """What the release does; ``options`` are those that only some releases have.

    Origin: https://github.com/NVIDIA-NeMo/Automodel/blob/v0.5.0/nemo_automodel/components/checkpoint/checkpointing.py
    """
    owner.load_optimizer(optimizer, model, path, schedulers, **options)


def load_partially(owner: Any, optimizer: Any, model: Any, path: str, schedulers: Any, **options: Any) -> None:
    """Let DCP leave what the file lacks as the live optimizer has it.

    Origin: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    (``DefaultLoadPlanner``); the default of
    https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64ddf34856e74b24714e3bedb2f5a39553/megatron/training/checkpointing.py
    for files of its FSDP.
    """
    wrapper = _wrapper(model, optimizer, schedulers)
    state = wrapper.state_dict()
    dcp.load(state, checkpoint_id=f"{path}/optim", planner=DefaultLoadPlanner(allow_partial_load=True))
    wrapper.load_state_dict(state)


def save_with_zeros(owner: Any, optimizer: Any, model: Any, path: str, schedulers: Any, **options: Any) -> None:
    """Give parameters of Adam and AdamW that have no state zeros at step 0, and save those too.

    Origin: https://github.com/NVIDIA-NeMo/Automodel/blob/v0.7.0/nemo_automodel/components/checkpoint/stateful_wrappers.py
    (``_materialize_missing_adam_state``), which does it before a load too.
    """
    for group in optimizer.param_groups if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) else ():
        moments = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
        for param in group["params"]:
            if not optimizer.state.get(param):
                optimizer.state[param] = {"step": torch.zeros(())}
                optimizer.state[param] |= {name: torch.zeros_like(param, requires_grad=False) for name in moments}
    owner.save_optimizer(optimizer, model, path, schedulers)


def load_over_a_fresh_one(owner: Any, optimizer: Any, model: Any, path: str, schedulers: Any, **options: Any) -> None:
    """Fill what the file lacks from an optimizer that has just been initialised, as torch initialises one.

    Origin: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/state_dict.py
    (``_init_optim_state``; with ``full_state_dict``, ``_load_optim_state_dict`` fills in this way by itself).
    """
    fresh = copy.copy(optimizer)
    fresh.state = defaultdict(dict)
    state = _wrapper(model, fresh, schedulers).state_dict()
    saved = dcp.FileSystemReader(f"{path}/optim").read_metadata().state_dict_metadata
    found = state | {"optim": {key: value for key, value in state["optim"].items() if f"optim.{key}" in saved}}
    dcp.load(found, checkpoint_id=f"{path}/optim")
    state = found | {"optim": state["optim"] | found["optim"]}
    _wrapper(model, optimizer, schedulers).load_state_dict(state)


def load_with_empty_dicts(owner: Any, optimizer: Any, model: Any, path: str, schedulers: Any, **options: Any) -> None:
    """Give each parameter without state an empty dict, and let torch load a full state dict.

    Origin: the work-around of a report to https://github.com/Tencent-Hunyuan/UniRL ("Checkpoint resume rejects valid
    partially initialized AdamW state"), three lines over the pair of torch's calls that it uses.
    """
    saved = dcp.FileSystemReader(f"{path}/optim").read_metadata().state_dict_metadata
    flat = {
        key.removeprefix("optim."): torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in saved.items()
        if key.startswith("optim.")
    }
    read = {"optim": flat} | ({"sched": schedulers[0].state_dict()} if schedulers else {})
    dcp.load(read, checkpoint_id=f"{path}/optim")
    names = {id(param): name for name, param in model.named_parameters()}
    known = set(names.values())
    nested: dict[str, Any] = {"state": defaultdict(dict), "param_groups": []}
    options_of: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in read["optim"].items():
        kind, *parts = key.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if (name := ".".join(parts[:end])) in known:
                (nested["state"] if kind == "state" else options_of)[name][".".join(parts[end:])] = value
                break
    for group in optimizer.param_groups:
        members = [names[id(param)] for param in group["params"]]
        nested["param_groups"].append({"params": members, **(options_of[members[0]] if members else {})})
    nested["state"] = dict(nested["state"])
    for group in nested["param_groups"]:
        for name in group["params"]:
            nested["state"].setdefault(name, {})
    set_optimizer_state_dict(model, optimizer, nested, options=StateDictOptions(full_state_dict=True))
    for scheduler in schedulers or ():
        scheduler.load_state_dict(read["sched"])


def load_nothing(owner: Any, optimizer: Any, model: Any, path: str, schedulers: Any, **options: Any) -> None:
    """Go on without the optimizer's file. The release keeps the scheduler in it, so that is skipped too.

    Origin: ``load_optimizer_states=False`` in
    https://github.com/InternLM/xtuner/blob/b934f462095c1e750229de35367c50ae36caa786/xtuner/v1/train/trainer.py,
    ``exclude_from_loading`` in
    https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/docs/checkpoint.md
    """


def save_as_torch(owner: Any, optimizer: Any, model: Any, path: str, schedulers: Any, **options: Any) -> None:
    """No peer: a file as an unpatched tree writes it, sparse, by torch's own two calls."""
    options_ = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"optim": get_optimizer_state_dict(model, optimizer, options=options_)}
    state |= {"sched": schedulers[0].state_dict()} if schedulers else {}
    dcp.save(state, checkpoint_id=f"{path}/optim")


def _wrapper(model: Any, optimizer: Any, schedulers: Any) -> Any:
    from nemo_automodel.components.checkpoint.stateful_wrappers import OptimizerState

    return OptimizerState(model, optimizer, schedulers)


class Peer(NamedTuple):
    """One way: which release it runs on, and its two calls."""

    name: str
    side: str
    save: Action
    load: Action
    meaning: str

    def origins(self) -> list[str]:
        """The links of its calls, without those of the release that it runs on."""
        texts = [action.__doc__ or "" for action in (self.save, self.load)]
        found = [word.strip("(),.") for text in texts for word in text.split() if word.startswith("https://")]
        own = [link for link in dict.fromkeys(found) if "checkpointing.py" not in link or "Automodel" not in link]
        return own or [f"https://github.com/NVIDIA-NeMo/Automodel/tree/v{self.name.rpartition(' ')[2]}"]


OURS, STOCK = "ours", "stock 0.5.0"
PEERS = [
    Peer(STOCK, "stock", save_by_release, load_by_release, "the release"),
    Peer("stock 0.7.0", "newest", save_by_release, load_by_release, "the newest release"),
    Peer("partial load", "stock", save_by_release, load_partially, "`allow_partial_load=True`"),
    Peer("zeros", "stock", save_with_zeros, load_by_release, "zeros for what has no state, written at the save"),
    Peer("back-fill", "stock", save_by_release, load_over_a_fresh_one, "what is missing, from a fresh optimizer"),
    Peer("empty dicts", "stock", save_by_release, load_with_empty_dicts, "an empty dict for what is missing"),
    Peer("skip", "stock", save_by_release, load_nothing, "resume without the optimizer"),
    Peer(OURS, "ours", save_by_release, load_by_release, "the release with `nemo_automodel_shim`"),
]
SIDES = ("stock", "newest", "ours")
BY_NAME = {peer.name: peer for peer in PEERS}

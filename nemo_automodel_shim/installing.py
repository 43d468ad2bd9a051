# SPDX-License-Identifier: Apache-2.0
"""Put the fixes into an installed, unpatched release in the running process, and take them out again."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_automodel_shim.components.checkpoint import checkpointing
from nemo_automodel_shim.components.models.common.indexer_policy import HardTopKIndexer, report_trainable_indexers
from nemo_automodel_shim.components.models.deepseek_v4.hyper_connections import init_hyper_connections
from nemo_automodel_shim.components.moe import experts, parallelizer

_PACKAGE = "nemo_automodel"

# Git blob ids of the sources that the fixes were made for, by release; a test holds them against patches/series.toml.
KNOWN_RELEASES: dict[str, dict[str, str]] = {
    "automodel/v0.5.0": {
        "nemo_automodel/_transformers/infrastructure.py": "cae8e5a6ff11826602517f4a37d9bc6c02f11458",
        "nemo_automodel/components/checkpoint/checkpointing.py": "457312ad1e358d135b942fd6206b67a08fcf07e8",
        "nemo_automodel/components/checkpoint/config.py": "854cdae0619d666accc2ece6639b40e686a4890c",
        "nemo_automodel/components/checkpoint/stateful_wrappers.py": "36dd0259afd853c2e0f552e8f9bf768a686afd97",
        "nemo_automodel/components/distributed/config.py": "a8b64d4a5e93fa11d714bf64a462c2915abc4d5c",
        "nemo_automodel/components/models/deepseek_v32/config.py": "7750eff88e1d821e6eb1a76110a95c2565dde1d7",
        "nemo_automodel/components/models/deepseek_v32/layers.py": "19c0d7183ab05c3c33fb9060e9c0789634e6f672",
        "nemo_automodel/components/models/deepseek_v32/model.py": "ea52443f49f931e4592266b5279f1d986884cdf8",
        "nemo_automodel/components/models/deepseek_v4/config.py": "5f683a124b1c2af09641dc029597783ddbe30d27",
        "nemo_automodel/components/models/deepseek_v4/layers.py": "6e42c1415b277809ca949e7ac42e48037b0cf0d7",
        "nemo_automodel/components/models/deepseek_v4/model.py": "4ff9bd471104f7ab640eae58ffbc114500b1866a",
        "nemo_automodel/components/models/deepseek_v4/mtp.py": "266a5ed7d7ac1a5233bcb2bb73d40fb8a301fe40",
        "nemo_automodel/components/models/glm_moe_dsa/model.py": "c28e9043e7d1b343c490346320124a75d8f863f7",
        "nemo_automodel/components/moe/experts.py": "abb866e071f058cd014fbca25e57843d725c4d1e",
        "nemo_automodel/components/moe/parallelizer.py": "e4eb0c0057190fe0151ee84e4c2eda1b62f34af8",
        "nemo_automodel/components/utils/model_utils.py": "528624fdd048487aabe7faf68c6f1b955d729f0a",
        "nemo_automodel/recipes/_dist_utils.py": "ff6b6e788a9d40c6a87f4f74d2064dd8cc8af48c",
    },
}

_replaced: list[tuple[Any, str, Any]] = []


class UnknownReleaseError(RuntimeError):
    """The ``nemo_automodel`` that would be imported is none that the fixes were made for; nothing was installed."""


def install() -> str:
    """Put the fixes into the release that ``import nemo_automodel`` finds.

    Objects that were imported earlier are covered: classes are changed in place. So is ``parallelize_model``, but for
    the spellings of a checkpointing mode: those are read where it is looked up in its module. A second call does
    nothing.

    Returns:
        The release, one of ``KNOWN_RELEASES``.

    Raises:
        UnknownReleaseError: If the sources are those of no known release. Nothing is installed then.
    """
    release = _identify()
    if _replaced:
        return release
    changes = _changes()
    for owner, name, value in changes:
        previous = owner.__bases__ if name == "__bases__" else owner.__dict__.get(name, _ABSENT)
        _replaced.append((owner, name, previous))
        setattr(owner, name, value)
    return release


def uninstall() -> None:
    """Restore what ``install`` replaced. Models that were built meanwhile keep what their construction did."""
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


_ABSENT = object()


def _identify() -> str:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UnknownReleaseError(f"{_PACKAGE} is not installed here; known releases: {', '.join(KNOWN_RELEASES)}.")
    root = Path(next(iter(spec.submodule_search_locations))).parent
    different: dict[str, list[str]] = {}
    for release, blobs in KNOWN_RELEASES.items():
        different[release] = [path for path, blob in blobs.items() if _blob_id(root / path) != blob]
        if not different[release]:
            return release
    listing = "; ".join(f"{release}: {', '.join(paths)}" for release, paths in different.items())
    raise UnknownReleaseError(
        f"The sources below {root} are those of no known release (files that differ: {listing}). Nothing was "
        "installed; apply the patches of the nearest baseline instead."
    )


def _blob_id(path: Path) -> str | None:
    if not path.is_file():
        return None
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _changes() -> list[tuple[Any, str, Any]]:
    """Everything to replace, gathered before anything is: (owner, attribute, value)."""
    upstream_experts = _module("components.moe.experts")
    upstream_checkpointing = _module("components.checkpoint.checkpointing")
    layers = _module("components.models.deepseek_v4.layers")
    model = _module("components.models.deepseek_v4.model").DeepseekV4ForCausalLM
    v32 = _module("components.models.deepseek_v32.model")
    glm = _module("components.models.glm_moe_dsa.model")
    model_utils = _module("components.utils.model_utils")
    infrastructure = _module("_transformers.infrastructure", needed=False)
    checkpointer = upstream_checkpointing.Checkpointer

    changes: list[tuple[Any, str, Any]] = [
        (upstream_experts.GroupedExperts, "forward", experts.GroupedExperts.forward),
        (
            upstream_experts.GroupedExpertsDeepEP,
            "forward",
            experts.with_biases(upstream_experts.GroupedExpertsDeepEP.forward),
        ),
        (checkpointer, "save_optimizer", checkpointing.Checkpointer.save_optimizer),
        (checkpointer, "load_optimizer", checkpointing.Checkpointer.load_optimizer),
        (checkpointer, "_do_save", checkpointing.by_its_own_name(checkpointer._do_save)),
        (checkpointer, "_do_load", checkpointing.by_its_own_name(checkpointer._do_load)),
        (_module("components.models.deepseek_v4.config").DeepseekV4Config, "train_indexer", False),
        (_module("components.models.deepseek_v32.config").DeepseekV32Config, "train_indexer", False),
    ]
    for indexer in (layers.DeepseekV4Indexer, _module("components.models.deepseek_v32.layers").DeepseekV32Indexer):
        changes += [
            (indexer, "__bases__", (HardTopKIndexer,)),
            (indexer, "__init__", _then(indexer.__init__, _follow)),
        ]
    for built in (model, v32.DeepseekV32ForCausalLM, glm.GlmMoeDsaForCausalLM):
        changes.append((built, "__init__", _then(built.__init__, _report)))

    def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
        init_hyper_connections(
            self,
            (layers.DeepseekV4HyperConnection, layers.DeepseekV4HyperHead),
            (layers.DeepseekV4Compressor, layers.DeepseekV4Indexer),
            float(getattr(self.config, "initializer_range", 0.02)),
        )

    upstream_parallelizer = _module("components.moe.parallelizer")
    changes += [
        (upstream_parallelizer, "apply_ac", parallelizer.guarded_apply_ac(upstream_parallelizer)),
        (
            upstream_parallelizer,
            "parallelize_model",
            parallelizer.with_known_modes(upstream_parallelizer.parallelize_model),
        ),
    ]
    distributed = _module("components.distributed.config")
    for name in ("DistributedSetup", "FSDP2Config", "MegatronFSDPConfig", "DDPConfig"):
        setting = getattr(distributed, name)
        changes.append((setting, "__init__", _then(setting.__init__, parallelizer.read_mode)))
    changes.append((model, "initialize_weights", _after(initialised, model.initialize_weights)))
    freeze = model_utils.freeze_deepseek_v4_indexer_params
    changes.append((model_utils, "freeze_deepseek_v4_indexer_params", _unless_trained(freeze)))
    if infrastructure is not None:  # The builder freezes by name; by type, all is done already.
        changes.append((infrastructure, "freeze_deepseek_v4_indexer_params", lambda model: None))
    return changes


def _module(name: str, needed: bool = True) -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ImportError:
        if needed:
            raise
        return None


def _then(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(first)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = first(self, *args, **kwargs)
        second(self, *args, **kwargs)
        return result

    return both


def _after(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    # Initialised first, so that the release's own cast to the model dtype still comes last.
    @functools.wraps(second)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return second(self, *args, **kwargs)

    return both


def _follow(indexer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    indexer.follow_config(config)


def _report(model: Any, *args: Any, **kwargs: Any) -> None:
    report_trainable_indexers(model)


def _unless_trained(freeze: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(freeze)
    def policy(model: Any) -> None:
        if not getattr(getattr(model, "config", None), "train_indexer", False):
            freeze(model)

    return policy

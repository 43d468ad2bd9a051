# SPDX-License-Identifier: Apache-2.0
"""Run a real command line of molt in this process: rank 0 of a launch whose other ranks are made up.

``python -m tests.contracts.molt.launch_process OUTPUT MODEL_DIRECTORY train_sft|train_rl_ray [flags]``

What needs GPUs is stood in for, when the strategy joins the process group and no sooner: the group (torch's fake one,
in which every rank is like this one), HybridEP's buffer, the loading of weights (two MoE layers of the installed
Automodel, made parallel as the set-up says), the rendering of samples, and the trainer's loop (one forward and backward
pass of made-up hidden states). Command line, strategy, actor, backend config and optimizer are the release's own. Of
Ray, which the reinforcement command imports at once, there is an empty module: it gets as far as its own ``train``.

OUTPUT gets JSON: ``opened``, the model's files that were opened; ``passes``, finished backward passes; ``dispatcher``,
what the builder handed on to Automodel. LOCAL_RANK must not be set: there is no device to choose.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

report: dict[str, Any] = {"opened": [], "passes": 0, "dispatcher": None}


def main() -> None:
    """Set up what can be without an import of torch, and become the command."""
    output, model, command, *flags = sys.argv[1:]
    atexit.register(lambda: Path(output).write_text(json.dumps(report), encoding="utf-8"))
    directory = os.path.realpath(model)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and os.path.realpath(arguments[0]).startswith(directory):
            report["opened"].append(os.path.basename(arguments[0]))

    sys.addaudithook(watch)
    sys.argv = [command, *flags]
    sys.modules.setdefault("ray", ModuleType("ray"))
    sys.meta_path.insert(0, AfterImport("torch.distributed", stand_in_for_the_group))
    runpy.run_module(f"molt.cli.{command}", run_name="__main__", alter_sys=True)


class AfterImport:
    """Call a function once a module has been imported by somebody."""

    def __init__(self, name: str, then: Any) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the module by the other finders, with the call behind its execution."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = next(found for finder in sys.meta_path if (found := finder.find_spec(name, path, target)))
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def stand_in_for_the_group(distributed: Any) -> None:
    """Replace ``init_process_group``: no NCCL here."""

    def join(**unused: object) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = int(os.environ["WORLD_SIZE"])
        distributed.distributed_c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        stand_in_for_what_needs_gpus()

    distributed.init_process_group = join


def stand_in_for_what_needs_gpus() -> None:
    """Replace the loading of weights, the rendering of samples (eight processes), and the trainer's loop."""
    import nemo_automodel
    from molt.datasets import SFTDataset
    from molt.trainer.sft_trainer import SFTTrainer

    nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained = staticmethod(load)
    SFTDataset.__init__ = lambda self, rows, *unused, **options: setattr(self, "rows", rows)
    SFTDataset.__len__ = lambda self: len(self.rows)
    SFTTrainer.fit = fit


def load(path: str, *, distributed_setup: Any, backend: Any, **unused: object) -> Any:
    """Read the weights, and build two MoE layers as Automodel would be asked to build the model.

    Args:
        path: The model's directory.
        distributed_setup: Meshes and policies, made by molt.
        backend: Automodel's backend config, made by molt.
        unused: The rest.
    """
    import torch
    from nemo_automodel.components.moe import parallelizer
    from safetensors.torch import load as parse
    from transformers import AutoConfig

    from tests.contracts.automodel import checkpointing_ranks, hybridep

    parse((Path(path) / "model.safetensors").read_bytes())
    report["dispatcher"] = backend.dispatcher
    mesh = distributed_setup.mesh_context.moe_mesh
    if backend.dispatcher == "hybridep":
        hybridep.install(mesh.get_group("ep"))
    model = checkpointing_ranks.Model(backend.dispatcher, "torch_mm")
    model.config = AutoConfig.from_pretrained(path)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    world = torch.distributed.init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "other"))
    parallelizer.parallelize_model(
        model,
        world,
        mesh,
        dp_axis_names=("dp",),
        ep_axis_name="ep",
        activation_checkpointing=distributed_setup.activation_checkpointing,
        ignore_router_for_ac=distributed_setup.moe_parallel_config.ignore_router_for_ac,
    )
    return model


def fit(trainer: Any, args: Any, *unused: object) -> None:
    """One forward and backward pass on made-up hidden states, through the strategy's own backward."""
    import torch

    from tests.contracts.automodel.checkpointing_ranks import DIM, TOKENS

    hidden = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(2)).requires_grad_()
    loss = trainer.model.model(hidden).square().mean()
    trainer.strategy.backward(loss, trainer.model, trainer.optimizer)
    report["passes"] += 1


if __name__ == "__main__":
    main()

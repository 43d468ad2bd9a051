# SPDX-License-Identifier: Apache-2.0
"""The refusals, word for word: each names the file, the parameters and what to do next."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed.checkpoint as dcp

from nemo_automodel_shim.components.checkpoint.sparse_optimizer_state import (
    OptimizerStateError,
    load_optimizer_state,
    optimizer_state_dict,
)
from tests.support.training import Run, start_run


class TestRefusals(expecttest.TestCase):
    """One test a kind; regenerate the texts with EXPECTTEST_ACCEPT=1."""

    def setUp(self) -> None:
        self.maxDiff = None
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.path = Path(place.name) / "optim"
        self.run_saved = start_run()
        self.run_saved.train(range(3), ["used"])
        self.flat = optimizer_state_dict(self.run_saved.model, self.run_saved.optimizer)

    def refusal(self, run: Run, flat: dict[str, Any] | None = None, schedulers: list[Any] | None = None) -> str:
        """Text of the refusal to load ``flat`` into ``run``, with the directory's name taken out."""
        if not self.path.exists():
            dcp.save({"optim": self.flat if flat is None else flat}, checkpoint_id=str(self.path))
        with pytest.raises(OptimizerStateError) as failure:
            load_optimizer_state([run.model], [run.optimizer], schedulers, self.path)
        return str(failure.value).replace(str(self.path), "PATH").replace(" rank 0: ", "\nrank 0: ")

    def test_damaged(self) -> None:
        del self.flat["state.used.weight.exp_avg_sq"], self.flat["state.used.bias.step"]
        self.assertExpectedInline(
            self.refusal(start_run()),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: PATH holds damaged state of 2 parameters: used.weight lacks exp_avg_sq (saved: exp_avg, step); used.bias lacks step (saved: exp_avg, exp_avg_sq). Resume from another checkpoint, or without optimizer state.""",
        )

    def test_other_shape(self) -> None:
        self.flat["state.used.bias.exp_avg"] = torch.zeros(7)
        self.assertExpectedInline(
            self.refusal(start_run()),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: PATH holds damaged state of 1 parameter: used.bias: exp_avg has shape [7], the parameter [4]. Resume from another checkpoint, or without optimizer state.""",
        )

    def test_unknown(self) -> None:
        names = ("used", "late", "never", "a", "b", "c", "d")
        self.assertExpectedInline(
            self.refusal(start_run(names)),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: 8 live parameters not listed in PATH: a.bias, a.weight, b.bias, b.weight, c.bias and 3 more. If they are new since the save (unfrozen, added), pass allow_new_parameters=True: they then start without state.""",
        )

    def test_nothing_in_common(self) -> None:
        self.assertExpectedInline(
            self.refusal(start_run(("other",))),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: PATH and the live optimizer have no parameter in common: saved 'late.bias', live 'other.bias'. Is it the checkpoint of another model, or are the names prefixed differently?""",
        )

    def test_conflict_in_a_group(self) -> None:
        self.flat["param_groups.never.bias.lr"] = 0.5
        self.assertExpectedInline(
            self.refusal(start_run()),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: Parameters of one live group have different saved values of 'lr' in PATH: 0.0025 for used.weight, 0.5 for never.bias. Build the optimizer with the groups that it was saved with.""",
        )

    def test_state_without_a_group(self) -> None:
        self.flat["state.stranger.exp_avg"] = torch.zeros(1)
        self.assertExpectedInline(
            self.refusal(start_run()),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: PATH holds state (optim.state.stranger.exp_avg) of a parameter that its groups do not list; the file is damaged.""",
        )

    def test_no_scheduler_saved(self) -> None:
        run = start_run()
        self.assertExpectedInline(
            self.refusal(run, schedulers=[run.scheduler]),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: PATH holds no scheduler (sched.*), but one was passed; pass scheduler=None to resume the optimizer alone.""",
        )

    def test_no_checkpoint(self) -> None:
        self.path.mkdir()
        self.assertExpectedInline(
            self.refusal(start_run()),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: PATH/.metadata cannot be read (FileNotFoundError: [Errno 2] No such file or directory: 'PATH/.metadata'); is the checkpoint complete?""",
        )

    def test_another_kind_of_checkpoint(self) -> None:
        dcp.save(dict(self.run_saved.model.state_dict()), checkpoint_id=str(self.path))
        self.assertExpectedInline(
            self.refusal(start_run()),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: PATH holds no parameter groups (optim.param_groups.*): it is no optimizer checkpoint of this layout.""",
        )

    def test_parameter_of_another_model(self) -> None:
        run, other = start_run(), start_run()
        self.assertExpectedInline(
            self.refusal(Run(other.model, run.optimizer, run.scheduler)),
            """\
The optimizer was not resumed from PATH; nothing was changed on any rank.
rank 0: Parameter 0 of optimizer 0 (shape [4, 4]) is not in the model that was passed with it; pass the model whose parameters the optimizer was built from.""",
        )

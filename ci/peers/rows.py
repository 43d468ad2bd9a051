# SPDX-License-Identifier: Apache-2.0
"""The rows: what happens to a run, or to its file, and what is due. Scenarios and damages are the grid's."""

from __future__ import annotations

import dataclasses
from typing import Any

from ci import grid

PARAMETER = r"layer\d+\.weight"

# Why ours is not ahead of every peer: said in a row where some peer is as good.
NOTHING_MISSING = "nothing is missing in the file, so nothing can be made up"
ZEROS = "zeros are what Adam begins with, so they are as good; they cost two copies of each such parameter in the file"
ZEROS_IN_TIME = "the file is whole: the zeros were written in time, and cost two copies of each such parameter"
MOMENTUM = "this momentum begins at zero, which is what a step with zero gradients leaves"
FILLED = "0.7.0 fills its optimizer before the load, by itself and not by a step"
LATER_RELEASE = "0.7.0 no longer adds the saved steps to those taken"
SHAPE = "torch compares the shapes by itself where the template is no live optimizer's"
STATELESS = "it keeps no state, so there is none to be missing"
AT_BUILD = "the optimizer makes its state when it is built, so nothing is ever missing"


@dataclasses.dataclass(frozen=True)
class Row:
    """One input and what is due.

    ``damage``: one of the grid's, or ``foreign``. ``names``: what a refusal has to name. ``tie``: why no more than a
    draw with some peer, empty where ours is ahead of all. ``options``: of our load.
    """

    name: str
    group: str
    meaning: str
    optimizer: str = "adamw"
    case: str = "partial"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    due: str = "exact"
    damage: str = ""
    names: str = PARAMETER
    torch_file: bool = False
    without_last: bool = False
    upstream_scheduler: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    tie: str = ""

    def scenario(self) -> Any:
        """The run."""
        made = grid.scenario(self.optimizer, "dense" if self.damage else self.case)
        return dataclasses.replace(made, **self.changes)


def _others() -> list[Row]:
    ties = {"adagrad": AT_BUILD, "sgd": STATELESS}
    names = ("sgd", "sgd-momentum", "sgd-nesterov", "adam-amsgrad", "nadam", "radam", "adamax", "adagrad", "adadelta")
    names += ("rmsprop-centered", "rprop", "asgd", "adafactor", "muon", "adamw-fused", "adamw-tensor-lr")
    names += ("step-in-group", "nested-state", "int8-with-scale")
    ties |= dict.fromkeys(("sgd-momentum", "muon", "step-in-group"), MOMENTUM)
    ties |= {name: ZEROS for name in ("adam-amsgrad", "adamw-fused", "adamw-tensor-lr")}
    return [
        Row(name, "Other optimizers", "one updated, one later, one never", optimizer=name, tie=ties.get(name, ""))
        for name in names
    ]


STATE, GROUPS, LIVE, FILES = "State", "Groups and schedulers", "The live run at the load", "Files"
ROWS = [
    Row("dense", STATE, "every parameter updated before the save", case="dense", tie=NOTHING_MISSING),
    Row("partial", STATE, "one updated, one later, one never", tie=ZEROS),
    Row("partial, Adam with L2", STATE, "the same, weight decay in the gradient", optimizer="adam-l2", tie=ZEROS),
    Row(
        "late first gradient",
        STATE,
        "two parameters get their first gradient after the resume",
        changes={"after": (grid.ALL,) * 4},
        tie=ZEROS,
    ),
    Row("cold", STATE, "saved before the first step", case="cold", tie=ZEROS),
    Row("cold, Adam with L2", STATE, "the same", optimizer="adam-l2", case="cold", tie=ZEROS),
    Row("cold, SGD", STATE, "the same, with dampening and weight decay", optimizer="sgd-dampening", case="cold"),
    Row("frozen", STATE, "trained, then frozen, and kept in the optimizer", case="frozen"),
    Row(
        "new parameter",
        STATE,
        "frozen at the save and not in the file, trained since",
        changes={"after": (grid.ALL,) * 4},
        without_last=True,
        due="refused",
        names=r"layer2\.weight",
    ),
    Row(
        "new parameter, asked for",
        STATE,
        "the same, where it is to start cold (`allow_new_parameters`)",
        changes={"after": (grid.ALL,) * 4},
        without_last=True,
        options=(("allow_new_parameters", True),),
    ),
    Row("groups", GROUPS, "own options a group, in another order at the load", case="groups", tie=ZEROS),
    Row("empty group", GROUPS, "a group without parameters", case="empty group"),
    Row("no elements", GROUPS, "a parameter without elements", case="no elements", tie=ZEROS),
    Row("tied", GROUPS, "the first parameter has a second name", changes={"tied": True}, tie=ZEROS),
    Row("MultiStepLR", GROUPS, "dense, with that scheduler", case="dense", changes={"scheduler": "multi-step"}),
    Row("MultiStepLR, partial", GROUPS, "partial, with it", changes={"scheduler": "multi-step"}),
    Row("CyclicLR", GROUPS, "partial", changes={"scheduler": "cyclic"}, tie=ZEROS),
    Row("SequentialLR", GROUPS, "partial", changes={"scheduler": "sequential"}, tie=ZEROS),
    Row(
        "OptimizerParamScheduler",
        GROUPS,
        "the release's own, dense, loaded into a run that has stepped",
        case="dense",
        changes={"scheduler": "OptimizerParamScheduler (upstream)", "loaded_into": "stepped"},
        upstream_scheduler=True,
        tie=LATER_RELEASE,
    ),
    *_others(),
    Row("stepped", LIVE, "partial, into an optimizer that has stepped all", case="stepped", tie=ZEROS_IN_TIME),
    Row(
        "partly stepped",
        LIVE,
        "dense, into an optimizer that has stepped one",
        case="dense",
        changes={"loaded_into": "partly-stepped"},
        tie=FILLED,
    ),
    Row("gradients waiting", LIVE, "partial, gradients set at the load", case="waiting", tie=FILLED),
    Row(
        "gradients waiting, dense",
        LIVE,
        "dense, gradients set at the load",
        case="dense",
        changes={"loaded_into": "gradients-waiting"},
        tie=FILLED,
    ),
    Row("sparse file", FILES, "partial, saved by an unpatched tree", torch_file=True),
    Row("half an entry", FILES, "one entry of one parameter is missing", damage="half an entry", due="refused"),
    Row("another shape", FILES, "one moment has another shape", damage="another shape", due="refused", tie=SHAPE),
    Row("other names", FILES, "no name in common with the model", damage="other names", due="refused"),
    Row("unlisted", FILES, "the model has a parameter that the file lacks", damage="new parameter", due="refused"),
    Row("data cut", FILES, "the data file is cut short", damage="data cut", due="refused", names="distcp"),
    Row("metadata cut", FILES, "`.metadata` is cut short", damage="metadata cut", due="refused", names="metadata"),
    Row(
        "foreign",
        FILES,
        "saved by SGD with momentum, loaded into AdamW",
        damage="foreign",
        due="refused",
        names=rf"AdamW|{PARAMETER}",
    ),
]
BY_NAME = {row.name: row for row in ROWS}
DRIFT_ROW = BY_NAME["late first gradient"]

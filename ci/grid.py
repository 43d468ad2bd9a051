# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedulers × what happens to a run, on the release and on the release with the shim.

``python -m ci.grid`` writes ``docs/grid.md``; ``nox -s grid`` runs it. Both sides go through the release's
``Checkpointer``, each in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest

PAGE = REPOSITORY / "docs" / "grid.md"
SIDES = ("stock", "patched")
NOT_POSSIBLE = "–"

# used, late, never: what gets a gradient before the save and after it
USED, LATER, ALL = frozenset({0}), frozenset({0, 1}), frozenset({0, 1, 2})
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("every parameter updated before the save", {"before": (ALL, ALL)}),
    "partial": ("one updated, one later, one never", {}),
    "cold": ("saved before the first step", {"before": ()}),
    "stepped": ("partial, loaded into an optimizer that has stepped", {"loaded_into": "stepped"}),
    "waiting": ("partial, gradients set at the load", {"loaded_into": "gradients-waiting"}),
    "frozen": ("trained, then frozen, and kept in the optimizer", {"frozen": USED, "after": (LATER - USED,) * 4}),
    "no elements": ("a parameter without elements beside others", {"shapes": ("matrix", "rows-0", "transposed")}),
    "empty group": ("partial, with an empty group", {"empty_group": True}),
    "groups": ("own options a group, in another order at the load", {"group_of": (0, 1, 2), "reversed_groups": True}),
}


def scenario(optimizer: str, case: str) -> Any:
    """The scenario of a cell, or ``None`` where torch cannot run it at all."""
    from tests.support.scenario import Scenario

    base: dict[str, Any] = {
        "optimizer": optimizer,
        "shapes": ("matrix", "square", "transposed"),
        "group_of": (0, 0, 0),
        "before": (USED,) * 3,
        "after": (LATER,) * 4,
        "scheduler": "none",
    }
    made = Scenario(**base | CASES[case][1])
    kind = made.kind
    if kind.closure:  # flattens gradients by a view
        made = dataclasses.replace(made, shapes=("matrix", "square", "vector"))
    if case == "dense" or kind.together:
        made = dataclasses.replace(made, after=(ALL,) * 4)
    if kind.together:
        made = dataclasses.replace(made, before=(ALL,) * len(made.before))
    if not kind.steps:
        return dataclasses.replace(made, after=()) if case == "cold" else None
    impossible = {
        "partial": kind.together,
        "frozen": kind.together,
        "no elements": kind.elements or kind.matrices,
        "empty group": kind.closure,
        "groups": kind.closure,
    }
    return None if impossible.get(case) else made


def cells(names: Iterable[str] | None) -> list[tuple[str, str, str]]:
    """(table, row, case) of everything that is run, or of the rows ``names``."""
    from tests.support.optimizers import OPTIMIZERS, OTHERS
    from tests.support.scenario import SCHEDULERS

    rows = [("optimizer", name) for name in (*OPTIMIZERS, *OTHERS)]
    found = [(table, name, case) for table, name in rows for case in CASES]
    found += [
        ("scheduler", name, case)
        for name in (*SCHEDULERS, *_upstream_schedulers())
        for case in ("dense", "partial", "cold", "stepped")
    ]
    found += [("damage", damage, optimizer) for damage in DAMAGES for optimizer in DAMAGED]
    return found if names is None else [cell for cell in found if cell[1] in set(names)]


def run_cell(table: str, row: str, case: str, checkpointer: Callable[[Path], Any]) -> str:
    """One outcome: ``exact``, ``drift <n>``, ``state``, ``moved``, ``refused`` or the name of an error."""
    from tests.support.scenario import SCHEDULERS, play

    if table == "damage":
        return run_damage(case, row, checkpointer)
    if table == "scheduler":
        SCHEDULERS.update(_upstream_schedulers())
        made = dataclasses.replace(scenario("adamw", case), scheduler=row)
    else:
        made = scenario(row, case)
    if made is None:
        return NOT_POSSIBLE
    with tempfile.TemporaryDirectory() as place:
        owner = checkpointer(Path(place))

        def save(party: Any) -> None:
            owner.save_optimizer(party.optimizer, party.model, place, _listed(party))

        def load(party: Any) -> None:
            owner.load_optimizer(party.optimizer, party.model, place, _listed(party))

        try:
            played = play(made, save, load)
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt):
                raise
            name = type(failure).__name__
            return "refused" if name == "OptimizerStateError" else name
    if not played.differences:
        return "exact"
    if played.drift:
        return f"drift {played.drift:.0e}"
    return "state differs"


def _listed(party: Any) -> list[Any] | None:
    return None if party.scheduler is None else [party.scheduler]  # as the recipes pass them


DAMAGES: dict[str, str] = {
    "half an entry": "one of several entries of a parameter is not in the file",
    "another shape": "a moment has another shape than its parameter",
    "other names": "every name has a prefix that the model has not",
    "no metadata": "`.metadata` is absent",
    "metadata cut": "`.metadata` is cut short",
    "no data": "the data file is absent",
    "data cut": "the data file is cut short",
    "new parameter": "the model has a parameter that the file does not list",
}
DAMAGED = ("sgd-momentum", "adamw", "adafactor", "rmsprop-centered")


def run_damage(optimizer: str, damage: str, checkpointer: Callable[[Path], Any]) -> str:
    """``refused``: by name, with nothing changed; otherwise what came of the load."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    from tests.support.scenario import start
    from tests.support.training import differences

    made = scenario(optimizer, "dense")
    saved, live = start(made), start(made)
    if damage == "new parameter":
        live = start(dataclasses.replace(made, shapes=(*made.shapes, "vector"), group_of=(0,) * 4))
    for party in (saved, live):
        party.step(0, ALL)
        party.step(1, ALL)
    flat = get_optimizer_state_dict(
        saved.model, saved.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    entries = sorted(key for key in flat if key.startswith("state.layer0.weight."))
    if damage == "half an entry":
        if len(entries) < 2:
            return NOT_POSSIBLE
        del flat[entries[0]]
    elif damage == "another shape":
        entry = next(key for key in entries if flat[key].shape == saved.params[0].shape or flat[key].ndim)
        if flat[entry].shape != saved.params[0].shape:
            return NOT_POSSIBLE
        flat[entry] = torch.zeros(7, 3)
    elif damage == "other names":
        flat = {key.replace("layer", "model.layer"): value for key, value in flat.items()}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "optim"
        dcp.save({"optim": flat}, checkpoint_id=str(path))
        file = path / (".metadata" if "metadata" in damage else "__0_0.distcp")
        if damage.startswith("no "):
            file.unlink()
        elif damage.endswith(" cut"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        before, said = live.snapshot(), "accepted"
        try:
            checkpointer(Path(place)).load_optimizer(live.optimizer, live.model, place, None)
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt):
                raise
            said = "refused" if type(failure).__name__ == "OptimizerStateError" else type(failure).__name__
        return said + (", changed" if said != "accepted" and differences(before, live.snapshot()) else "")


def _upstream_schedulers() -> dict[str, Callable[[Any], Any]]:
    from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler

    def make(optimizer: Any) -> Any:
        return OptimizerParamScheduler(optimizer, 0.0, 1e-2, 1e-3, 2, 10, "cosine", 0.0, 0.1, 5, "linear")

    return {"OptimizerParamScheduler (upstream)": make}


def _upstream_optimizers() -> tuple[dict[str, Any], dict[str, str]]:
    """Optimizers that the release's configs and torchao build here, and for those that do not import, why."""
    import torch
    from nemo_automodel.components.optim import optimizer as upstream
    from torch import nn

    from tests.support.optimizers import Kind

    found: dict[str, Any] = {}
    untested: dict[str, str] = {}
    for name, config in sorted(vars(upstream).items()):
        if not (isinstance(config, type) and issubclass(config, upstream.OptimizerConfig)) or name.startswith("_"):
            continue
        if name in ("OptimizerConfig", "OptimizerFromFactoryConfig"):
            continue
        try:
            if not issubclass(config, upstream._DionConfigBase):
                config()._build_optimizer([nn.Parameter(torch.ones(2, 2))])
            else:
                config()._make_optimizer([nn.Parameter(torch.ones(2, 2))], {})
        except ImportError as failure:
            untested[name.removesuffix("Config")] = str(failure.name or failure)
            continue
        found[f"upstream's {name.removesuffix('Config')}"] = Kind(config()._build_optimizer)
    return found, untested


def side(name: str, names: list[str] | None) -> dict[str, Any]:
    """Run all cells in this process, on the release that it imports."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if name == "patched":
        os.environ["AUTOMODEL_SHIM_INSTALL"] = "1"
    from tests.contracts.automodel.upstream import plain_checkpointer
    from tests.support.optimizers import OTHERS

    upstream, untested = _upstream_optimizers()
    OTHERS.update(upstream)
    outcomes = {"|".join(cell): run_cell(*cell, plain_checkpointer) for cell in cells(names)}
    return {"outcomes": outcomes, "untested": untested}


def run(names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Both sides, each in a process of its own: ``outcomes`` by ``table|row|case``, and what is ``untested``."""
    target = manifest.load(PATCHES).select(None)[1]
    found = {}
    with tempfile.TemporaryDirectory(prefix="grid-") as temporary:
        release = Path(temporary) / "release"
        fetch.unpack_wheel(fetch.fetch_wheel(target.wheel, WHEEL_CACHE, lambda line: None), release)
        for name in SIDES:
            answer = Path(temporary) / f"{name}.json"
            done = subprocess.run(
                [sys.executable, "-m", "ci.grid", "--side", name, str(answer), *(names or [])],
                cwd=REPOSITORY,
                env=os.environ
                | {"PYTHONPATH": f"{release}{os.pathsep}{REPOSITORY}", "HF_HUB_OFFLINE": "1"}
                | {"TORCHDYNAMO_DISABLE": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
            found[name] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def page(found: dict[str, dict[str, Any]], version: str) -> str:
    """The page as Markdown."""
    stock, patched = (found[name]["outcomes"] for name in SIDES)
    lines = [
        "# Grid: what a resume does, on the release and with the fixes",
        "",
        f"Made by `nox -s grid` on the {version} wheel; do not edit. A cell is the release's outcome → the fixed one,",
        "or one word where both agree.",
        "",
        "| | |",
        "|---|---|",
        "| exact | the save moves nothing, and the resumed run equals the uninterrupted one bit for bit |",
        "| drift n | nothing is reported, and parameters are off by up to n at the end |",
        "| state differs | nothing is reported, parameters agree so far, state or options do not |",
        "| refused | by name, with the remedy, and nothing is changed |",
        "| accepted | loaded without a word |",
        f"| {NOT_POSSIBLE} | torch cannot run it: an optimizer's own limit |",
        "| anything else | the error that ends it |",
        "",
    ]
    lines += [*("| case | |", "|---|---|"), *(f"| {name} | {meaning} |" for name, (meaning, _) in CASES.items()), ""]
    lines += [*("| damage | |", "|---|---|"), *(f"| {name} | {meaning} |" for name, meaning in DAMAGES.items()), ""]
    for table in ("optimizer", "scheduler", "damage"):
        keys = [key.split("|") for key in patched if key.startswith(f"{table}|")]
        rows, columns = dict.fromkeys(key[1] for key in keys), dict.fromkeys(key[2] for key in keys)
        lines += [f"## {table.capitalize()}s", ""] if table != "damage" else ["## Damaged files", ""]
        lines += [f"| {table} | {' | '.join(columns)} |"]
        lines.append(f"|---|{'---|' * len(columns)}")
        for row in rows:
            texts = [_cell(stock[f"{table}|{row}|{case}"], patched[f"{table}|{row}|{case}"]) for case in columns]
            lines.append(f"| {row} | {' | '.join(texts)} |")
        lines.append("")
    lines += ["## Not tested", "", "They do not import here:", ""]
    lines += [f"- {name}, which needs `{module}`" for name, module in found["patched"]["untested"].items()]
    runs = [key for key in patched if not key.startswith("damage|") and patched[key] != NOT_POSSIBLE]
    good = [sum(outcomes[key] in ("exact", "refused") for key in runs) for outcomes in (stock, patched)]
    lines += ["", "## Sum", "", "Runs over intact files, exact or refused by name: "]
    lines[-1] += f"{good[0]} of {len(runs)} on the release, {good[1]} with the fixes."
    return "\n".join(lines) + "\n"


def _cell(before: str, after: str) -> str:
    return after if before == after else f"{before} → {after}"


def kinds(text: str) -> str:
    """The page without the sizes of drifts, which depend on the processor."""
    return re.sub(r"drift \S+", "drift", text)


def main(arguments: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="rows; all of them without")
    options = parser.parse_args(arguments)
    if options.side:
        answer = side(options.side[0], options.names or None)
        Path(options.side[1]).write_text(json.dumps(answer), encoding="utf-8")
        return 0
    version = manifest.load(PATCHES).select(None)[1].wheel.version
    text = page(run(options.names or None), version)
    if options.names:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

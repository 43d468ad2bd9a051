# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults in the loader: each must turn the test that is named for it red. ``nox -s mutants``.

A fault is text that is replaced in a copy of this repository. A text that is not there exactly once is an error, and so
is a test that does not pass without the fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ci.regress import REPOSITORY

LOADER = "nemo_automodel_shim/components/checkpoint/sparse_optimizer_state.py"
SAVER = "nemo_automodel_shim/components/checkpoint/checkpointing.py"
TESTS = "tests/shim/test_sparse_optimizer_state.py::"
MESSAGES = "tests/shim/test_messages.py::TestRefusals::"
LAYOUTS = "tests/shim/test_layouts.py::"
SEARCH = "tests/shim/test_search.py::"
COPIED = ("ci", "nemo_automodel_shim", "patches", "tests", "pyproject.toml")

PASSED, FAILED = 0, 1  # of pytest; any other status is no verdict


class Mutant(NamedTuple):
    """One fault: ``old`` becomes ``new`` in ``file``, and ``test`` must fail."""

    name: str
    old: str
    new: str
    test: str
    file: str = LOADER


MUTANTS: list[Mutant] = [
    Mutant(
        "skip the consensus",
        "        dist.all_gather_object(votes, vote)\n",
        "        votes = [vote]\n",
        TESTS + "test_a_failure_on_one_rank_is_the_same_error_on_all[look]",
    ),
    Mutant(
        "no way back after a failed load",
        "        before.restore()\n",
        "",
        TESTS + "test_a_failure_on_one_rank_is_the_same_error_on_all[act]",
    ),
    Mutant(
        "no way back for schedulers within schedulers",
        "isinstance(item, torch.optim.lr_scheduler.LRScheduler)",
        "False",
        TESTS + "test_a_failure_on_one_rank_is_the_same_error_on_all[act-nested]",
    ),
    Mutant(
        "a failure without a text keeps the others waiting",
        "    except Exception:\n        return type(exc).__name__",
        "    except KeyError:\n        return type(exc).__name__",
        TESTS + "test_a_failure_on_one_rank_is_the_same_error_on_all[no-text]",
    ),
    Mutant(
        "accept half an entry",
        "lacking = sorted(name for name in expected.entries(live) if not _has(entries, name))",
        "lacking: list[str] = []",
        TESTS + "test_half_an_entry_is_refused_whatever_the_optimizer[adamw]",
    ),
    Mutant(
        "accept a moment of another shape",
        "if stored.size != live.param.size() and expected.has_the_parameters_shape(live, entry):",
        "if False:",
        TESTS + "test_damage_is_seen_where_the_optimizer_cannot_be_asked[shape]",
    ),
    Mutant(
        "take the group from its first parameter",
        "if not same and not _equal(template[first_key], template[key]):",
        "if False:",
        MESSAGES + "test_conflict_in_a_group",
    ),
    Mutant(
        "live options win over the saved ones",
        "{**live_options, **saved}",
        "{**saved, **live_options}",
        TESTS + "test_groups_keep_their_own_saved_options_in_another_order",
    ),
    Mutant(
        "names in a group come from the file",
        'if place[0] == "param_names":',
        "if False:",
        TESTS + "test_names_in_a_group_stay_the_live_ones",
    ),
    Mutant(
        "leave step at 1",
        "    if optimizer.state:\n        return get_optimizer_state_dict(",
        "    if True:\n        return get_optimizer_state_dict(",
        TESTS + "test_resume_equals_the_uninterrupted_run[adamw-cold-fresh]",
    ),
    Mutant(
        "give the never-updated an empty state",
        "    checkpoint.read(template)\n    restored: dict[tuple[int, int], dict[str, Any]] = {}\n",
        "    checkpoint.read(template)\n    restored = {(live.optimizer, live.index): {} for live in lives}\n",
        TESTS + "test_two_parts_of_which_one_is_cold",
    ),
    Mutant(
        "state with strides of its own",
        "return torch.empty_like(param, dtype=dtype, requires_grad=False)",
        "return torch.empty(stored.size, dtype=dtype, device=param.device)",
        TESTS + "test_strides_of_the_state_are_those_of_the_parameter",
    ),
    Mutant(
        "admit new parameters in silence",
        "if seen.new and not allow_new_parameters:",
        "if False:",
        TESTS + "test_a_failure_on_one_rank_is_the_same_error_on_all[look]",
    ),
    Mutant(
        "nothing in common is a cold start",
        "if not found and examples and len(dropped) == len(seen.listed) > 0:",
        "if False:",
        TESTS + "test_nothing_in_common_on_any_rank",
    ),
    Mutant(
        "a rank alone calls parameters dropped",
        "if not any(held)]",
        "if not held[0]]",
        TESTS + "test_parameters_of_another_rank_are_not_called_dropped",
    ),
    Mutant(
        "another optimizer's file will do",
        "if lacking and strange:",
        "if False:",
        TESTS + "test_another_optimizer_is_refused",
    ),
    Mutant(
        "wrappers are part of a name",
        'frozenset({"_orig_mod", "_checkpoint_wrapped_module"})',
        "frozenset()",
        TESTS + "test_file_with_wrapped_names_is_the_same_parameter",
    ),
    Mutant(
        "scheduler keys as DCP leaves them",
        "[_typed_like(copy.deepcopy(state), scheduler.state_dict()) for scheduler in schedulers]",
        "[copy.deepcopy(state) for scheduler in schedulers]",
        TESTS + "test_schedulers_go_on_and_can_be_saved_again[multi-step]",
    ),
    Mutant(
        "looking runs the hooks of real steps",
        "inspect.unwrap(type(optimizer).step)",
        "type(optimizer).step",
        TESTS + "test_looking_at_an_optimizer_runs_nobodys_hooks",
    ),
]


def check_texts(mutants: list[Mutant]) -> list[str]:
    """What is wrong with the faults as data: texts that are not there exactly once, or change nothing."""
    wrong = []
    for mutant in mutants:
        count = (REPOSITORY / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if count != 1:
            wrong.append(f"{mutant.name}: its text is {count} times in {mutant.file}")
        if mutant.old == mutant.new:
            wrong.append(f"{mutant.name}: it changes nothing")
    return wrong


def run(mutants: list[Mutant]) -> list[str]:
    """Return what did not go as it must: faults that no test saw, tests that fail without a fault."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        tree = Path(temporary)
        for name in COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, tree / name)
        tests = sorted({mutant.test for mutant in mutants})
        if _pytest(tree, *tests) != PASSED:
            return [f"without a fault, these do not all pass: {' '.join(tests)}"]
        for mutant in mutants:
            file = tree / mutant.file
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            status = _pytest(tree, mutant.test)
            file.write_text(text, encoding="utf-8")
            said = {PASSED: "NOT SEEN", FAILED: "seen"}.get(status, f"no verdict, pytest ended with {status}")
            print(f"{mutant.name:45} {said:10} {mutant.test}", flush=True)
            if status != FAILED:
                wrong.append(f"{mutant.name}: {said}")
    return wrong


def _pytest(tree: Path, *tests: str) -> int:
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=tree, env=environment | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False
    )
    if done.returncode not in (PASSED, FAILED):
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    return done.returncode


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every fault was seen, 1 if not, 2 if the faults as data are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults; all of them without")
    names = parser.parse_args(arguments).names
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if problems := [*check_texts(chosen), *(f"{name}: no such fault" for name in sorted(unknown))]:
        print("\n".join(problems), file=sys.stderr)
        return 2
    wrong = run(chosen)
    print("\n".join(wrong) or f"{len(chosen)} faults, each of them seen")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

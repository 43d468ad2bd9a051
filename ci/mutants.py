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
READER = "nemo_automodel_shim/components/checkpoint/optimizer_checkpoint.py"
LIVE = "nemo_automodel_shim/components/checkpoint/live_optimizer.py"
SCHEDULER = "nemo_automodel_shim/components/checkpoint/scheduler_state.py"
METADATA = "nemo_automodel_shim/components/checkpoint/checkpoint_metadata.py"
RANKS = "nemo_automodel_shim/components/checkpoint/rank_agreement.py"
TESTS = "tests/shim/test_sparse_optimizer_state.py::"
MESSAGES = "tests/shim/test_messages.py::TestRefusals::"
LAYOUTS = "tests/shim/test_layouts.py::"
POSITIONS = "tests/shim/test_positions.py::"
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
        "    dist.all_gather(heads, mine)\n",
        "    heads = [mine] * world\n",
        TESTS + "test_a_failure_on_one_rank_is_the_same_error_on_all[look]",
        RANKS,
    ),
    Mutant(
        "skip the second consensus",
        "    dist.all_reduce(found, op=dist.ReduceOp.MAX)\n",
        "",
        TESTS + "test_a_failure_on_one_rank_is_the_same_error_on_all[act]",
        RANKS,
    ),
    Mutant(
        "every rank reads the metadata",
        "    if rank == 0:\n        try:\n            data = produce()",
        "    if True:\n        try:\n            data = produce()",
        LAYOUTS + "test_metadata_is_read_once_and_consensus_is_cheap",
        RANKS,
    ),
    Mutant(
        "save what the ranks do not agree on",
        "    if not same_on_all_ranks(hashlib.sha256(text.encode()).digest() + bytes([error is not None])):",
        "    if False:",
        LAYOUTS + "test_ranks_that_do_not_agree_are_never_saved_in_silence",
    ),
    Mutant(
        "ranks agree whatever they count",
        'if scalar and not isinstance(value, DTensor) and (entry == "step" or live.param.ndim > 0):',
        "if False:",
        LAYOUTS + "test_ranks_that_do_not_agree_are_never_saved_in_silence",
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
        RANKS,
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
        "{**kept, **saved}",
        "{**saved, **kept}",
        TESTS + "test_groups_keep_their_own_saved_options_in_another_order",
    ),
    Mutant(
        "what a group counts stays as it was",
        "for option, value in live_options.items() if option not in counted}",
        "for option, value in live_options.items()}",
        SEARCH + "test_a_cold_file_takes_back_what_a_group_counts",
    ),
    Mutant(
        "names in a group come from the file",
        'if place[0] == "param_names":',
        "if False:",
        TESTS + "test_names_in_a_group_stay_the_live_ones",
    ),
    Mutant(
        "leave step at 1",
        "    if any(optimizer.state.values()):\n        try:",
        "    if True:\n        try:",
        TESTS + "test_resume_equals_the_uninterrupted_run[adamw-cold-fresh]",
    ),
    Mutant(
        "lost state passes for never updated",
        "if checkpoint.never_updated is not None and live.name not in checkpoint.never_updated:",
        "if False:",
        SEARCH + "test_lost_state_is_told_from_never_updated",
    ),
    Mutant(
        "the file does not say what was never updated",
        'return flat | {f"never_updated.{live.name}": True for live in _cold([optimizer], lives)}',
        "return flat",
        SEARCH + "test_lost_state_is_told_from_never_updated",
    ),
    Mutant(
        "state takes the parameter's dtype",
        "        _keep_dtypes(optimizers, lives, restored, expected)\n",
        "",
        SEARCH + "test_parameters_of_another_dtype[float64]",
    ),
    Mutant(
        "a small tensor's bytes are laid out as the one before",
        '("data.pkl", "byteorder")',
        '("byteorder", "byteorder")',
        TESTS + "test_resume_equals_the_uninterrupted_run[adamw-partial-fresh]",
        READER,
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
        "if not found and any(holds for holds, _ in flags) and not any(shares for _, shares in flags):",
        "if False:",
        TESTS + "test_nothing_in_common_on_any_rank",
    ),
    Mutant(
        "a rank alone calls parameters dropped",
        "return [name for name, holds in zip(seen.listed, held, strict=True) if not holds]",
        "return [name for name in seen.listed if name not in seen.live]",
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
        READER,
    ),
    Mutant(
        "scheduler keys as DCP leaves them",
        "own = typed_like(copy.deepcopy(state), scheduler.state_dict())",
        "own = copy.deepcopy(state)",
        TESTS + "test_schedulers_go_on_and_can_be_saved_again[multi-step]",
        SCHEDULER,
    ),
    Mutant(
        "a scheduler's groups by position",
        "        _order_groups(checkpoint.path, own, mine)\n",
        "",
        SEARCH + "test_groups_in_another_order_below_a_scheduler_are_right_or_refused[lambda]",
        SCHEDULER,
    ),
    Mutant(
        "looking runs the hooks of real steps",
        "inspect.unwrap(type(optimizer).step)",
        "type(optimizer).step",
        TESTS + "test_looking_at_an_optimizer_runs_nobodys_hooks",
        LIVE,
    ),
    Mutant(
        "integer ids of the wrong parameter",
        "for name, number in zip(group, its_ids, strict=True)",
        "for name, number in zip(group, its_ids[::-1], strict=True)",
        POSITIONS + "test_resume_equals_the_uninterrupted_run",
        READER,
    ),
    Mutant(
        "integer ids whatever the number of parameters",
        "        if [len(group) for group in saved] != [len(group) for group in groups]:",
        "        if not saved:",
        POSITIONS + "test_another_number_of_parameters_is_refused",
        READER,
    ),
    Mutant(
        "stages share integer ids",
        "        if by_position:\n            summary = {",
        "        if by_position and not summary:\n            summary = {",
        POSITIONS + "test_ranks_that_hold_other_parameters_in_the_same_place_are_refused",
    ),
    Mutant(
        "chunks without their place in the tensor",
        'self.chunks.append(state.get("offset"))',
        "self.chunks.append(None)",
        "tests/shim/test_checkpoint_metadata.py::test_a_tensor_in_chunks_over_several_files",
        METADATA,
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

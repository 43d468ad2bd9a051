# SPDX-License-Identifier: Apache-2.0
"""The scripts that molt's repository ships: which of them launch what fails in the first backward pass."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.contracts.outcomes import PreconditionError

SETTINGS = "MOLT_MOE_DISPATCHER|EP_SIZE|GRAD_CHECKPOINT"


def settings(script: Path, **environment: str) -> tuple[str, int, str]:
    """Dispatcher, EP size and mode that a script arrives at: its assignments of them are run, and nothing else."""
    text = script.read_text(encoding="utf-8")
    lines = re.findall(rf'^(?:export )?(?:{SETTINGS})="?\$\{{.*$', text, re.MULTILINE)
    given = [re.search(pattern, text) for pattern in (r"--fsdp\.ep_size (\S+)", r"gradient_checkpoint ([^\s)]+)")]
    if None in given:
        raise PreconditionError(f"{script.name} gives no ep_size, or no mode")
    show = 'echo "${MOLT_MOE_DISPATCHER:-hybridep}|"' + '"|"'.join(found[1] for found in given)
    done = subprocess.run(
        ["bash", "-uc", "\n".join([*lines, show])],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    dispatcher, size, mode = done.stdout.strip().split("|")
    return dispatcher, int(size), mode


@pytest.mark.contract("recipes.defaults", meaning="no shipped recipe launches what fails in the first backward pass")
def test_recipes_do_not_default_to_what_fails() -> None:
    scripts = Path(os.environ["CONTRACT_TREE"]) / "examples" / "scripts"
    recipes = sorted(path for path in scripts.rglob("*.sh") if "gradient_checkpoint" in path.read_text("utf-8"))
    if not recipes:
        raise PreconditionError(f"no recipe below {scripts}")
    failing = []
    for recipe in recipes:
        dispatcher, size, mode = settings(recipe)
        if size > 1 and dispatcher == "hybridep" and mode not in ("none", "off", ""):
            failing.append(f"{recipe.parent.name}/{recipe.name}")
        # Where it works it stays on.
        assert settings(recipe, MOLT_MOE_DISPATCHER="torch")[2] == "full"
    assert not failing, f"{len(failing)} of {len(recipes)} recipes fail in the first backward pass: {failing}"

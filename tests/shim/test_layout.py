# SPDX-License-Identifier: Apache-2.0
"""The shim as a package: torch alone is enough, and it holds the very modules that the patches add."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nemo_automodel_shim
from ci import deriving, series
from ci.regress import PATCHES, REPOSITORY, manifest
from nemo_automodel_shim.installing import KNOWN_RELEASES

LOADED = manifest.load(PATCHES)
# What is in git only needs a clone: `python -m ci.series check --git CLONE`.
WITH_WHEEL = [name for name, target in LOADED.targets.items() if target.wheel is not None]
# A derived series may adapt what it adds, as 0.4.0 does, which has no selective checkpointing.
DERIVED = deriving.derived(LOADED)
SHIMMED = [name for name, target in LOADED.targets.items() if target.shim and name not in DERIVED]

IMPORT_ALL = """
import importlib, pkgutil, sys

class Refuse:
    names = {"nemo_automodel", "transformers", "safetensors", "torchao", "megatron_fsdp", "huggingface_hub",
             "pydantic", "rich", "pytest", "yaml", "ci", "tests"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is refused")

sys.meta_path.insert(0, Refuse())
import nemo_automodel_shim
names = [module.name for module in pkgutil.walk_packages(nemo_automodel_shim.__path__, "nemo_automodel_shim.")]
for name in names:
    importlib.import_module(name)
print(len(names), *names)
"""


def test_every_module_imports_with_torch_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    count, *names = done.stdout.split()
    assert int(count) == len(names) >= 10
    for part in ("moe.experts", "models.common.indexer_policy", "checkpoint.sparse_optimizer_state"):
        assert f"nemo_automodel_shim.components.{part}" in names


@pytest.mark.parametrize("name", WITH_WHEEL)
def test_series_is_what_applying_and_exporting_it_gives(name: str, tmp_path: Path) -> None:
    target = LOADED.targets[name]
    assert target.patches
    rebuilt = series.rebuild(target, PATCHES, LOADED.identity, tmp_path, derived=name in DERIVED)
    assert series.difference(target, PATCHES, rebuilt) == []


@pytest.mark.parametrize("name", SHIMMED)
def test_modules_that_a_patch_adds_are_the_shims(name: str) -> None:
    target = LOADED.targets[name]
    added = {path: source for patch in target.patches for path, source in patch.adds.items()}
    assert added
    for path, source in added.items():
        assert path.removeprefix("nemo_automodel/") == source.removeprefix("nemo_automodel_shim/")
        text = "".join((PATCHES / target.series / patch.file).read_text(encoding="utf-8") for patch in target.patches)
        start = text.index(f"+++ b/{path}\n")
        lines = text[start:].split("\ndiff --git ")[0].split("\n-- \n")[0].splitlines()
        body = "".join(line[1:] + "\n" for line in lines if line.startswith("+") and not line.startswith("+++ "))
        assert series.body_of(body) == series.body_of((REPOSITORY / source).read_text(encoding="utf-8"))


def test_known_releases_are_the_pinned_ones() -> None:
    assert LOADED.select(None)[0] in KNOWN_RELEASES
    assert {name: dict(LOADED.targets[name].blobs) for name in KNOWN_RELEASES} == KNOWN_RELEASES


def test_public_surface() -> None:
    assert sorted(nemo_automodel_shim.__all__) == ["UnknownReleaseError", "install", "uninstall"]

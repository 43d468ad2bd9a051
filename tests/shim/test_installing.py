# SPDX-License-Identifier: Apache-2.0
"""``install`` on the real release, in a process of its own; and on a release that it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.regress import PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default target's wheel, unpacked."""
    _, target = manifest.load(PATCHES).select(None)
    tree = tmp_path_factory.mktemp("release")
    fetch.unpack_wheel(fetch.fetch_wheel(target.wheel, WHEEL_CACHE, lambda line: None), tree)
    return tree


def run(code: str, tree: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where ``import nemo_automodel`` finds ``tree``."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def test_install_replaces_and_uninstall_restores(release: Path) -> None:
    done = run(
        """
import nemo_automodel_shim
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
from nemo_automodel.components.models.deepseek_v4 import config, layers, model
from nemo_automodel.components.moe.experts import GroupedExperts
from nemo_automodel.components.utils import model_utils

owners = [Checkpointer, config.DeepseekV4Config, layers.DeepseekV4Indexer, model.DeepseekV4ForCausalLM,
          GroupedExperts, model_utils]
before = [dict(vars(owner)) for owner in owners]
bases = layers.DeepseekV4Indexer.__bases__
assert nemo_automodel_shim.install() == "automodel/v0.5.0"
changed = [set(k for k in vars(o) if vars(o)[k] is not b.get(k)) for o, b in zip(owners, before)]
assert all(changed), changed
assert changed[4] == {"forward"} and changed[0] >= {"save_optimizer", "load_optimizer"}, changed
once = [dict(vars(owner)) for owner in owners]
assert nemo_automodel_shim.install() == "automodel/v0.5.0"
assert layers.DeepseekV4Indexer.__bases__ != bases
assert once == [dict(vars(owner)) for owner in owners], "a second call changed something"
nemo_automodel_shim.uninstall()
assert before == [dict(vars(owner)) for owner in owners]
assert layers.DeepseekV4Indexer.__bases__ == bases
nemo_automodel_shim.uninstall()
print("restored")
""",
        release,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "restored"


def test_unknown_release_is_refused_and_nothing_is_installed(release: Path, tmp_path: Path) -> None:
    tree = tmp_path / "fork"
    fetch.copy_tree(release, tree, manifest.load(PATCHES).select(None)[1], [])
    file = tree / "nemo_automodel" / "components" / "moe" / "experts.py"
    file.write_text(file.read_text(encoding="utf-8") + "\n# a fork's own line\n", encoding="utf-8")
    done = run(
        """
import nemo_automodel_shim
from nemo_automodel.components.moe.experts import GroupedExperts
before = GroupedExperts.forward
try:
    nemo_automodel_shim.install()
except nemo_automodel_shim.UnknownReleaseError as refusal:
    print(refusal)
assert GroupedExperts.forward is before
""",
        tree,
    )
    assert done.returncode == 0, done.stderr
    assert "automodel/v0.5.0: nemo_automodel/components/moe/experts.py" in done.stdout
    assert "Nothing was installed" in done.stdout


def test_absent_package_is_refused(tmp_path: Path) -> None:
    done = run("import nemo_automodel_shim; nemo_automodel_shim.install()", tmp_path)
    assert done.returncode == 1
    assert "UnknownReleaseError: nemo_automodel is not installed here" in done.stderr

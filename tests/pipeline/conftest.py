# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.project import CONTRACT, GUARD, HALF, Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with one contract, red on stock, and no patch yet."""
    made = Project(tmp_path)
    made.declare("gather.gradient", HALF, CONTRACT)
    return made


@pytest.fixture
def cured(project: Project) -> Project:
    """A project with one cured contract and one guard."""
    project.declare("guard.fine", '"green"', GUARD)
    project.cure()
    return project

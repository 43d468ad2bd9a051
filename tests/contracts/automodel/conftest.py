# SPDX-License-Identifier: Apache-2.0
"""With ``$GATHER_IMPOSTORS`` each contract runs once for each impostor that it names, and once (empty) without."""

from __future__ import annotations

import os

import pytest

from tests.contracts.automodel import impostors

if NAMES := os.environ.get(impostors.VARIABLE + "S", ""):

    @pytest.fixture(autouse=True, params=NAMES.split(","), ids="impostor={}.".format)
    def impostor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the ranks of a test put an impostor in place of the gather."""
        monkeypatch.setenv(impostors.VARIABLE, request.param)

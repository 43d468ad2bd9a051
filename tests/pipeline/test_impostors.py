# SPDX-License-Identifier: Apache-2.0
"""A gather that is almost right does not pass the contracts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import impostors


def test_each_impostor_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One degree, at which two EP groups fit into the world.
    monkeypatch.setenv("GATHER_DEGREES", "4")
    record = impostors.run(["gather.hidden-gradient", "gather.shared-gradient"], tmp_path)
    table = impostors.caught(record)
    assert len(impostors.names()) >= 8
    assert impostors.problems(table) == []
    assert {name for name, cell in table["gather.hidden-gradient"].items() if cell != "caught"} == {
        "",
        "sums-in-place",
    }


def test_a_contract_that_catches_nothing_is_told() -> None:
    names = impostors.names()
    table = {"gather.a": dict.fromkeys(["", *names], "-") | {"": "caught", names[0]: "caught", names[1]: "?"}}
    assert impostors.problems(table) == [
        "gather.a is caught without an impostor",
        f"gather.a did not run as it should with {names[1]}",
        *(f"no contract catches {name}" for name in names[1:]),
    ]

# SPDX-License-Identifier: Apache-2.0
"""Several targets in one series.toml: what one takes over from another, what does not apply, what it needs beside."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from ci.regress import inherit, manifest
from ci.regress.errors import ManifestError
from tests.pipeline.project import CONTRACT, GUARD, HALF, Project

ABSENT = """
import pytest
from nemo_automodel.components.not_there import model

@pytest.mark.contract("model.shape", meaning="the model has a shape")
def test_shape():
    assert model.shape
"""
BASE = {
    "default": True,
    "commit": "1" * 40,
    "tag": "v1",
    "series": "p/v1",
    "suite": "contracts",
    "requirements": ["a==1"],
    "blobs": {"x": "2" * 40},
    "patches": [
        {"file": "0001-fix-one.patch", "cures": ["a.one", "a.both"]},
        {"file": "0002-fix-two.patch", "cures": ["a.two", "a.both", "m.gone"]},
    ],
    "contracts": {name: {"stock": {"raises": name}} for name in ("a.one", "a.two", "a.both", "m.gone")},
}


def child(**own: object) -> dict[str, object]:
    """Return what a target like BASE comes to."""
    return inherit.resolve({"base": BASE, "child": {"like": "base", **own}}, "child")


def test_same_release_in_another_environment() -> None:
    found = child(requirements=["b==2"], not_applicable=[{"reason": "no", "contracts": ["m.gone"]}])
    assert (found["commit"], found["series"], found["blobs"]) == (BASE["commit"], "p/v1", BASE["blobs"])
    assert found["requirements"] == ["b==2"]
    assert "default" not in found
    assert [patch["file"] for patch in found["patches"]] == ["0001-fix-one.patch", "0002-fix-two.patch"]
    assert found["patches"][1]["cures"] == ["a.two", "a.both"]


def test_other_release_with_a_series_of_its_own() -> None:
    found = child(
        commit="3" * 40,
        series="p/v2",
        without={"fix-one": "taken"},
        patches=[{"file": "0001-fix-three.patch", "cures": ["a.three"]}],
        contracts={"a.both": {"stock": "green"}, "a.three": {"stock": {"raises": "E"}}},
    )
    assert [patch["file"] for patch in found["patches"]] == ["0001-fix-two.patch", "0002-fix-three.patch"]
    assert found["patches"][0]["cures"] == ["a.two", "m.gone"]
    assert list(found["contracts"]) == ["a.one", "a.two", "a.both", "m.gone", "a.three"]
    assert found["requirements"] == ["a==1"]
    assert "tag" not in found
    assert "blobs" not in found
    assert len(BASE["patches"][1]["cures"]) == 3


def test_a_patch_that_does_something_else_there() -> None:
    revision = {"name": "fix-less", "reason": "half of it is in", "cures": ["a.three", "a.two"]}
    contracts = {"a.two": {"stock": "green"}, "a.three": {"stock": {"raises": "E"}}}
    found = child(commit="3" * 40, series="p/v2", revised={"fix-two": revision}, contracts=contracts)
    assert [patch["file"] for patch in found["patches"]] == ["0001-fix-one.patch", "0002-fix-less.patch"]
    assert (found["patches"][1]["reason"], found["patches"][1]["cures"]) == ("half of it is in", ["a.three"])
    assert "name" not in found["patches"][1]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"like": "no"}, "there is no target 'no'"),
        ({"like": "child"}, "leads back to 'child'"),
        ({"patches": [{"file": "0001-x.patch"}]}, "the series is that of 'base', with its patches"),
    ],
)
def test_refused(own: dict[str, object], said: str) -> None:
    with pytest.raises(inherit.InheritanceError, match=said):
        child(**own)


def second_target(project: Project, text: str) -> Path:
    """Write the project with one more target, and return the patch directory."""
    project.write()
    path = project.root / "patches" / "series.toml"
    path.write_text(path.read_text() + f'[targets."fake/second"]\nlike = "fake/v9"\n{text}\n')
    return path.parent


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('like = "fake/v8"', """targets."fake/second".like: there is no target 'fake/v8'"""),
        ('fallback = "fake/v8"', "fallback: there is no target 'fake/v8'"),
        ('without = { "fix-no" = "gone" }', "without: fake/v9 has no patch fix-no"),
        ('not_applicable = [{ reason = "no", contracts = ["no.no"] }]', "not_applicable[0]: not declared: no.no"),
        ('not_applicable = [{ reason = "no", contracts = [] }]', "not_applicable[0].contracts"),
        ('python = "3.11 or so"', "python: is no range of versions"),
        ('requirements = ["torch 2"]', "requirements[0]: is no requirement"),
        ('tag = "v10"', 'targets."fake/second".series: missing'),
        ('tag = "v10"\nseries = "fake/v10"', """targets."fake/second": needs `wheel` or `commit`"""),
    ],
)
def test_manifest_refuses(cured: Project, text: str, said: str) -> None:
    patches = second_target(cured, text)
    path = patches / "series.toml"
    path.write_text(path.read_text().replace('like = "fake/v9"\nlike', "like"))
    with pytest.raises(ManifestError) as caught:
        manifest.load(patches)
    assert said in str(caught.value)


def test_what_does_not_apply_is_not_even_imported(cured: Project) -> None:
    cured.declare("model.shape", HALF, ABSENT)
    text = 'not_applicable = [{ reason = "this release has no such model", contracts = ["model.shape"] }]'
    second_target(cured, text)
    result = cured.run("--target", "fake/second", written=True)
    assert result.status == 0, result.out + result.err
    assert result.verdict("model.shape") == "not run"
    assert result.verdict("gather.gradient") == "fixed"
    assert "this release has no such model" in result.out
    assert result.report.tests_not_run == 2
    broken = cured.run(written=True)
    assert broken.status == 1
    assert broken.verdict("model.shape") == "broken"


def test_what_does_not_apply_is_left_out_of_a_file_with_others(cured: Project) -> None:
    both = CONTRACT + GUARD.replace("import pytest\nfrom nemo_automodel.components.moe import experts\n", "")
    cured.tests = {"test_both.py": both}
    second_target(cured, 'not_applicable = [{ reason = "no guard here", contracts = ["guard.fine"] }]')
    result = cured.run("--target", "fake/second", written=True)
    assert result.status == 0, result.out + result.err
    assert result.verdict("guard.fine") == "not run"
    alone = cured.run("--target", "fake/second", "--only", "guard.fine", written=True)
    assert alone.status == 2
    assert "nothing to run, none of these applies to fake/second: no guard here" in alone.err


def test_extra_wheel_is_there_for_import(cured: Project) -> None:
    wheel = cured.root / "wheels" / "beside-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("beside/__init__.py", "VALUE = 7\n")
        archive.writestr("beside-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: beside\nVersion: 1.0\n")
        archive.writestr("beside-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("beside-1.0.dist-info/RECORD", "")
        archive.writestr("tests/__init__.py", "raise ImportError('not for import')\n")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    cured.tests["test_beside.py"] = GUARD.replace("guard.fine", "guard.beside").replace(
        "assert experts.fine()",
        "import beside, importlib.metadata as of\n    assert (beside.VALUE, of.version('beside')) == (7, '1.0')",
    )
    cured.contracts["guard.beside"] = '"green"'
    pin = f'distribution = "beside", version = "1.0", filename = "{wheel.name}", sha256 = "{digest}"'
    second_target(cured, f'extra_wheels = [{{ package = "beside", {pin} }}]')
    result = cured.run("--target", "fake/second", written=True)
    assert result.status == 0, result.out + result.err
    assert result.verdict("guard.beside") == "guard"
    assert f"{wheel.name}: fetched, sha256 verified" in result.out
    without = cured.run("--only", "guard.beside", written=True)
    assert without.status == 1


def test_environment_of_another_python_or_version(cured: Project) -> None:
    second_target(cured, 'python = ">=4"\nfallback = "fake/v9"')
    result = cured.run("--target", "fake/second", written=True)
    assert result.status == 2
    assert "fake/second needs Python >=4" in result.err
    assert "this one will do for --target fake/v9" in result.err
    second_target(cured, 'requirements = ["pytest>=1000", "no-such-distribution"]')
    result = cured.run("--target", "fake/second", "--only", "guard.fine", written=True)
    assert result.status == 0, result.out + result.err
    assert any("the target requires pytest>=1000" in warning for warning in result.report.warnings)


def test_commit_in_git_only(cured: Project) -> None:
    cured.write()
    path = cured.root / "patches" / "series.toml"
    text = path.read_text()
    wheel = text[text.index('[targets."fake/v9".wheel]') : text.index('[targets."fake/v9".blobs]')]
    path.write_text(text.replace(wheel, ""))
    result = cured.run(written=True)
    assert result.status == 2
    assert "fake/v9 has no wheel: its commit is in git only" in result.err
    assert "give a clone with --git PATH" in result.err


def test_wheel_whose_commit_is_not_known(cured: Project) -> None:
    cured.write()
    path = cured.root / "patches" / "series.toml"
    path.write_text(path.read_text().replace(f'commit = "{cured.commit}"\n', ""))
    result = cured.run(written=True)
    assert result.status == 0, result.out + result.err
    assert "which stands for" not in result.out
    git = cured.run("--git", str(cured.root), written=True)
    assert git.status == 2
    assert "--git: the commit of fake/v9 is not known" in git.err

# SPDX-License-Identifier: Apache-2.0
"""Find, in the sources of a release, the classes that may be indexers: by their name, and by what they do."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

# A class of this kind is called for by torch, not by a model.
_NOT_A_MODULE = {"Function"}


class _Definition(NamedTuple):
    module: str
    name: str
    is_class: bool
    methods: frozenset[str]  # names called as attributes, whatever of
    functions: frozenset[tuple[str, str]]  # module and name of what is called by name


def find_candidates(package: Path) -> dict[str, str]:
    """Look through the sources below ``components/models`` of a package.

    Args:
        package: Directory of the package ``nemo_automodel``.

    Returns:
        For each class found, as ``model/layers.py::Class``, why: ``name`` where the name says indexer, ``topk`` where
        a method of it takes the top of something, itself or through functions of its own or another module.
    """
    root = package / "components" / "models"
    definitions = []
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if re.search("topk|indexer", text, re.IGNORECASE):
            module = file.relative_to(package.parent).with_suffix("").as_posix().replace("/", ".")
            definitions += _definitions(text, module)
    taking: set[tuple[str, str]] = set()
    while more := {(each.module, each.name) for each in definitions if _takes_top(each, taking)} - taking:
        taking |= more
    prefix = ".".join(root.relative_to(package.parent).parts) + "."
    found = {}
    for each in definitions:
        if each.is_class and ("indexer" in each.name.lower() or (each.module, each.name) in taking):
            key = f"{each.module.removeprefix(prefix).replace('.', '/')}.py::{each.name}"
            found[key] = "name" if "indexer" in each.name.lower() else "topk"
    return found


def _takes_top(each: _Definition, taking: set[tuple[str, str]]) -> bool:
    # A class that merely makes an object of such a class, or calls it, takes nothing itself.
    return "topk" in each.methods or bool(each.functions & {key for key in taking if not key[1][:1].isupper()})


def _definitions(text: str, module: str) -> list[_Definition]:
    tree = ast.parse(text)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    found = []
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        if isinstance(node, ast.ClassDef) and {ast.unparse(base).split(".")[-1] for base in node.bases} & _NOT_A_MODULE:
            continue
        called = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        names = {func.id for func in called if isinstance(func, ast.Name)}
        found.append(
            _Definition(
                module,
                node.name,
                isinstance(node, ast.ClassDef),
                frozenset(func.attr for func in called if isinstance(func, ast.Attribute)),
                frozenset(imported.get(name, (module, name)) for name in names),
            )
        )
    return found

"""The shape of the house: every package is acyclic inside, imports for type checking included."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = (ROOT, ROOT / "integrations")
PACKAGES = ("semgrad_guard", "langchain_semgrad_guard", "llama_index_semgrad_guard")


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name; a package by the name of its folder."""
    found: dict[str, Path] = {}
    for tree in TREES:
        for package in PACKAGES:
            for path in (tree / package).rglob("*.py"):
                found[".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """The modules of ours that a module imports anywhere in its text."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


@cache
def graph_of_imports() -> Mapping[str, frozenset[str]]:
    return {name: frozenset(imports(name)) - {name} for name in MODULES}


def children(package: str) -> dict[str, set[str]]:
    """What each direct child of a package imports of its siblings; a child is a module or a whole folder.

    The package's own `__init__` re-exports names and is no sibling: a module that imports it from inside imports all.
    """
    graph: dict[str, set[str]] = {}
    depth = package.count(".") + 2
    for name, targets in graph_of_imports().items():
        if not name.startswith(f"{package}."):
            continue
        child = ".".join(name.split(".")[:depth])
        inside = {".".join(target.split(".")[:depth]) for target in targets if target.startswith(package)}
        graph.setdefault(child, set()).update(inside - {child})
    return graph


def test_every_package_is_acyclic_inside() -> None:
    for package in (name for name, path in MODULES.items() if path.name == "__init__.py"):
        graph = children(package)
        importing_the_package = [child for child, targets in graph.items() if package in targets]
        if package != "semgrad_guard":
            assert not [c for c in importing_the_package if not c.endswith("__main__")], "import the sibling itself"
        try:
            tuple(TopologicalSorter({child: targets - {package} for child, targets in graph.items()}).static_order())
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))


FRONTS = ("langchain_semgrad_guard", "llama_index_semgrad_guard")
OPEN = (
    "semgrad_guard",
    "semgrad_guard.guard",
    "semgrad_guard.calibration",
    "semgrad_guard.estimators",
    "semgrad_guard.errors",
    "semgrad_guard.lazy",
    "semgrad_guard.named",
    "semgrad_guard.records",
)
"""The documented modules. A front may import their public names."""


def public_names(name: str) -> set[str]:
    """`__all__`, or the names that a package imports as themselves, or those that a module defines."""
    if listed := getattr(import_module(name), "__all__", None):
        return set(listed)
    body = ast.parse(MODULES[name].read_text(encoding="utf-8")).body
    aliases = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {alias.name for alias in aliases if alias.name == alias.asname} or {x for x in defined if x[0] != "_"}


def imports_of_private_names(name: str) -> Iterator[str]:
    """The imports by which a front reaches behind the public names."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "semgrad_guard")
        elif isinstance(node, ast.ImportFrom) and (module := node.module or "").split(".")[0] == "semgrad_guard":
            public = public_names(module) if module in OPEN else ()
            if not module.startswith("semgrad_guard.adapters."):
                yield from (f"{module}.{alias.name}" for alias in node.names if alias.name not in public)


def test_a_front_imports_public_names_only() -> None:
    fronts = [name for name in MODULES if name.split(".")[0] in FRONTS and ".demo" not in name]
    assert {name: private for name in fronts if (private := list(imports_of_private_names(name)))} == {}


def test_adapters_reexport_nothing() -> None:
    tree = ast.parse(MODULES["semgrad_guard.adapters"].read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def test_every_folder_has_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = settings["importlinter"]["contracts"]
    house = next(contract for contract in contracts if contract.get("containers") == ["semgrad_guard"])
    layers = {name.strip() for layer in house["layers"] for name in layer.split("|")}
    assert house["exhaustive"]
    assert layers == {name.split(".")[1] for name in MODULES if name.startswith("semgrad_guard.")}

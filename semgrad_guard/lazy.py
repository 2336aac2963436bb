"""The public names of a package, written once: as imports for type checkers, which load at their first use."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from semgrad_guard.errors import MissingExtraError


def lazy_names(
    package: str, *, extras: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, which calls this at the end of its `__init__`.

    Its public names are those that its source imports as themselves, and those that it assigns::

        if TYPE_CHECKING:
            from package.module import Name as Name
        else:
            __getattr__, __dir__, __all__ = lazy_names(__name__)

    A name must not be that of a module of the package: the module would hide it once it is loaded.

    Args:
        package: the package's `__name__`.
        extras: optional package -> the extra that installs it; a name that needs an absent one raises a
            `MissingExtraError`.
    """
    module = sys.modules[package]
    tree = ast.parse(inspect.getsource(module))
    homes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: str(node.module) for alias in node.names if alias.asname == alias.name}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assigned = [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")]
    names = sorted([*homes, *assigned])

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            absent = str(error.name).partition(".")[0]
            if absent not in (extras or {}):
                raise
            raise MissingExtraError(absent, extra=(extras or {})[absent]) from error
        setattr(module, name, value)
        return value

    return load, names.copy, names

"""What the package exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import semgrad_guard

from .test_structure import MODULES


def test_every_exported_name_exists_and_no_other() -> None:
    for name in semgrad_guard.__all__:
        assert getattr(semgrad_guard, name) is not None
    assert set(dir(semgrad_guard)) == set(semgrad_guard.__all__)
    assert len(semgrad_guard.__all__) <= 26  # the rest is in its modules
    with pytest.raises(AttributeError, match="nonsense"):
        _ = semgrad_guard.nonsense


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, semgrad_guard, semgrad_guard.calibration; print({'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_no_module_has_the_name_of_a_public_name() -> None:
    """A module would take the place of a name that loads at its first use."""
    packages = [import_module(name) for name, path in MODULES.items() if path.name == "__init__.py"]
    listed = [(package, name) for package in packages for name in getattr(package, "__all__", ())]
    assert [(package, name) for package, name in listed if isinstance(getattr(package, name), ModuleType)] == []
    assert {f"{package.__name__}.{name}" for package, name in listed} & MODULES.keys() == set()

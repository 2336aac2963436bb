"""Old module paths work for one release, each with a warning that names the new one."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import semgrad_guard
from semgrad_guard._moved import MOVED, NAMES, TOP


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_is_the_new_module(old: str) -> None:
    new = import_module(f"semgrad_guard.{MOVED[old]}")
    sys.modules.pop(f"semgrad_guard.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"semgrad_guard.{MOVED[old]}"):
        assert import_module(f"semgrad_guard.{old}") is new
    assert new.__spec__ is not None
    assert new.__spec__.name == new.__name__ == f"semgrad_guard.{MOVED[old]}"


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("decision", "Policy"),
        ("decision", "Calibration"),
        ("decision", "combined_promise"),
        ("engine.generation", "GenerationOptions"),
        ("engine.generation", "Generation"),
        ("engine.replay", "Replayer"),
        ("engine.scoring", "Scorer"),
    ],
)
def test_a_name_of_a_module_that_became_a_package_is_found(old: str, name: str) -> None:
    assert old in NAMES
    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(import_module(f"semgrad_guard.{old}"), name).__name__ == name


@pytest.mark.parametrize("name", sorted(TOP))
def test_a_name_that_stood_at_the_top_is_found(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"semgrad_guard.{TOP[name]}.{name}"):
        moved = getattr(semgrad_guard, name)
    assert moved is getattr(import_module(f"semgrad_guard.{TOP[name]}"), name)
    assert name not in semgrad_guard.__all__


def test_what_never_was_there_is_still_missing() -> None:
    with pytest.raises(ImportError):
        import_module("semgrad_guard.decision.nonsense")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = import_module("semgrad_guard.decision").nonsense


def test_the_warning_points_at_the_importing_line() -> None:
    code = "from semgrad_guard.decision.policy import Policy\nfrom semgrad_guard.decision import Calibration\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "<string>:1: DeprecationWarning" in found.stderr
    assert "<string>:2: DeprecationWarning" in found.stderr

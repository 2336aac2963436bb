"""Where things of this user are kept, on every system; without a home the error names the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from semgrad_guard import files as folders
from semgrad_guard.errors import InputError


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("platform", "cache", "state"),
    [
        ("linux", ".cache", ".local/state"),
        ("darwin", "Library/Caches", "Library/Application Support"),
        ("win32", "AppData/Local", "AppData/Local"),
    ],
)
def test_each_system_has_its_folders(
    monkeypatch: pytest.MonkeyPatch, home: Path, platform: str, cache: str, state: str
) -> None:
    monkeypatch.setattr(folders.sys, "platform", platform)
    assert folders.cache_folder(otherwise="") == home / cache / "semgrad-guard"
    assert folders.state_folder(otherwise="") == home / state / "semgrad-guard"


def test_what_the_environment_says_counts(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(folders.sys, "platform", "linux")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert folders.state_folder(otherwise="") == tmp_path / "own" / "semgrad-guard"
    assert folders.cache_folder(otherwise="") == home / ".cache" / "semgrad-guard"
    monkeypatch.setattr(folders.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert folders.state_folder(otherwise="") == tmp_path / "local" / "semgrad-guard"


def test_without_a_home_the_error_says_what_to_name(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(folders.sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(InputError, match=r"no home folder .*\. Name one\."):
        folders.cache_folder(otherwise="Name one.")

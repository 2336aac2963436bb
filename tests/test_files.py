"""Files are written whole or not at all, where a regular file can be; and each system has its folders for a user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from semgrad_guard import files
from semgrad_guard.errors import InputError
from semgrad_guard.files import atomic_write, make_private, take_back


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def half(beside: Path) -> None:
        beside.write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(target, half)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    atomic_write(target, lambda beside: beside.write_text("new"))
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_text_bytes_and_what_a_function_makes(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    assert atomic_write(target, "ä\n") == target
    assert target.read_bytes() == "ä\n".encode()
    atomic_write(target, b"bytes")
    assert target.read_bytes() == b"bytes"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(os.name != "posix", reason="devices and pipes with names are POSIX's")
def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A device must not be replaced by a file, and a pipe without a reader would wait for ever."""
    pipe, link, folder = tmp_path / "pipe", tmp_path / "link", tmp_path / "folder"
    os.mkfifo(pipe)
    link.symlink_to(os.devnull)
    folder.mkdir()
    before = sorted(tmp_path.iterdir())
    for path in (pipe, link, folder, Path(os.devnull), tmp_path / "none" / "a", folder / "..", Path()):
        with pytest.raises(InputError, match=r"Cannot write .*Choose a path"):
            atomic_write(path, "text")
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    atomic_write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.skipif(os.name != "posix", reason="rights of groups and others")
def test_a_file_with_answers_is_its_owners_alone(tmp_path: Path) -> None:
    new, known = tmp_path / "new", tmp_path / "known"
    known.write_text("answers")
    known.chmod(0o664)
    for path in (new, known):
        make_private(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert known.read_text() == "answers"
    rights = Path(os.devnull).stat().st_mode
    take_back(Path(os.devnull))
    assert Path(os.devnull).stat().st_mode == rights


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
    monkeypatch.setattr(files.sys, "platform", platform)
    assert files.cache_folder(otherwise="") == home / cache / "semgrad-guard"
    assert files.state_folder(otherwise="") == home / state / "semgrad-guard"


def test_what_the_environment_says_counts(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(files.sys, "platform", "linux")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert files.state_folder(otherwise="") == tmp_path / "own" / "semgrad-guard"
    assert files.cache_folder(otherwise="") == home / ".cache" / "semgrad-guard"
    monkeypatch.setattr(files.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert files.state_folder(otherwise="") == tmp_path / "local" / "semgrad-guard"


def test_without_a_home_the_error_says_what_to_name(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(files.sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(InputError, match=r"no home folder .*\. Name one\."):
        files.cache_folder(otherwise="Name one.")

"""Files are written whole or not at all, and only where a regular file can be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

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

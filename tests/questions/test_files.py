"""Output files: tried before any work, and whole or absent afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from semgrad_guard.errors import InputError
from semgrad_guard.questions.data_files import require_writable


def test_a_writable_place_stays_as_it_was(tmp_path: Path) -> None:
    require_writable(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old.json").write_text("old")
    require_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x.json", tmp_path / "missing" / "x.json", tmp_path, Path("/proc/x.json")):
        with pytest.raises(InputError, match=r"Cannot write .*Choose a path in an existing folder"):
            require_writable(path)

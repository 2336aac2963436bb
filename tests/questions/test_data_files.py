"""Data as people have it, in `files/`: each with what is read of it, or what is refused, in an `.expected.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard.errors import DataFileError, InputError
from semgrad_guard.files import require_writable
from semgrad_guard.questions.data import read_questions

FOLDER = Path(__file__).parent / "files"
FILES = sorted(path for path in FOLDER.iterdir() if not path.name.endswith(".expected.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_read_as_expected_or_refused_in_words(path: Path) -> None:
    expected: dict[str, Any] = json.loads(path.with_name(f"{path.name}.expected.json").read_text())
    columns = expected.get("columns", {})
    if refused := expected.get("refused"):
        with pytest.raises(DataFileError) as error:
            read_questions(path, columns=columns)
        assert [words for words in refused if words not in str(error.value)] == []
        return
    found = read_questions(path, columns=columns)
    rows = [row.model_dump(mode="json", include={"question", "answers", "context"}) for row in found.rows]
    assert rows == [{"context": None, **wanted} for wanted in expected["rows"]]
    assert list(found.unread) == expected["unread"]
    problems = "\n".join(map(str, found.problems))
    assert [words for words in expected.get("problems", ()) if words not in problems] == []
    assert bool(problems) == ("problems" in expected), problems
    assert [words for words in expected.get("duplicates", ()) if words not in "\n".join(found.duplicates)] == []


def test_every_expectation_has_its_file() -> None:
    assert len(FILES) > 120
    assert {path.name for path in FOLDER.glob("*.expected.json")} == {f"{path.name}.expected.json" for path in FILES}


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

"""The sheet for people: written, filled in by a spreadsheet program, and read back."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard.errors import DataFileError, GradingError
from semgrad_guard.grading.sheets import (
    HUMAN,
    SheetAnswer,
    doubt,
    extend_sheet,
    labels_for,
    read_grades,
    read_sheet,
    some_of,
    write_sheet,
)
from tests.made_answers import made as answered


def made(i: int, *given: Any, **more: Any) -> SheetAnswer:
    return SheetAnswer.of(answered(i, *given, **more))


ANSWERS = [
    made(0, "Paris", ("Paris", "City of Light")),
    made(1, "=1+2; „Köln“,\nreally"),
    made(2, "-5\0"),
    made(3, text=None),
]
Rows = list[list[str]]


def filled(
    folder: Path, change: Callable[[Rows], object], *, delimiter: str = ",", end: str = "\n", mark: str = ""
) -> Path:
    """The sheet, changed and saved again as some program saves it."""
    path = write_sheet(folder / "labels.csv", ANSWERS)
    rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")))
    change(rows)
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows(rows)
    path.write_bytes((mark + text.getvalue()).encode())
    return path


def label(*words: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        for row, word in zip(rows[1:], words, strict=True):
            row[5] = word

    return change


def test_the_sheet_is_what_a_person_needs(tmp_path: Path) -> None:
    path = write_sheet(tmp_path / "labels.csv", ANSWERS)
    content = path.read_bytes()
    assert content.startswith(b"\xef\xbb\xbfkey,question,passage,references,answer,correct\r\n")
    _, *rows = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""))
    assert [row[1] for row in rows] == ["question 0", "question 1", "question 2"]
    assert rows[0][3] == "Paris\nCity of Light"
    assert [row[4] for row in rows] == ["Paris", "'=1+2; „Köln“,\nreally", "'-5\ufffd"]  # no formula, no null byte
    assert all(row[5] == "" for row in rows)
    assert read_sheet(path, ANSWERS) == [None] * 4


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize(
    "words", [("TRUE", "FALSE", "true"), ("yes", "no", "Y"), ("1", "0", "x"), ("WAHR", "FALSCH", " 1 ")]
)
def test_labels_come_back_however_they_are_saved(tmp_path: Path, delimiter: str, words: tuple[str, ...]) -> None:
    for end, mark in (("\r\n", "\ufeff"), ("\n", "")):
        path = filled(tmp_path, label(*words), delimiter=delimiter, end=end, mark=mark)
        assert read_sheet(path, ANSWERS) == [True, False, True, None]


def test_rows_may_be_sorted_and_left_out_and_columns_moved(tmp_path: Path) -> None:
    def change(rows: Rows) -> None:
        label("1", "", "0")(rows)
        _, *rest = rows
        rows[:] = [[row[5], "note", row[0]] for row in (["key", "", "", "", "", "Correct "], *reversed(rest))]
        rows[0] = ["Correct ", "note", "Key"]

    assert read_sheet(filled(tmp_path, change), ANSWERS) == [True, None, False, None]


def test_an_apostrophe_that_a_program_ate_does_no_harm(tmp_path: Path) -> None:
    def change(rows: Rows) -> None:
        label("1", "1", "1")(rows)
        for row in rows:
            row[4] = row[4].lstrip("'").replace("\n", "\r\n")

    assert read_sheet(filled(tmp_path, change), ANSWERS) == [True, True, True, None]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            label("1", "maybe", "?"),
            "row 3 has 'maybe' under correct; write TRUE or FALSE, yes or no, 1 or 0, or abstained; row 4 has '\\?'",
        ),
        (lambda rows: rows[1].__setitem__(4, "London"), "row 2 holds another answer than this run gave"),
        (
            lambda rows: rows[2].__setitem__(0, "0" * 16),
            "row 3 has the key '0000000000000000', which this run does not",
        ),
        (lambda rows: rows.extend([[*rows[1][:5], "1"], [*rows[1][:5], "0"]]), "row 6 contradicts an earlier row"),
        (lambda rows: rows[0].__setitem__(5, "right"), "has no column 'correct'; keep those of the sheet: key"),
        (lambda rows: rows[1].append("1"), "row 2 has more cells than there are columns"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, change: Callable[[Rows], object], reason: str) -> None:
    with pytest.raises(GradingError, match=reason):
        read_sheet(filled(tmp_path, change), ANSWERS)


def test_a_label_said_twice_is_one(tmp_path: Path) -> None:
    path = filled(
        tmp_path, lambda rows: (label("1", "0", "")(rows), rows.append(rows[1]), rows.append([*rows[2][:5], ""]))
    )
    assert read_sheet(path, ANSWERS) == [True, False, None, None]


def test_a_sheet_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="No such file"):
        read_sheet(tmp_path / "none.csv", ANSWERS)
    (tmp_path / "sheet.csv").write_bytes("key,correct\nä,1\n".encode("cp1252"))
    with pytest.raises(DataFileError, match="CSV UTF-8"):
        read_sheet(tmp_path / "sheet.csv", ANSWERS)


@pytest.mark.parametrize(("delimiter", "end"), [(",", "\n"), (";", "\r\n"), ("\t", "\n")])
def test_a_sheet_is_extended_and_what_is_in_it_stays(tmp_path: Path, delimiter: str, end: str) -> None:
    def change(rows: Rows) -> None:
        label("yes", "no", "")(rows)
        for row in rows:
            row.insert(1, "remark" if row is rows[0] else "mine")

    path = filled(tmp_path, change, delimiter=delimiter, end=end, mark="\ufeff")
    before = path.read_bytes()
    more = [*ANSWERS, made(7, "=new; text"), made(8, text=None)]
    assert extend_sheet(path, more) == 1
    assert path.read_bytes().startswith(before)
    assert read_sheet(path, more) == [True, False, None, None, None, None]
    assert extend_sheet(path, more) == 0
    rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), delimiter=delimiter))
    assert rows[-1] == [made(7).key, "", "question 7", "", "Paris", "'=new; text", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]


def test_a_sheet_without_an_end_of_line_is_extended_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(f"key,correct\n{ANSWERS[0].key},yes")
    assert extend_sheet(path, ANSWERS) == 2
    assert read_sheet(path, ANSWERS) == [True, None, None, None]


def test_a_sheet_in_utf16_is_extended_in_utf16(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes(f"\ufeffsep=;\r\nkey;correct\r\n{ANSWERS[0].key};yes\r\n".encode("utf-16-le"))
    assert extend_sheet(path, ANSWERS) == 2
    assert read_sheet(path, ANSWERS) == [True, None, None, None]


def test_a_sheet_is_begun_and_asked_to_be_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    with pytest.raises(GradingError, match="4 rows and no label yet: fill in the column 'correct'"):
        labels_for(path, ANSWERS)
    assert path.read_bytes() == write_sheet(tmp_path / "other.csv", ANSWERS).read_bytes()


def test_rows_of_the_runs_other_answers_are_passed_over(tmp_path: Path) -> None:
    path = filled(tmp_path, label("yes", "no", "1"))
    others = [answer.key for answer in ANSWERS]
    assert labels_for(path, ANSWERS[:1], others=others) == [True]
    with pytest.raises(GradingError, match="which this run does not"):
        labels_for(path, ANSWERS[:1])


def test_a_table_without_keys_is_no_sheet(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("name,correct\nx,yes\n")
    with pytest.raises(GradingError, match="no column 'key'"):
        extend_sheet(path, ANSWERS)
    assert path.read_text() == "name,correct\nx,yes\n"
    path.write_text("key,correct\nx\ny,no,\n")
    assert read_grades(path) == ([("y", False)], [])


@pytest.mark.parametrize(("right", "wrong"), [(100, 0), (99, 1), (50, 50), (2, 200), (0, 11), (2, 2), (0, 0)])
def test_ten_in_order_with_both_grades(right: int, wrong: int) -> None:
    grades = [True] * right + [False] * wrong
    some = some_of(grades)
    assert len(some) == min(10, right + wrong)
    assert some == sorted(set(some)) == some_of(grades)
    assert sum(grades[place] is True for place in some) >= min(5, right)
    assert sum(grades[place] is False for place in some) >= min(5, wrong)


@pytest.mark.parametrize(
    ("right", "n", "warning"),
    [(4, 100, "less than 5 %"), (5, 100, None), (95, 100, None), (96, 100, "more than 95 %"), (0, 0, None)],
)
def test_a_share_that_can_hardly_be_is_doubted(right: int, n: int, warning: str | None) -> None:
    found = doubt([True] * right + [False] * (n - right), "exact-match")
    assert (found is None) if warning is None else (found is not None and warning in found and "exact-match" in found)


@pytest.mark.parametrize("right", [0, 100])
def test_people_who_graded_are_not_told_to_grade(right: int) -> None:
    found = doubt([True] * right + [False] * (100 - right), HUMAN)
    assert found is not None
    assert "column 'correct'" in found
    assert "grader" not in found


def test_a_line_is_short_and_one() -> None:
    line = SheetAnswer("k", "q", ("Paris",), "a\nb " * 200).graded(False)
    assert line.startswith("  wrong: q [Paris] a b")
    assert "\n" not in line
    assert len(line) < 200
    assert "(no text)" in SheetAnswer("k", "q", (), None).graded(None)

"""Question files: what is read, what is left out and named, and what is refused; columns by their names."""

from __future__ import annotations

import json
import sys
from datetime import datetime, time
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard.errors import DataFileError, InputError, MissingExtraError
from semgrad_guard.questions.data import NO_PASSAGE, Question, QuestionFile, read_questions, wordings

GOOD = '{"question": "Who wrote Emma?", "answers": ["Jane Austen"]}'
OTHER = '{"question": "Who wrote Persuasion?", "answers": ["Jane Austen"]}'


def file(folder: Path, *lines: str, ending: str = "\n") -> Path:
    path = folder / "questions.jsonl"
    path.write_bytes(ending.join(lines).encode())
    return path


def problem(folder: Path, line: str, **options: str) -> str:
    found = read_questions(file(folder, GOOD.replace("}", ', "response": "r"}'), line), **options)  # type: ignore[arg-type]
    assert len(found.rows) == 1
    assert len(found.problems) == 1
    return str(found.problems[0])


def test_every_field_is_read(tmp_path: Path) -> None:
    line = {
        "question": "q", "answers": ["a", "b"], "paraphrases": ["p"], "context": "c", "response": "r", "id": 7,
        "domain": "left alone",
    }  # fmt: skip
    found = read_questions(file(tmp_path, json.dumps(line)))
    assert found.rows == (
        Question(question="q", answers=("a", "b"), paraphrases=("p",), context="c", response="r", id="7"),
    )
    assert found.problems == found.duplicates == ()


def test_responses_are_needed_to_score(tmp_path: Path) -> None:
    assert "has no response to score" in problem(tmp_path, OTHER, needs="response")
    assert "has no response to score" in problem(tmp_path, OTHER.replace("}", ', "response": " "}'), needs="response")


def test_strict_stops_at_the_first_broken_line(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="line 2 is not valid JSON"):
        read_questions(file(tmp_path, GOOD, "broken", OTHER), strict=True)


def test_two_responses_to_one_question_are_two_rows_to_score(tmp_path: Path) -> None:
    lines = [GOOD.replace("}", f', "response": "{text}"}}') for text in ("a", "b", "a")]
    found = read_questions(file(tmp_path, *lines), needs="response")
    assert [row.response for row in found.rows] == ["a", "b"]
    assert len(found.duplicates) == 1


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="No such file"):
        read_questions(tmp_path / "missing.jsonl")
    with pytest.raises(DataFileError, match="a folder without a data file"):
        read_questions(tmp_path)


def test_a_workbook_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "questions.xlsx").touch()
    with pytest.raises(MissingExtraError, match=r"semgrad-guard\[excel\]"):
        read_questions(tmp_path / "questions.xlsx")


def test_a_workbook_is_read_as_its_table(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    cells = {"7": 7.0, "5%": 0.05, "00501": 501, "Paris": "Paris_x000D_", None: True}
    never = {"When?": datetime(1923, 5, 1), "At what time?": time(10, 30), "Which error?": "#SPILL!", "Hidden?": "Lyon"}
    for row in [("Question", "Answer"), *cells.items(), (None, None), *never.items()]:
        book.active.append(row)
    book.active["B3"].number_format, book.active["B4"].number_format = "0%", "00000"
    book.active.row_dimensions[11].hidden = True
    book.create_sheet("empty")
    book.save(path := tmp_path / "q.xlsx")
    found = read_questions(path)
    assert [row.answers for row in found.rows] == [(row.question,) for row in found.rows]
    wrong = ("row 6", "row 8", "row 9", "row 10", "row 11 is hidden")
    assert all(part in str(problem) for part, problem in zip(wrong, found.problems, strict=True))
    book["empty"].append(("Question", "Answer"))
    book.save(path)
    with pytest.raises(DataFileError, match="has the sheets Sheet, empty"):
        read_questions(path)


def test_a_parquet_file_is_read_as_its_rows(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    answers = [pyarrow.array([0.1, 2.5], pyarrow.float32()), pyarrow.array(["Paris", "Rome"]).dictionary_encode()]
    for column, texts in zip(answers, (("0.1", "2.5"), ("Paris", "Rome")), strict=True):
        parquet.write_table(pyarrow.table({"question": ["a?", "b?"], "answer": column}), path := tmp_path / "q.parquet")
        assert tuple(row.answers[0] for row in read_questions(path).rows) == texts
    twice = pyarrow.Table.from_arrays(answers[:1] * 2, names=["answer", "Answer"])
    parquet.write_table(twice, path)
    with pytest.raises(DataFileError, match="has the column 'answer' twice"):
        read_questions(path)


def test_the_key_is_the_question_and_its_context() -> None:
    plain = Question(question="What is it?")
    assert plain.key == Question(question=" What  is\nit? ", answers=("x",), id="1").key
    assert plain.key != Question(question="What is it?", context="").key
    assert Question(question="a b", context="c").key != Question(question="a", context="b c").key


def test_other_paraphrases_of_a_question_are_not_lost_silently(tmp_path: Path) -> None:
    lines = [json.dumps({"question": "Who?", "paraphrases": [text]}) for text in ("Which?", "What?")]
    found = read_questions(file(tmp_path, *lines), needs="question")
    assert "with other paraphrases" in str(found.problems[0])


@pytest.mark.parametrize("name", NO_PASSAGE)
def test_a_field_that_means_something_else_is_no_passage(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is not a passage to answer from"):
        read_questions(file(tmp_path, GOOD), columns={"context": name})


def test_wordings_of_one_fact_are_close_and_questions_of_a_template_are_not() -> None:
    pairs = [
        ("What is the capital of France?", "Paris"),
        ("Which city is the capital of France?", "Paris"),
        ("What is the capital of Spain?", "Madrid"),
        ("what is the Capital of France", "Lutetia"),
        ("Who wrote Emma?", "Jane Austen"),
        ("Who wrote Persuasion?", "Jane Austen"),
        *((f"What is item {i}?", "seven") for i in range(60)),
    ]
    rows = [Question(question=text, answers=(answer,)) for text, answer in pairs]
    assert wordings(rows) == [0, 0, 2, 0, *range(4, 66)]
    passages = [Question(question="Who built it?", answers=("Ada",), context=text) for text in ("One.", "Two.")]
    assert wordings(passages) == [0, 1]
    assert wordings([]) == []
    assert wordings([*rows[2:4], *rows[2:3] * 100]) == [0, 1, *[0] * 100]


Q = "Where?"


def read(folder: Path, content: object, name: str = "q.jsonl", **options: Any) -> QuestionFile:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_questions(path, **options)


def test_the_answer_beside_a_ground_truth_is_what_is_scored(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"question": Q, "answer": "m", "ground_truth": "a"}, needs="response").rows
    assert (row.response, row.answers) == ("m", ())


def test_columns_can_be_named(tmp_path: Path) -> None:
    record = {"Frage": Q, "gold": "a", "answer": "m", "support": ["p"], "question": "other"}
    found = read(tmp_path, record, columns={"question": "frage", "answers": "gold", "context": "support"})
    assert found.rows == (Question(question=Q, answers=("a",), context="p", response="m"),)
    assert found.unread == ("answer", "question")
    with pytest.raises(DataFileError, match='has no "golden"; its columns are "Frage", "gold", "answer"'):
        read(tmp_path, record, columns={"answers": "golden"})


@pytest.mark.parametrize("column", ["ground_truth", "Reference", "expectedOutput", "golden_answers"])
def test_a_models_answer_is_no_reference_where_the_reference_is_missing(tmp_path: Path, column: str) -> None:
    found = read(tmp_path, f"question,answer,{column}\nWho?,m,a\n{Q},m,\nWhen?,m,  \n", "q.csv")
    assert [row.answers for row in found.rows] == [("a",)]
    assert ["no reference answer" in str(problem) for problem in found.problems] == [True, True]
    (row,) = read(tmp_path, f"question,answer,{column}\n{Q},m,\n", "q.csv", needs="response").rows
    assert row.response == "m"
    lines = [{"question": "Who?", "answer": "m", column: "a"}, {"question": Q, "answer": "m"}]
    for both in (lines, lines[::-1]):
        with pytest.raises(DataFileError, match="has a model's answer, next to the reference"):
            read(tmp_path, "\n".join(map(json.dumps, both)))

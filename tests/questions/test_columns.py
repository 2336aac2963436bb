"""Columns by their names, never guessed where another fits better; `files/` has those of well-known data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard.errors import DataFileError
from semgrad_guard.questions.data import Question, QuestionFile, read_questions

Q = "Where?"


def read(folder: Path, content: object, name: str = "q.jsonl", **options: Any) -> QuestionFile:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_questions(path, **options)


def test_passages_that_deepeval_joined(tmp_path: Path) -> None:
    for name, context in (("expected_output", "p\n\nr"), ("answer", "p|r")):
        (row,) = read(tmp_path, f"input,{name},context\n{Q},a,p|r\n", "q.csv").rows
        assert row.context == context


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

"""Grading after the run: kept, taken up again, and done anew where answer or references changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from semgrad_guard.errors import InputError
from semgrad_guard.grading import AnswerToGrade, Contains, ExactMatch
from semgrad_guard.grading.by_name import require_kind, right_means
from semgrad_guard.grading.grader import SecondOpinion, Verdicts
from semgrad_guard.grading.sheets import GradeRow, SheetAnswer, grade, with_references
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.run_record import JobRecord
from tests.made_answers import made

RUN = [made(i, text="right" if i % 3 else "wrong") for i in range(70)]
ANSWERS = [SheetAnswer.of(answer).to_grade for answer in RUN]
RIGHT = [bool(i % 3) for i in range(70)]


class Stopped(BaseException):
    """Like Ctrl-C."""


class Counting:
    """A costly grader that remembers what it was asked."""

    name = "counting"

    def __init__(self, *, stop_after: int = 10**6, none: Sequence[str] = ()) -> None:
        self.asked: list[AnswerToGrade] = []
        self._stop_after, self._none = stop_after, none

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        if len(self.asked) + len(answers) > self._stop_after:
            raise Stopped
        self.asked += answers
        return [None if answer.question in self._none else answer.text == "right" for answer in answers]


def test_grades_are_kept_and_a_stopped_grading_goes_on(tmp_path: Path) -> None:
    path, seen = tmp_path / "grades.jsonl", []
    first = Counting(stop_after=64)
    with pytest.raises(Stopped):
        grade(ANSWERS, first, path)
    second = Counting()
    assert grade(ANSWERS, second, path, on_progress=lambda *at: seen.append(at)) == RIGHT
    assert (len(first.asked), len(second.asked), seen) == (64, 6, [(64, 70), (70, 70)])
    third = Counting()
    assert grade(ANSWERS, third, path) == RIGHT
    assert third.asked == []


@pytest.mark.parametrize("lost", [1, 30, 100, 300])
def test_a_half_written_grade_is_given_again(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "grades.jsonl"
    grade(ANSWERS[:5], Counting(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    assert grade(ANSWERS[:5], Counting(), path) == RIGHT[:5]
    assert path.read_bytes() == whole


def test_a_broken_book_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grades.jsonl"
    for line in ('{"grader": "x"}', '{"grader": "x", "answer": "y", "correct": 1}', "nonsense", "[]"):
        path.write_text(f'{{"semgrad_guard_record": "grades", "settings": {{}}}}\n{line}\n')
        with pytest.raises(InputError, match=r"line 2 is not a line of grades.*Delete the line"):
            grade(ANSWERS[:1], Counting(), path)


def test_two_gradings_do_not_write_one_record(tmp_path: Path) -> None:
    path = tmp_path / "grades.jsonl"
    with JobRecord(path, {}, GradeRow, kind="grades"), pytest.raises(InputError, match="Another run is writing"):
        grade(ANSWERS[:1], Counting(), path)
    assert grade(ANSWERS[:1], Counting(), path) == RIGHT[:1]


def test_no_verdict_is_asked_for_again(tmp_path: Path) -> None:
    book = tmp_path / "grades.jsonl"
    found = grade(ANSWERS[:4], Counting(none=["question 2"]), book)
    assert found == [False, True, None, False]
    again = Counting()
    assert grade(ANSWERS[:4], again, book) == RIGHT[:4]
    assert [answer.question for answer in again.asked] == ["question 2"]


def test_changed_references_are_graded_anew(tmp_path: Path) -> None:
    book = tmp_path / "grades.jsonl"
    grade(ANSWERS[:3], Counting(), book)
    mended = with_references(RUN[:3], [Question(question="question 1", answers=("new",), kind="other")])
    assert [answer.references for answer in mended] == [("Paris",), ("new",), ("Paris",)]
    assert mended[1].kind == "other"
    again = Counting()
    grade([SheetAnswer.of(answer).to_grade for answer in mended], again, book)
    assert [answer.references for answer in again.asked] == [("new",)]


def test_what_says_nothing_is_wrong_without_asking() -> None:
    grader = Counting()
    items = [SheetAnswer.of(made(i, text=text)).to_grade for i, text in enumerate((None, " \n", "right"))]
    assert grade(items, grader) == [False, False, True]
    assert len(grader.asked) == 1


def test_words_are_graded_anew_every_time(tmp_path: Path) -> None:
    book = tmp_path / "grades.jsonl"
    items = [AnswerToGrade("Which city?", text, ("Paris",)) for text in ("Paris", "Rome")]
    assert grade(items, ExactMatch(), book) == [True, False]
    assert not book.exists()


def test_a_second_opinion_decides_where_there_is_no_verdict(tmp_path: Path) -> None:
    book = tmp_path / "grades.jsonl"
    texts = ["It is Paris.", "It is Lyon.", "Paris or Lyon.", "I don't know.", "Perhaps Paris."]
    items = [AnswerToGrade("Which city?", text, ("Paris",)) for text in texts]
    judge = Counting(none=["Which city?"])
    both = SecondOpinion(Contains(), judge)
    assert both.grade(items) == grade(items, both, book) == [True, False, None, "abstained", None]
    assert [answer.text for answer in judge.asked] == ["Paris or Lyon.", "Perhaps Paris."] * 2
    once, again = Counting(), Counting()
    for judge in (once, again):
        assert grade(items, SecondOpinion(Contains(), judge), book) == [True, False, False, "abstained", False]
    assert (len(once.asked), len(again.asked), both.name) == (2, 0, "contains@3+counting")


def test_a_sentence_that_names_no_reference_has_no_verdict_by_contains(tmp_path: Path) -> None:
    """It may tell another fact; the second opinion then knows it for a sentence, with the passage."""
    judge = Counting()
    texts = ["The capital is Paris.", "The capital is not Paris.", "It lies in Europe."]
    items = [AnswerToGrade("What is the capital?", text, ("Paris",), sentence=True, passage="p") for text in texts]
    assert Contains().grade(items) == [True, False, None]
    assert grade(items, SecondOpinion(Contains(), judge), tmp_path / "grades.jsonl") == [True, False, False]
    assert judge.asked == items[2:]
    grade([replace(one, sentence=False, passage=None) for one in items], judge, tmp_path / "grades.jsonl")
    assert len(judge.asked) == 4  # a whole answer of the same text has a verdict of its own


def test_names_of_a_second_opinion() -> None:
    assert require_kind("contains+judge=openai:gpt") == "contains+judge=openai:gpt"
    for wrong in ("contains+exact-match", "exact-match+judge=x", "contains+", "contains+contains"):
        with pytest.raises(InputError, match="there is no grader"):
            require_kind(wrong)
    assert right_means("contains@3+judge(fake)") == right_means("contains@3") is not None

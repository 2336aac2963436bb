"""The answer alone is graded: a thought names right answers and doubts them, and proves nothing about the reply."""

from __future__ import annotations

import pytest

from semgrad_guard.grading import Contains
from semgrad_guard.grading.grader import AnswerToGrade
from semgrad_guard.grading.sheets import grade_texts
from tests.engine.test_reasoning import read
from tests.thoughts import GRADED


@pytest.mark.parametrize(("written", "reference", "right"), GRADED)
def test_the_answer_behind_a_thought_is_graded(written: str, reference: str, right: bool) -> None:
    text = read("qwen3", written, cut="</think>" not in written)[0].text
    assert (grade_texts([AnswerToGrade("What is it?", text, (reference,))], Contains())[0] is True) is right


def test_whole_texts_would_be_misgraded() -> None:
    items = [AnswerToGrade("What is it?", written, (reference,)) for written, reference, _ in GRADED]
    wrong = [found != right for found, (*_, right) in zip(grade_texts(items, Contains()), GRADED, strict=True)]
    assert sum(wrong) >= 8

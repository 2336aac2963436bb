"""The answer alone is graded: a thought names right answers and doubts them, and proves nothing about the reply."""

from __future__ import annotations

import pytest

from semgrad_guard.evaluation.graders import Contains
from semgrad_guard.evaluation.graders.base import AnswerToGrade
from semgrad_guard.evaluation.graders.grading import grade_texts
from tests.engine.test_reasoning import read

ANSWERS: tuple[tuple[str, str, bool], ...] = (
    # what a thinking model wrote, the reference, and whether its answer is right
    ("<think>\nThe capital of Italy is Rome, Milan is bigger in business.\n</think>\n\nMilan.", "Rome", False),
    (
        "<think>\nIs it Paris? Lyon was a capital of Gaul. I go with Lyon.\n</think>\n\nThe capital is Lyon.",
        "Paris",
        False,
    ),
    (
        "<think>\nCervantes wrote it. No, the user wants the translator.\n</think>\n\nEdith Grossman.",
        "Cervantes",
        False,
    ),
    ("<think>\n1969, or 1968? Apollo 8 was 1968.\n</think>\n\nIt was in 1968.", "1969", False),
    ("<think>\nMercury is the closest to the sun. The hottest is asked.\n</think>\n\nVenus", "Mercury", False),
    ("<think>\nThe answer may be Marie Curie. I am not sure at all.\n</think>\n\nI do not know.", "Marie Curie", False),
    ("<think>\nThe user asks for the author of Emma. That is Jane Austen, who", "Jane Austen", False),
    ("<think>\nOkay, the capital of Australia. Many say Sydney, it is Canberra", "Canberra", False),
    ("<think>\nIt is not Sydney. It is not Melbourne either.\n</think>\n\nCanberra", "Canberra", True),
    ("<think>\nIt cannot be Oslo, I think. Wait: it is not Bergen.\n</think>\n\nOslo.", "Oslo", True),
    ("<think>\nSeven or eight? There is no eighth colour.\n</think>\n\nSeven", "seven", True),
    ("<think>\nI doubt that it is Lima. Cusco was the Inca capital.\n</think>\n\nThe capital is Lima.", "Lima", True),
    ("<think>\nNobody knows whether Shakespeare wrote it.\n</think>\n\nWilliam Shakespeare", "Shakespeare", True),
    ("<think>\n\n</think>\n\nTokyo", "Tokyo", True),
)


@pytest.mark.parametrize(("written", "reference", "right"), ANSWERS)
def test_the_answer_behind_a_thought_is_graded(written: str, reference: str, right: bool) -> None:
    text = read("qwen3", written, cut="</think>" not in written)[0].text
    assert grade_texts([AnswerToGrade("What is it?", text, (reference,))], Contains()) == [right]


def test_whole_texts_would_be_misgraded() -> None:
    items = [AnswerToGrade("What is it?", written, (reference,)) for written, reference, _ in ANSWERS]
    wrong = [found != right for found, (*_, right) in zip(grade_texts(items, Contains()), ANSWERS, strict=True)]
    assert sum(wrong) >= 8

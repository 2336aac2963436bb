"""A look at graded answers: ten of them, of both grades, and a word where the grades are in doubt."""

from __future__ import annotations

import pytest

from semgrad_guard.grading.sheets import HUMAN, GradedAnswer, doubt, some_of


def graded(right: int, wrong: int) -> list[GradedAnswer]:
    grades = [True] * right + [False] * wrong
    return [GradedAnswer(f"q {i}", f"text {i}", ("one", "two"), grade) for i, grade in enumerate(grades)]


@pytest.mark.parametrize(("right", "wrong"), [(100, 0), (99, 1), (50, 50), (2, 200), (0, 11)])
def test_ten_in_order_with_both_grades(right: int, wrong: int) -> None:
    answers = graded(right, wrong)
    some = some_of(answers)
    assert len(some) == len(set(some)) == 10
    assert [answers.index(answer) for answer in some] == sorted(answers.index(answer) for answer in some)
    assert some == some_of(answers)
    assert sum(answer.correct for answer in some) >= min(5, right)
    assert sum(not answer.correct for answer in some) >= min(5, wrong)


def test_fewer_than_ten_are_all_shown() -> None:
    assert some_of(graded(2, 2)) == graded(2, 2)
    assert some_of([]) == []


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
    line = str(GradedAnswer("q", "a\nb " * 200, ("Paris",), correct=False))
    assert line.startswith("  wrong: q [Paris] a b")
    assert "\n" not in line
    assert len(line) < 200
    assert "(no text)" in str(GradedAnswer("q", "", (), correct=False))

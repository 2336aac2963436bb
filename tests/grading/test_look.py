"""A look at graded answers: ten of them, of both grades, and a word where the grades are in doubt."""

from __future__ import annotations

import pytest

from semgrad_guard.grading.sheets import HUMAN, SheetAnswer, doubt, some_of


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

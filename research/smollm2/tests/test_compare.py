"""No draw tests on a question that it learned from, and no set is a shift of itself."""

from __future__ import annotations

from research.smollm2.compare import jobs
from semgrad_guard.grading.candidates import LearningSet


def answers(first: int, last: int) -> LearningSet:
    """Answers to the questions with these numbers."""
    names = [f"question {number}" for number in range(first, last)]
    return LearningSet(names, [number % 3 == 0 for number in range(first, last)], {}, {})


SETS = {"facts": answers(0, 600), "known facts": answers(100, 400), "passages": answers(600, 1200)}


def test_no_question_is_both_learned_from_and_tested_on() -> None:
    every = list(jobs(SETS, draws=4, choices=4))
    assert {job.part for job in every} == {"learned", "shift", "coverage", "auto"}
    for job in every:
        known, others = job.parts(SETS)
        assert len(known.questions) == job.labels
        assert len(others.questions) >= 100
        assert set(known.questions).isdisjoint(others.questions), job.name


def test_sets_that_share_questions_are_no_shift() -> None:
    pairs = {(job.learned_on, job.tested_on) for job in jobs(SETS, draws=4, choices=4) if job.part == "shift"}
    assert pairs == {
        ("facts", "passages"),
        ("known facts", "passages"),
        ("passages", "facts"),
        ("passages", "known facts"),
    }

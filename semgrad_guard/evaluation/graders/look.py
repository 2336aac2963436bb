"""A look at graded answers before anything is computed from them: ten of them, and whether the grades can be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semgrad_guard.evaluation.graders.labels import NAME

SHOWN = 10
_AT_LEAST_OF_EACH = 3
FEWEST, MOST = 0.05, 0.95
_LONGEST = 160


@dataclass(frozen=True)
class GradedAnswer:
    """An answer with its grade; None: the grader came to no verdict."""

    question: str
    text: str
    references: tuple[str, ...]
    correct: bool | None

    def __str__(self) -> str:
        """One line of a list."""
        grade = "no verdict" if self.correct is None else "right" if self.correct else "wrong"
        texts = (
            self.question,
            self.references[0] if self.references else "no answer is right",
            self.text or "(no text)",
        )
        question, reference, text = (_short(text) for text in texts)
        return f"  {grade}: {question} [{reference}] {text}"


def some_of(answers: Sequence[GradedAnswer], *, count: int = SHOWN) -> list[GradedAnswer]:
    """Up to `count` of them in order, drawn with a fixed seed; of each grade three at least, if there are."""
    rng = np.random.default_rng(len(answers))
    drawn: list[int] = rng.permutation(len(answers)).tolist()
    chosen = drawn[:count]
    for grade in (True, False):
        held = [i for i in chosen if bool(answers[i].correct) is grade]
        others = [i for i in drawn if bool(answers[i].correct) is grade and i not in held]
        wanted = min(_AT_LEAST_OF_EACH - len(held), len(others), count - len(held))
        if wanted > 0 and len(chosen) == count:
            spare = [i for i in chosen if bool(answers[i].correct) is not grade][-wanted:]
            chosen = [*(i for i in chosen if i not in spare), *others[:wanted]]
    return [answers[i] for i in sorted(chosen)]


def doubt(correct: Sequence[bool], grader: str) -> str | None:
    """A warning where hardly any answer is right by this grader, or nearly all are; None between."""
    right, n = sum(correct), len(correct)
    if not n or FEWEST <= right / n <= MOST:
        return None
    seen = "less than 5 %" if right < n / 2 else "more than 95 %"
    found = f"{right} of {n} answers are right by {grader}, {seen}. Either the model is like that, or the"
    if grader == NAME:
        return f"{found} column 'correct' does not say what it should: compare some rows with their answers."
    cause = "misses right answers in another form" if right < n / 2 else "lets wrong answers pass"
    return f"{found} grader {cause}: read the answers. Choose another grader, or grade by hand with a file of labels."


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"

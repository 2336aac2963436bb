"""Graders that are classifiers: natural language inference and BEM, from checkpoints that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semgrad_guard.engine.texts.text_pairs import AnswerEquivalence, Entailment
from semgrad_guard.evaluation.graders.base import AnswerToGrade, Verdicts, any_reference
from semgrad_guard.evaluation.graders.words import require_threshold


@dataclass(frozen=True)
class EntailmentGrader:
    """Correct if question and answer entail question and reference: entailment is the likeliest of the three labels.

    One direction only: an answer may contain more than the reference. A sentence of an answer is correct the other way
    round: if the passage, or question and reference, entail it.
    """

    model: Entailment

    @property
    def name(self) -> str:
        return f"nli({self.model.name})"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""

        def premise_and_hypothesis(one: AnswerToGrade, source: str) -> tuple[str, str]:
            if one.sentence:
                return source if source == one.passage else f"{one.question} {source}", one.text
            return f"{one.question} {one.text}", f"{one.question} {source}"

        def entails(pairs: list[tuple[AnswerToGrade, str]]) -> list[bool]:
            texts = [premise_and_hypothesis(*pair) for pair in pairs]
            return [scores.entails for scores in self.model.probabilities(texts)]

        return any_reference(answers, entails)


@dataclass(frozen=True)
class Bem:
    """Correct if BEM finds the answer equivalent to a reference: P at or above `threshold`, in (0, 1].

    The paper's published code counts an answer as correct from .7 on.
    """

    model: AnswerEquivalence
    threshold: float = 0.7

    def __post_init__(self) -> None:
        require_threshold(self.threshold, "BEM", 0.7)

    @property
    def name(self) -> str:
        return f"bem({self.model.name})>={self.threshold:g}"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""

        def equivalent(pairs: list[tuple[AnswerToGrade, str]]) -> list[bool]:
            triples = [(one.question, reference, one.text) for one, reference in pairs]
            return [p >= self.threshold for p in self.model.probabilities(triples)]

        return any_reference(answers, equivalent)

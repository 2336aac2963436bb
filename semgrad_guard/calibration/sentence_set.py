"""The sentences of a calibration's answers as arrays, and the record of a promise about them.

Scores go with a sentence's length and place, and are compared as they are. The residual of log score on log tokens and
place (least squares, no labels) is worse: on 456 recalled sentences the AUROC of HybridGrad falls from .882 to .790, of
G-NLL from .893 to .819, and at alpha .2 `drop` delivers 61 % of the right ones in place of 79 and 82 %
(docs/results/sentences.md). Length and place tell of the kind of fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from semgrad_guard.calibration import gates, sentence_gates
from semgrad_guard.calibration.calibration_set import read_set
from semgrad_guard.calibration.effect import Effect
from semgrad_guard.calibration.on_doubt import compared_scores
from semgrad_guard.calibration.sentence_gates import ASSUMPTIONS, Promise, sentence_key
from semgrad_guard.errors import CalibrationError
from semgrad_guard.records import Verdict
from semgrad_guard.settings import OnDoubt


class SentencePromise(BaseModel):
    """The kind of a promise about sentences, with the counts of the calibration's sentences.

    `promise` is one of the two of `sentence_gates`, about the text that `on_doubt` delivers. Of `n` sentences, `wrong`
    are wrong; the threshold delivers `delivered` of them, `delivered_wrong` of these wrong. Nothing is promised about
    the rate of these two: answers with many sentences have more weight in it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    promise: Promise
    on_doubt: OnDoubt
    n: int = Field(ge=0)
    wrong: int = Field(ge=0)
    delivered: int = Field(ge=0)
    delivered_wrong: int = Field(ge=0)

    @property
    def assumption(self) -> str:
        """The assumption of the promise, in one sentence."""
        return ASSUMPTIONS[self.promise]

    @property
    def effect(self) -> Effect:
        """The effect of the threshold on all sentences."""
        return Effect(self.n, self.wrong, self.delivered, self.delivered_wrong, "sentences")


@dataclass(frozen=True)
class AnswerSentences:
    """The sentences of one answer, in the order of its text.

    `uncertainties` (None: no score), `correct` and `leans_on` (see `SentenceVerdict`) have an entry for each.
    """

    question: str
    text: str
    uncertainties: Sequence[float | None]
    correct: Sequence[Any]
    leans_on: Sequence[int | None]

    @classmethod
    def of(cls, verdict: Verdict, correct: Sequence[Any], *, question: str) -> AnswerSentences:
        """The sentences of a verdict on a whole draft (of a guard that observes, by sentence), with their grades.

        Raises:
            CalibrationError: the verdict lacks sentences or their text, or there is not a grade for each.
        """
        if not verdict.sentences or any(sentence.end == sentence.start for sentence in verdict.sentences):
            raise CalibrationError(
                'The verdict does not hold all sentences of a draft: collect verdicts with mode="observe" and '
                'by="sentence".'
            )
        if len(correct) != len(verdict.sentences):
            raise CalibrationError(f"There are {len(verdict.sentences)} sentences and {len(correct)} grades.")
        return cls(
            question,
            verdict.text,
            [sentence.uncertainty for sentence in verdict.sentences],
            correct,
            [sentence.leans_on for sentence in verdict.sentences],
        )


@dataclass(frozen=True)
class SentenceSet:
    """Answers x sentences: compared scores (infinite: never delivered, or no sentence), errors and keys;
    `lengths` are the numbers of sentences."""

    compared: NDArray[np.float64]
    wrong: NDArray[np.bool_]
    keys: NDArray[np.float64]
    lengths: NDArray[np.intp]
    on_doubt: OnDoubt
    promise: Promise

    @classmethod
    def read(cls, answers: Sequence[AnswerSentences], *, on_doubt: OnDoubt, promise: Promise) -> SentenceSet:
        """The answers, checked. Answers without a sentence count as unscored and wrong.

        Raises:
            CalibrationError: a column has another length, or an entry that cannot be read.
        """
        width = max((len(answer.uncertainties) for answer in answers), default=0) or 1
        shape = len(answers), width
        compared, wrong, keys = np.full(shape, np.inf), np.zeros(shape, np.bool_), np.ones(shape)
        for row, answer in enumerate(answers):
            n = len(answer.uncertainties)
            if not n:
                continue
            if len(answer.leans_on) != n:
                raise CalibrationError(
                    f"answers[{row}] has {n} sentences and {len(answer.leans_on)} entries in leans_on."
                )
            read = read_set(answer.uncertainties, answer.correct, groups=None, copies="keep")
            scores: list[float | None] = [None] * n
            for place, score in zip(read.scored, read.scores.tolist(), strict=True):
                scores[place] = score
            found = compared_scores(scores, answer.leans_on, on_doubt=on_doubt)
            compared[row, :n] = [np.inf if score is None else score for score in found]
            wrong[row, :n] = [not right for right in answer.correct]
            keys[row, :n] = [sentence_key(answer.question, answer.text, place) for place in range(n)]
        lengths = np.array([len(answer.uncertainties) for answer in answers], np.intp)
        return cls(compared, wrong, keys, lengths, on_doubt, promise)

    def part(self, rows: Sequence[int]) -> SentenceSet:
        """Some of the answers."""
        at = np.array(rows, np.intp)
        return replace(
            self,
            compared=self.compared[at],
            wrong=self.wrong[at],
            keys=self.keys[at],
            lengths=self.lengths[at],
        )

    @property
    def graded(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The compared scores of all sentences that have one, and whether each of these is right."""
        scored = np.isfinite(self.compared)
        return self.compared[scored], ~self.wrong[scored]

    @property
    def most_certain(self) -> list[float | None]:
        """The smallest compared score of each answer; None where nothing of it can be delivered."""
        return [score if np.isfinite(score) else None for score in self.compared.min(axis=1).tolist()]

    @property
    def all_right(self) -> list[bool]:
        """Whether an answer has sentences, and none of them is wrong."""
        return (~self.wrong.any(axis=1) & (self.lengths > 0)).tolist()

    def walk(self, *, alpha: float, delta: float, robust: bool) -> gates.Walk:
        """The walk of the promise's gates."""
        arrays = self.compared, self.wrong, self.keys
        return sentence_gates.walk(*arrays, promise=self.promise, alpha=alpha, delta=delta, robust=robust)

    def record(self, threshold: float | None) -> SentencePromise:
        """The counts, with those that a threshold delivers."""
        delivered = self.compared <= (-np.inf if threshold is None else threshold)
        return SentencePromise(
            promise=self.promise,
            on_doubt=self.on_doubt,
            n=int(self.lengths.sum()),
            wrong=int(self.wrong.sum()),
            delivered=int(delivered.sum()),
            delivered_wrong=int((self.wrong & delivered).sum()),
        )

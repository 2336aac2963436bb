"""Promises about the sentences of answers: the scores that are compared, gates, their effect, and a plan of labels.

A sentence is delivered only with those that it depends on, so it counts with the greatest of their scores. It then
depends on nothing but its own number whether it is delivered, at any threshold: a promise about sentences is about
these numbers, and every front decides by them.

Scores go with a sentence's length and place, and are compared as they are. The residual of log score on log tokens and
place (least squares, no labels) is worse: on 456 recalled sentences the AUROC of HybridGrad falls from .882 to .790, of
G-NLL from .893 to .819, and at alpha .2 `drop` delivers 61 % of the right ones in place of 79 and 82 %
(docs/results/sentences.md). Length and place tell of the kind of fact.

For a plan, a set's own answers are drawn again and again, with all that their sentences have in common. Before anything
is labelled they are simulated: scores of right and of wrong sentences are normal, as in `planning`, and correlated in
an answer.

**Two promises, by gates over answers**: sentences of one answer depend on each other, so the answer is the independent
unit. Up to a threshold t an answer delivers the sentences whose compared score is at most t (`compared_scores`); it
delivers something where its most certain sentence does.

- **One sentence** (`"sentence"`): take an answer of which something is delivered, and one of its delivered sentences at
  random: it is wrong with probability at most alpha. At t the delivered sentence of smallest key represents its answer;
  keys are a hash of the text (`sentence_key`), so that no seed can be chosen.
- **Whole answers** (`"answer"`): of the answers from which something is delivered, at most alpha hold a wrong sentence
  among the delivered ones.

Where the first rate is .15, the second was .28 to .35 in simulations: they are never interchangeable. Neither is the
share of wrong ones among all delivered sentences, to which long answers contribute more.

**Theorem.** The delivered threshold has a rate above alpha with probability at most delta, if the rate crosses alpha
once, and

- an answer that delivers something up to the crossing is not, on average, wrong less often where it delivers more (for
  whole answers this holds by definition), and
- answers that begin to deliver beyond the crossing are wrong at a rate of at least alpha.

*Proof.* At a fixed t the answers that deliver are independent draws, and each is wrong (by its one sentence, or by any)
with probability R(t): the count is binomial, whatever the dependence inside. Sort answers by their most certain
sentence. The proof of `gates` then holds word for word: at the first gate beyond the crossing, its M answers from
before are wrong with probability at least alpha, by the first condition, and the others by the second.

The threshold lies between the last answer's most certain sentence and the next score of any sentence, so that it
delivers what was counted.

Plain gates: looking ahead takes the joint law of all gates, which a sentence that is replaced by another one has not.
All sentences up to the threshold need a label, for the one that represents an answer changes with t. In 10,000
repetitions a cell, violations are at most .106 for delta = .1 (docs/results/guarantee-sentences.md).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration import gates, planning
from semgrad_guard.calibration.calibration_set import Effect, read_rate, read_set
from semgrad_guard.calibration.planning import Plan
from semgrad_guard.errors import CalibrationError
from semgrad_guard.records import Verdict
from semgrad_guard.settings import OnDoubt

Number = TypeVar("Number", np.intp, np.float64)

Promise = Literal["sentence", "answer"]

ASSUMPTIONS: dict[Promise, str] = {
    "sentence": (
        "calibration questions and later questions are independent draws from one population; as the threshold rises, "
        "the rate exceeds alpha from one point on, and beyond it further sentences are wrong at a rate of at least "
        "alpha"
    ),
    "answer": (
        "calibration questions and later questions are independent draws from one population; as the threshold rises, "
        "the rate exceeds alpha from one point on, and beyond it further answers hold a wrong sentence at a rate of at "
        "least alpha"
    ),
}
"""The assumption of each promise, in one sentence."""

START: dict[Promise, float] = {"sentence": 0.5, "answer": gates.START}
"""The share of the answers that the first gate holds, at least.

One sentence an answer tells less than all of them, so that an early gate fails by chance more often. (With
fabricated answers, 100 of them deliver .14 from a start at .3, and .23 from .5; elsewhere it changes .04 or less.)
"""


def compared_scores(
    scores: Sequence[float | None], leans_on: Sequence[int | None], *, on_doubt: OnDoubt
) -> list[float | None]:
    """The scores that are compared, in the order of the text; None where a sentence can never be delivered.

    `scores` are the sentences' own, None (or not finite) where there is none; `leans_on` is the number of the earlier
    one that a sentence leans on ("It is ..."). Under `stop` a sentence depends on all before it, under `drop` on those
    that it leans on.
    """
    found: list[float] = []
    for score, earlier in zip(scores, depending_on(leans_on, on_doubt=on_doubt), strict=True):
        own = math.inf if score is None or not math.isfinite(score) else score
        found.append(own if earlier is None else max(own, found[earlier]))
    return [score if score < math.inf else None for score in found]


def depending_on(leans_on: Sequence[int | None], *, on_doubt: OnDoubt) -> list[int | None]:
    """The earlier sentence without which each is not delivered."""
    if on_doubt == "drop":
        return list(leans_on)
    return [number - 1 if number else None for number in range(len(leans_on))]


def sentence_key(question: str, answer: str, position: int) -> float:
    """The key of an answer's sentence, in [0, 1): it depends on the texts alone."""
    digest = hashlib.sha256("\0".join((question, answer, str(position))).encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8]) >> 11) / 2**53


def walk_sentences(
    compared: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    keys: NDArray[np.float64],
    *,
    promise: Promise,
    alpha: float,
    delta: float,
) -> gates.Walk:
    """Walk the gates of answers: arrays of answers x sentences, with an infinite score where there is no sentence.

    The counts of the walk are answers from which something is delivered, and of these the wrong ones.
    """
    leveled = gates.leveled(compared)
    first = leveled.min(axis=1, initial=np.inf)
    scores = np.sort(first[np.isfinite(first)])
    errors = wrong_answers(leveled, wrong, keys, scores, promise=promise)
    how = {"alpha": alpha, "delta": delta, "start": START[promise]}
    walk = gates.walk_sorted(scores, errors, **how, ahead=False, known=compared)
    return replace(walk, spare=0.0)  # up to the next answer other sentences count, so the bound is not proved


def wrong_answers(
    compared: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    keys: NDArray[np.float64],
    thresholds: NDArray[np.float64],
    *,
    promise: Promise,
) -> NDArray[np.intp]:
    """How many answers are wrong at each threshold."""
    order = np.argsort(compared, axis=1, kind="stable")
    scores, wrong = np.take_along_axis(compared, order, 1), np.take_along_axis(wrong, order, 1)
    if promise == "answer":
        is_wrong = np.logical_or.accumulate(wrong, axis=1)
    else:
        keys = np.take_along_axis(keys, order, 1)
        lowest: NDArray[np.float64] = np.minimum.accumulate(keys, axis=1)
        smallest = (keys == lowest) * np.arange(compared.shape[1], dtype=np.intp)
        represents = np.maximum.accumulate(smallest, axis=1)  # the last that was the smallest so far
        is_wrong = np.take_along_axis(wrong, represents, 1)
    changes = np.diff(is_wrong.astype(np.intp), axis=1, prepend=0)
    return totals(scores, changes, thresholds)


def totals(scores: NDArray[np.float64], changes: NDArray[Number], thresholds: NDArray[np.float64]) -> NDArray[Number]:
    """The sum, at each threshold, of the changes at scores up to it."""
    order = np.argsort(scores, axis=None)
    sums = np.append(np.zeros(1, changes.dtype), np.cumsum(changes.ravel()[order]))
    return sums[np.searchsorted(scores.ravel()[order], thresholds, side="right")]


class SentencePromise(BaseModel, frozen=True, extra="forbid"):
    """The kind of a promise about sentences, with the counts of the calibration's sentences.

    `promise` is one of the two above, about the text that `on_doubt` delivers. Of `n` sentences, `wrong`
    are wrong; the threshold delivers `delivered` of them, `delivered_wrong` of these wrong. Nothing is promised about
    the rate of these two: answers with many sentences have more weight in it.
    """

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
        """The sentences of a verdict on a whole draft (of a guard that annotates, by sentence), with their grades.

        Raises:
            CalibrationError: the verdict lacks sentences or their text, or there is not a grade for each.
        """
        if not verdict.sentences or any(sentence.end == sentence.start for sentence in verdict.sentences):
            raise CalibrationError(
                'The verdict does not hold all sentences of a draft: collect verdicts with mode="annotate" and '
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
            self, compared=self.compared[at], wrong=self.wrong[at], keys=self.keys[at], lengths=self.lengths[at]
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

    def walk(self, *, alpha: float, delta: float) -> gates.Walk:
        """The walk of the promise's gates."""
        arrays = self.compared, self.wrong, self.keys
        return walk_sentences(*arrays, promise=self.promise, alpha=alpha, delta=delta)

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


CORRELATION = 0.3
"""That of two sentences of one answer, in their scores and in their truth."""
_SETS, _POPULATION = 100, 2000


def simulated(*, error: float, auroc: float, sentences: int, on_doubt: OnDoubt, promise: Promise) -> SentenceSet:
    """Answers of so many sentences, of which this share is wrong. No sentence leans on another one.

    Raises:
        CalibrationError: a number is out of its range.
    """
    if sentences < 1 or not (0 <= error <= 1 and 0 <= auroc <= 1):
        raise CalibrationError(
            "A plan by sentence takes at least one sentence an answer, and an error rate and an AUROC in [0, 1], not "
            f"{sentences}, {error} and {auroc}."
        )
    rng, shape = np.random.default_rng(0), (_POPULATION, sentences)

    def normal() -> NDArray[np.float64]:
        common, own = rng.normal(size=(_POPULATION, 1)), rng.normal(size=shape)
        return math.sqrt(CORRELATION) * common + math.sqrt(1 - CORRELATION) * own

    order = np.argsort(normal(), axis=None)
    wrong = np.zeros(shape, np.bool_)
    wrong.ravel()[order[: round(error * order.size)]] = True
    scores: NDArray[np.float64] = normal() + planning.shift(auroc) * wrong
    compared = np.maximum.accumulate(scores, axis=1) if on_doubt == "stop" else scores
    lengths = np.full(_POPULATION, sentences)
    return SentenceSet(compared, wrong, rng.random(shape), lengths, on_doubt, promise)


def plan_sentences(n: int, answers: SentenceSet, *, alpha: float, delta: float) -> Plan:
    """The effect to expect of n labelled answers like these, by 100 sets of them (the same ones every time).

    Raises:
        CalibrationError: a number is out of its range.
    """
    if n < 1:
        raise CalibrationError(f"A plan takes at least one label, not {n}.")
    rates = {"alpha": read_rate(alpha, "alpha"), "delta": read_rate(delta, "delta")}
    rng, found = np.random.default_rng(n), list[float]()
    for _ in range(_SETS):
        part = answers.part(rng.integers(len(answers.lengths), size=n).tolist())
        threshold = replace(part, keys=rng.random(part.keys.shape)).walk(**rates).threshold
        found += [] if threshold is None else [threshold]
    every = int(answers.lengths.sum())
    shares = [int((answers.compared <= threshold).sum()) / every for threshold in found]
    error, quality = _quality(answers)
    return Plan(n, alpha, delta, error, quality or 0.0, len(found) / _SETS, math.fsum(shares) / _SETS, "sentences")


def sentence_advice(answers: SentenceSet, *, alpha: float, delta: float) -> str:
    """The labels that it takes, by answers with which no threshold was found."""
    error, quality = _quality(answers)
    if quality is None:
        return planning.of_one_kind(error, gates.fewest_answers(alpha=alpha, delta=delta))
    planned = partial(plan_sentences, answers=answers, alpha=alpha, delta=delta)
    return planning.in_words(planned(len(answers.lengths)), planning.enough_of(planned))


def _quality(answers: SentenceSet) -> tuple[float, float | None]:
    """The error rate of the sentences, and the AUROC of their scores."""
    scores, right = answers.graded
    return float((~right).mean()) if len(right) else 1.0, planning.auroc(scores, right)

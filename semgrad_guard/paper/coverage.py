"""Coverage under a promise: what it leaves to answer on unseen questions, and the band that a gate must not leave.

For a promised error rate alpha, half of the questions calibrate a threshold and the other half measures its coverage;
over many seeded halves. Neither AUROC nor AURC tells a user of the guard this.

A gate compares the coverage and the error of one calibration on labelled questions with a recorded band. Its verdict is
the same in every run on the same answers, whatever the number of threads or the size of a batch: an answer whose score
equals the threshold but for rounding counts as let through or as withheld, whichever stays in the band. (No answer of
the calibration is one; among held-out answers there may be.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator

from semgrad_guard.calibration import gates
from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.declared import read_record
from semgrad_guard.errors import InputError
from semgrad_guard.files import atomic_write
from semgrad_guard.guard.decision import settle, unscored
from semgrad_guard.guard.policy import Policy, Terms
from semgrad_guard.metrics import Floats, as_arrays
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.run_record import Answer
from semgrad_guard.records import PromptForm, Verdict

ALPHAS = (0.05, 0.1, 0.2)
DELTA = 0.1
SPLITS = 100


@dataclass(frozen=True)
class GuaranteedCoverage:
    """The coverage of a promise of at most `alpha` errors with probability 1 - `DELTA`. One entry per split.

    `coverage` is the share of the measuring half that is let through, in [0, 1], and 0 where no threshold keeps the
    promise; `risk` is the share of wrong answers among those, nan where nothing is let through; `error` is the share of
    wrong answers in the whole half, which are delivered without a guard.
    """

    alpha: float
    coverage: Floats
    risk: Floats
    error: Floats

    @property
    def mean_coverage(self) -> float:
        """The mean over all splits, those that let nothing through included."""
        return float(self.coverage.mean())

    @property
    def mean_risk(self) -> float:
        """The mean error rate of the answers let through; nan if there are never any."""
        return float(np.nanmean(self.risk)) if self.nothing < 1.0 else math.nan

    @property
    def withheld_wrong(self) -> float:
        """The share of all wrong answers that are withheld, over all halves together; 0 where none is wrong."""
        return _share(self.error.sum() - self._delivered_wrong, self.error.sum())

    @property
    def withheld_right(self) -> float:
        """The share of all right answers that are withheld; 0 where none is right."""
        right = (1 - self.error).sum()
        return _share(right - (self.coverage.sum() - self._delivered_wrong), right)

    @property
    def _delivered_wrong(self) -> float:
        return float(np.nansum(self.coverage * self.risk))

    @property
    def violations(self) -> float:
        """The share of splits whose error rate in the measuring half exceeds alpha.

        The promise concerns the error rate over all questions. A measuring half scatters around it, so this share may
        exceed delta somewhat where the promise is kept with little to spare.
        """
        return float((self.risk > self.alpha).mean())

    @property
    def nothing(self) -> float:
        """The share of splits in which no threshold keeps the promise, or nothing is below it."""
        return float(np.isnan(self.risk).mean())


def guaranteed_coverage(
    uncertainties: Sequence[float | None], correct: Sequence[bool], *, alpha: float, splits: int = SPLITS
) -> GuaranteedCoverage | None:
    """Calibrate on a random half and measure on the other, `splits` times; None with fewer than two questions."""
    scores, labels = as_arrays(uncertainties, correct)
    if len(scores) < 2:
        return None
    found = [
        _measure(scores[rest], labels[rest], threshold(scores[half], labels[half], alpha=alpha))
        for half, rest in halves(len(scores), splits=splits)
    ]
    coverage, risk, error = np.array(found, dtype=np.float64).T
    return GuaranteedCoverage(alpha, coverage, risk, error)


def halves(n: int, *, splits: int) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """(calibrating rows, measuring rows) of n; the same for every method."""
    rng = np.random.default_rng([0, n])
    for _ in range(splits):
        order = rng.permutation(n)
        yield np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def threshold(scores: Floats, correct: NDArray[np.bool_], *, alpha: float) -> float | None:
    """The threshold that `calibrate` would choose from these answers, without the rest of its record."""
    finite = np.isfinite(scores)
    scores, wrong = scores[finite], ~correct[finite]
    return gates.walk(scores, wrong, alpha=alpha, delta=DELTA).threshold if len(scores) else None


def fewest_questions(*, alpha: float) -> int:
    """How many scored questions it takes before half of them could show an error rate of at most alpha at all."""
    return 2 * gates.fewest_answers(alpha=alpha, delta=DELTA)


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else 0.0


def _measure(scores: Floats, correct: NDArray[np.bool_], limit: float | None) -> tuple[float, float, float]:
    """(coverage, risk, error without a threshold); scores that are nan are never let through."""
    error = float((~correct).mean())
    let_through = np.isfinite(scores) & (scores <= limit) if limit is not None else np.zeros(len(scores), np.bool_)
    if not let_through.any():
        return 0.0, math.nan, error
    return float(let_through.mean()), float((~correct[let_through]).mean()), error


ROUNDING = 1e-3
"""The relative distance of a score from the threshold up to which rounding may decide."""
_EXACT = 1e-9
"""Shares are sums of few decimals: 0.6 - 0.05 is not below 0.55."""

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Decided:
    """The decision about a graded answer, as a guard makes it; `at_threshold`: rounding may make it another.

    Without a promise an answer counts as withheld; `unfamiliar` are the reasons.
    """

    let_through: bool
    right: bool
    at_threshold: bool = False
    unfamiliar: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """The decisions about the answers to some questions (a `digest` of them), and whose grades these are."""

    questions: str
    grader: str
    calibration_id: str
    answers: Sequence[Decided]

    @property
    def readings(self) -> tuple[Effect, Effect]:
        """The effect with the answers at the threshold let through, and with them withheld."""
        lenient = [one.right for one in self.answers if one.let_through or one.at_threshold]
        strict = [one.right for one in self.answers if one.let_through and not one.at_threshold]
        wrong = sum(not one.right for one in self.answers)
        first, second = (Effect(len(self.answers), wrong, len(kept), kept.count(False)) for kept in (lenient, strict))
        return first, second


def decided(answer: Answer, right: bool, policy: Policy, *, score: float | None, prompt: PromptForm | None) -> Decided:
    """The decision of a guard with this policy about a recorded answer and its score."""

    def verdict(uncertainty: float | None) -> Verdict:
        draft = unscored(answer.text or "", reason="").model_copy(update={"uncertainty": uncertainty})
        return settle(draft, Terms(policy=policy, mode="annotate"), prompt=prompt).verdict

    limit, found = policy.threshold, verdict(score)
    near = score is not None and limit is not None and math.isclose(score, limit, rel_tol=ROUNDING)
    promised = [
        one.action == "answer" and one.details.familiar is True for one in (found, verdict(limit) if near else found)
    ]
    return Decided(promised[0], right, near and promised[1], found.details.unfamiliar)


class Range(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A share from `low` to `high`, both allowed."""

    low: Share
    high: Share

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.low > self.high:
            raise ValueError("low must not be above high")
        return self

    @classmethod
    def around(cls, value: float, slack: float, *, falls: bool = True) -> Self:
        """The range of values within `slack`; down to 0 where a lower value is no fault."""
        return cls(low=max(0.0, round(value - slack, 6)) if falls else 0.0, high=min(1.0, round(value + slack, 6)))

    def outside(self, value: float) -> float:
        """How far a value is below (negative) or above the range; 0 inside."""
        distance = min(0.0, value - self.low) or max(0.0, value - self.high)
        return distance if abs(distance) > _EXACT else 0.0

    def __str__(self) -> str:
        return f"{self.low:.1%} to {self.high:.1%}"


@dataclass(frozen=True)
class Departure:
    """A share that has left its range: `by` is negative below it."""

    name: Literal["coverage", "error"]
    value: float
    by: float
    range: Range

    def __str__(self) -> str:
        where = "below" if self.by < 0 else "above"
        return f"{self.name} left its band: {self.value:.1%} is {100 * abs(self.by):.1f} points {where} {self.range}"


class Band(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The recorded ranges, and what they were recorded on; a file that may be edited by hand.

    `coverage` is the share of the questions whose answers are let through under the promise, `error` the share of
    wrong ones among these. `questions` is a digest of the questions and their references.
    """

    schema_version: Literal[1] = 1
    questions: str
    grader: str
    calibration_id: str
    answers: int = Field(ge=1)
    delivered: int = Field(ge=1)
    delivered_wrong: int = Field(ge=0)
    coverage: Range
    error: Range

    @classmethod
    def record(cls, measured: Measured, *, coverage_slack: float, error_slack: float) -> Self:
        """The band around a measurement; a lower error than measured never leaves it.

        Raises:
            InputError: nothing is let through, so that there is no error to watch.
        """
        effect = measured.readings[0]
        if effect.delivered_error is None:
            raise InputError(
                "Nothing is let through on these questions under the promise, so there is no band to record. Calibrate "
                "for these prompts first, or take other questions."
            )
        return cls(
            questions=measured.questions,
            grader=measured.grader,
            calibration_id=measured.calibration_id,
            answers=effect.answers,
            delivered=effect.delivered,
            delivered_wrong=effect.delivered_wrong,
            coverage=Range.around(effect.coverage, coverage_slack),
            error=Range.around(effect.delivered_error, error_slack, falls=False),
        )

    def require(self, **now: str) -> None:
        """Refuse to compare shares that are about other questions, references or grades.

        Raises:
            InputError: `questions` or `grader` is another one than recorded.
        """
        for name, theirs in now.items():
            if (mine := getattr(self, name)) != theirs:
                raise InputError(
                    f"The band was recorded with other {name} ({mine}, and now {theirs}), so its shares do not "
                    "compare. Give the recorded ones, or record a new band (--record)."
                )

    def left_by(self, measured: Measured) -> list[Departure]:
        """The shares that have left their ranges, whichever way rounding decides; none where the gate passes.

        Raises:
            InputError: the band was recorded on other questions, references or grades.
        """
        self.require(questions=measured.questions, grader=measured.grader)
        coverages = [effect.coverage for effect in measured.readings]
        errors = [effect.delivered_error for effect in measured.readings]
        left = (_departure("coverage", coverages, self.coverage), _departure("error", errors, self.error))
        return [one for one in left if one is not None]

    def save(self, path: Path) -> Path:
        """Write JSON, whole or not at all."""
        return atomic_write(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataFileError: it cannot be read, or is something else.
        """
        return read_record(cls, path, title="band", advice="Record one: semgrad-guard gate --record.")


def _departure(name: Literal["coverage", "error"], values: Sequence[float | None], allowed: Range) -> Departure | None:
    """The smallest one among the readings; None where a reading is inside, or has no such share."""
    found = [Departure(name, value, allowed.outside(value), allowed) for value in values if value is not None]
    nearest = min(found, key=lambda one: abs(one.by), default=None)
    return nearest if len(found) == len(values) and nearest is not None and nearest.by else None


def digest(rows: Sequence[Question]) -> str:
    """Sixteen hex digits that name questions with their references and kinds, in any order."""
    lines = sorted(json.dumps([row.key, sorted(row.answers), row.kind]) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

"""A gate: the coverage and the error of a calibration on labelled questions, and the band that they must not leave.

The verdict is the same in every run on the same answers, whatever the number of threads or the size of a batch: an
answer whose score equals the threshold but for rounding counts as let through or as withheld, whichever stays in the
band. (No answer of the calibration is one; among held-out answers there may be.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.declared import read_record
from semgrad_guard.errors import InputError
from semgrad_guard.files import atomic_write
from semgrad_guard.guard.decision import settle, unscored
from semgrad_guard.guard.policy import Policy, Terms
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.run_record import Answer
from semgrad_guard.records import PromptForm, Verdict

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

"""What the estimators that ask the model for more have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar, cast

from semgrad_guard.engine.generation.evidence import Evidence
from semgrad_guard.engine.generation.sampling_plans import DiverseBeams, Sample, Sampling, plan_record
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import DetachedRecordError, ScoringError
from semgrad_guard.records import Score


class AskingEstimator:
    """An estimator that draws samples or asks the model about its answer. Subclasses say what to make of it."""

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated; the generator may keep what the default objective needs."""
        return Objective()

    def settings(self) -> dict[str, Any]:
        """The dataclass fields: plans as their settings, auxiliary models by name."""
        own: Any = self  # every estimator is a dataclass
        return {field.name: _plain(getattr(self, field.name)) for field in fields(own)}

    def value(self, evidence: Evidence) -> float:
        """The estimator's number for an answer that is not empty.

        Raises:
            ScoringError: there is none; the message is the score's reason.
        """
        raise NotImplementedError

    def __call__(self, evidence: Evidence) -> Score:
        """`scoring_ms` is the cost of everything the number needs, as if no other estimator had needed it before."""
        if not evidence.response_ids:
            return Score(None, evidence.why_empty)
        value, milliseconds = evidence.timed(lambda: self._attempt(evidence))
        details = {"scored_tokens": len(evidence.response_ids), "scoring_ms": round(milliseconds, 3)}
        if isinstance(value, str):
            return Score(None, value, details)
        if not math.isfinite(value):
            return Score(None, "the score is not finite", details)
        return Score(value, None, details)

    def _attempt(self, evidence: Evidence) -> float | str:
        try:
            return self.value(evidence)
        except DetachedRecordError:  # says nothing about the answer
            raise
        except ScoringError as error:
            return str(error)


def texts_of(samples: Iterable[Sample]) -> list[str]:
    """The samples' texts without outer white space."""
    return [sample.text.strip() for sample in samples]


def distinct(samples: Iterable[Sample]) -> dict[str, Sample]:
    """The first sample of each text, in order."""
    by_text: dict[str, Sample] = {}
    for sample in samples:
        by_text.setdefault(sample.text.strip(), sample)
    return by_text


def with_tokens(samples: tuple[Sample, ...]) -> list[Sample]:
    """The samples that have a likelihood: the end token is never scored, so an empty sample has none.

    Raises:
        ScoringError: all of them are empty.
    """
    filled = [sample for sample in samples if sample.ids]
    if not filled:
        raise ScoringError("all samples are empty")
    return filled


def mean_log_prob(sample: Sample) -> float:
    """The length-normalised log-likelihood in nats per token."""
    return math.fsum(sample.log_probs) / len(sample.log_probs)


def _plain(value: Any) -> Any:
    if isinstance(value, Sampling | DiverseBeams):
        return plan_record(value)
    if isinstance(value, tuple):  # tuples of tuples in one row: calibrations keep lists of plain values
        parts = [_plain(item) for item in cast("tuple[Any, ...]", value)]
        return [plain for part in parts for plain in (cast("list[Any]", part) if isinstance(part, list) else [part])]
    return value if value is None or isinstance(value, bool | int | float | str) else value.name

"""The base of estimators that draw more answers of the model, and functions of their samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar, cast

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.options import DiverseBeams, Sample, Sampling, plan_record
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import DetachedRecordError, ScoringError
from semgrad_guard.estimators.base import finite_score
from semgrad_guard.records import Score


class AskingEstimator:
    """An estimator that draws samples, or puts a question about the answer to the model. Subclasses define `value`."""

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated; the generator may keep the states of the default objective."""
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

        def attempt() -> tuple[float | None, str | None]:
            try:
                return self.value(evidence), None
            except DetachedRecordError:  # about the record, not the answer
                raise
            except ScoringError as error:
                return None, str(error)

        (value, reason), milliseconds = evidence.timed(attempt)
        details = {"scored_tokens": len(evidence.response_ids), "scoring_ms": round(milliseconds, 3)}
        return finite_score(value, reason, details)


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

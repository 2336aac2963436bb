"""Estimators: frozen dataclasses whose fields are their configuration, called with the evidence about an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, ClassVar, Protocol, cast

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scoring.gradients import GradientScores
from semgrad_guard.engine.scoring.observation import Observation
from semgrad_guard.records import Score


class Estimator(Protocol):
    """One number per answer, higher = less certain.

    `name` is used in verdicts and calibrations, `title` in tables and figures (the paper's spelling); `objective` tells
    the generator which states to keep for scoring.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """The quantity that is differentiated."""
        ...

    def settings(self) -> dict[str, Any]:
        """The configuration as plain JSON: part of a calibration's binding."""
        ...

    def __call__(self, evidence: Evidence) -> Score:
        """The answer's score; `uncertainty` is None, with a reason, where there is none."""
        ...


_LATER_SETTINGS: dict[str, Any] = {
    "norm": "l1",
    "weighted": True,
    "token": None,
    "sampled_rows": None,
    "earlier": "context",
}
"""Settings of existing estimators that came later, and their defaults: absent then, as in calibrations made before."""


class Likelihoods(Protocol):
    """The numbers that replays and observations have in common: nats, per token and for the whole answer."""

    @property
    def log_probs(self) -> tuple[float, ...]: ...

    @property
    def entropies(self) -> tuple[float, ...]: ...

    @property
    def mean_entropy(self) -> float | None: ...

    @property
    def greedy_nll(self) -> float | None: ...


class ReplayEstimator:
    """An estimator that reads its number off one replay. Subclasses define it in `value`."""

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """The paper's, but for the settings that a subclass shares with it."""
        own: dict[str, Any] = {
            one.name: getattr(self, one.name) for one in fields(Objective) if hasattr(self, one.name)
        }
        return Objective(**own)

    def settings(self) -> dict[str, Any]:
        """The dataclass fields, tuples as lists; those that came later only where they are not the default."""
        every: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # every estimator is a dataclass
        stated = {key: v for key, v in every.items() if key not in _LATER_SETTINGS or v != _LATER_SETTINGS[key]}
        return {key: list(cast("tuple[Any, ...]", v)) if isinstance(v, tuple) else v for key, v in stated.items()}

    def value(self, scores: Any) -> float | None:
        """The estimator's number for finite scores: a replay's (`GradientScores`), or the part that it needs."""
        raise NotImplementedError

    def __call__(self, evidence: Evidence) -> Score:
        return read_off(evidence, self.objective, self.value)


def read_off(evidence: Evidence, objective: Objective, value: Callable[[GradientScores], float | None]) -> Score:
    """Score an answer by one number of its replay, with the parts as details."""
    timed = evidence.gradients(objective)
    if timed is None:
        return Score(None, evidence.why_empty)
    scores = timed.scores
    details = {
        "semgrad": scores.semgrad,
        "paragrad": scores.paragrad,
        **likelihoods(scores),
        "scored_tokens": len(evidence.response_ids),
        "scoring_ms": round(timed.milliseconds, 3),
        "tier": scores.tier,
    }
    if scores.deviation is not None:
        details["deviation"] = scores.deviation
    if scores.paragrad_error is not None:
        details["paragrad_error"] = scores.paragrad_error
    return finite_score(value(scores), scores.reason, details)


def finite_score(number: float | None, reason: str | None, details: dict[str, Any]) -> Score:
    """A number as a score; without a finite one, none for this reason."""
    if number is None or not math.isfinite(number):
        return Score(None, reason or "the score is not finite", details)
    return Score(number, None, details)


def likelihoods(scores: Likelihoods) -> dict[str, float | None]:
    """The label-free scores that cost nothing: details of every other score."""
    nll, count = scores.greedy_nll, len(scores.log_probs)
    probability = None if nll is None or not count else -math.expm1(-nll / count)
    return {"mean_entropy": scores.mean_entropy, "gnll": nll, "max_probability": probability}


OBSERVING = Objective(gradients=False)
"""The objective of estimators that differentiate nothing."""


class ObservedEstimator(ReplayEstimator):
    """An estimator that reads its number off an answer's likelihoods, which a replay knows as well."""

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def __call__(self, evidence: Evidence) -> Score:
        seen, milliseconds = evidence.timed(evidence.observed)
        if seen is None:
            return Score(None, evidence.why_empty)
        return finite_score(self.value(seen), seen.reason, observed_details(seen, milliseconds))


def observed_details(seen: Observation, milliseconds: float) -> dict[str, Any]:
    """The details of the score of an observed answer."""
    return {**likelihoods(seen), "scored_tokens": len(seen.log_probs), "scoring_ms": round(milliseconds, 3)}


class AttendingEstimator:
    """An estimator of how an answer's tokens attend to each other: one pass over prompt and answer, without a gradient.

    Subclasses combine the attention of the middle layers and the tokens' probabilities, in `number`.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @property
    def objective(self) -> Objective:
        """Nothing is differentiated."""
        return OBSERVING

    def settings(self) -> dict[str, Any]:
        """Empty unless a subclass has settings."""
        return {}

    def number(self, log_probs: Sequence[float], previous: Sequence[Sequence[float]], own: Sequence[float]) -> float:
        """From log-probabilities (nats) and an `AttentionReading`."""
        raise NotImplementedError

    def __call__(self, evidence: Evidence) -> Score:
        (seen, read), milliseconds = evidence.timed(lambda: (evidence.observed(), evidence.attention()))
        if seen is None or read is None:
            return Score(None, evidence.why_empty)
        details = observed_details(seen, milliseconds)
        if reason := seen.reason or read.reason:
            return Score(None, reason, details)
        return finite_score(self.number(seen.log_probs, read.previous, read.own), None, details)

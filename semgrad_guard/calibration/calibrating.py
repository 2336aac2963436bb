"""`calibrate`: from scores and labels to a threshold that keeps a promise, and P(correct) for every score.

The promise: among the answers that are let through, the error rate is at most alpha, with probability at least
1 - delta over the draw of the calibration set. It assumes that calibration questions and later questions are
exchangeable (drawn from one population, independently); `drift.py` watches for the day when they are not.

Why: docs/adr/0180-one-threshold-for-several-engines.md
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import binomial, fixed_sequence
from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.calibration_set import CalibrationSet, read_grid, read_prompts, read_rate, read_set
from semgrad_guard.calibration.choice import EstimatorChoice
from semgrad_guard.calibration.confidence import ConfidenceMethod, fit
from semgrad_guard.calibration.prompt_shape import PromptForm, PromptShape
from semgrad_guard.errors import CalibrationError

_NOTHING: dict[str, Any] = {
    "threshold": None,
    "coverage": 0.0,
    "risk_bound": None,
    "n_answered": 0,
    "n_answered_wrong": 0,
}


@dataclass(frozen=True)
class EngineAnswers:
    """Answers to the same questions by the same model in another engine, or in another number format.

    `uncertainties`, `correct` and `groups` are columns as in `calibrate`; `groups` names a question as the other
    engine's do. `binding` differs from the other engine's in nothing but the engine (see `EngineIdentity`).
    """

    uncertainties: Iterable[float | None]
    correct: Iterable[Any]
    groups: Iterable[Hashable]
    binding: Binding


def calibrate(  # noqa: PLR0913  # a promise has these conditions, and every one has its default
    uncertainties: Iterable[float | None],
    correct: Iterable[Any],
    *,
    alpha: float,
    delta: float,
    grid: Iterable[float] | None = None,
    binding: Binding | None = None,
    confidence: ConfidenceMethod = "isotonic",
    seed: SupportsIndex = 0,
    groups: Iterable[Hashable] | None = None,
    created: str | None = None,
    choice: EstimatorChoice | None = None,
    prompts: Iterable[PromptForm | None] | None = None,
    also: Sequence[EngineAnswers] = (),
    n_recorded: int = 0,
) -> Calibration:
    """Find the largest threshold whose error rate is at most alpha, with probability at least 1 - delta.

    `uncertainties` (higher = less certain) and `correct` (True or False) describe one answer each. An answer whose
    score is None, NaN or infinite is never let through, and counted. `grid` holds thresholds fixed *without* these
    answers' labels, best from unlabelled scores of other questions; without it, a fifth of the answers (at most 300,
    chosen by `seed`) supplies about 30 quantiles and the rest is tested.

    `groups` names each answer's question. Copies of one question are not independent draws: they make the set look
    larger than it is, so only the first answer of each group is used, and the others are counted.

    `choice` tells how the estimator was learned from other answers, and is kept. If `groups` name a question among
    those that it was learned from, the set is refused.

    `prompts` are the forms of the answers' prompts (`model.render(conversation).form`; None: none was sent). Their
    common shape is kept, and the promise is about prompts of that shape. Without them the calibration gives a threshold
    and promises nothing.

    `also` are answers of other engines, for which the promise is to hold as well: with probability at least 1 - delta,
    the error rate among the answers let through is at most alpha for each of them. This needs `groups` and `binding`.

    `n_recorded` answers were read from a record; the calibration keeps their number.

    Where no threshold keeps the promise, `threshold` is None, with a `reason`: nothing is then let through.
    """
    alpha, delta = read_rate(alpha, "alpha"), read_rate(delta, "delta")
    if confidence not in ("isotonic", "platt"):
        raise CalibrationError(f"confidence must be 'isotonic' or 'platt', not {confidence!r}.")
    seed = _whole(seed)
    own = _Engine.read(uncertainties, correct, groups=groups, binding=binding)
    engines = [own, *_others(own, also)]
    if choice is not None:
        for engine in engines:
            choice.require_others(map(str, engine.questions or ()))
    outside = None if grid is None else read_grid(grid)
    tested, thresholds, first = _prepare(engines, outside, alpha=alpha, delta=delta, seed=seed)
    hardest, outcome = _outcome(engines, tested, thresholds, first=first, alpha=alpha, delta=delta)
    answers = engines[hardest].answers
    return Calibration.seal(
        created=created or datetime.datetime.now(datetime.UTC).date().isoformat(),
        alpha=alpha,
        delta=delta,
        n=answers.n,
        n_wrong=int((~answers.correct).sum()) + answers.n_unscored_wrong,
        n_unscored=answers.n_unscored,
        n_duplicates=answers.n_duplicates,
        n_tested=len(tested[hardest]),
        split_seed=seed if outside is None else None,
        grid=tuple(thresholds.tolist()),
        scores=tuple(np.sort(answers.scores).tolist()),
        confidence_map=fit(answers.scores, answers.correct, confidence) if len(answers.scores) else None,
        binding=_bound(engines, hardest),
        choice=choice,
        n_recorded=n_recorded,
        shape=None if prompts is None else PromptShape.of(read_prompts(prompts, own.answers)),
        **outcome,
    )


def _whole(seed: SupportsIndex) -> int:
    """A seed as an int, numpy's whole numbers included."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if number < 0 or isinstance(seed, bool):
        raise CalibrationError(f"seed must be a whole number that is not negative; it is {seed!r}.")
    return number


@dataclass(frozen=True)
class _Engine:
    """The answers of one engine; `questions` names them as the caller's rows are, None where they have no names."""

    answers: CalibrationSet
    questions: Sequence[Hashable] | None
    binding: Binding | None

    @classmethod
    def read(
        cls,
        uncertainties: Iterable[float | None],
        correct: Iterable[Any],
        *,
        groups: Iterable[Hashable] | None,
        binding: Binding | None,
    ) -> _Engine:
        """The columns, checked."""
        named = list(groups) if isinstance(groups, Iterable) else groups
        return cls(read_set(uncertainties, correct, groups=named), named, binding)

    @property
    def scored(self) -> Sequence[Hashable]:
        """The names of the questions that have a score."""
        rows = self.answers.scored
        return rows if self.questions is None else [self.questions[row] for row in rows]


def _others(own: _Engine, also: Sequence[EngineAnswers]) -> list[_Engine]:
    """The further engines: their bindings are the first one's, except for the engine."""
    others: list[_Engine] = []
    for answers in also:
        if own.binding is None or own.questions is None:
            raise CalibrationError(
                "Answers of several engines need a binding for each, and groups: which engine, and which question."
            )
        engine = answers.binding.engine
        taken = [own.binding.engine, *(before.binding.engine for before in also[: len(others)])]
        if engine is None or engine in taken or None in taken:
            raise CalibrationError(
                "The bindings of several engines must name a fingerprint each, by which answers are distinguished; "
                f"{own.binding.fingerprint!r} and {answers.binding.fingerprint!r} do not."
            )
        own.binding.in_engine(engine).require(answers.binding)
        others.append(
            _Engine.read(answers.uncertainties, answers.correct, groups=answers.groups, binding=answers.binding)
        )
    return others


def _bound(engines: Sequence[_Engine], at: int) -> Binding | None:
    """The binding of one engine, which names the others."""
    own = engines[at].binding
    others = tuple(x.binding.engine for i, x in enumerate(engines) if i != at and x.binding is not None)
    return own.model_copy(update={"also": others}) if own is not None and others else own


def _prepare(
    engines: Sequence[_Engine], outside: NDArray[np.float64] | None, *, alpha: float, delta: float, seed: int
) -> tuple[list[NDArray[np.intp]], NDArray[np.float64], int]:
    """(each engine's rows to test, rising thresholds, index of the first one to test); no label is looked at.

    Questions are spent on the grid: none of them is tested, whichever engine answered it.
    """
    columns = [engine.answers.scores for engine in engines]
    if outside is not None:
        firsts = [fixed_sequence.first_testable(scores, outside, alpha=alpha, delta=delta) for scores in columns]
        return [np.arange(len(scores)) for scores in columns], outside, max(firsts)
    questions = list(dict.fromkeys(question for engine in engines for question in engine.scored))
    for_grid, _ = fixed_sequence.split(len(questions), seed=seed)
    spent: set[Hashable] = {questions[int(i)] for i in for_grid}
    is_spent = [np.array([question in spent for question in engine.scored], dtype=np.bool_) for engine in engines]
    tested = [np.flatnonzero(~rows) for rows in is_spent]
    if not spent:
        return tested, np.empty(0), 0
    seen = np.concatenate([scores[rows] for scores, rows in zip(columns, is_spent, strict=True)])
    grid = fixed_sequence.split_grid(seen, n_tested=min(map(len, tested)), alpha=alpha, delta=delta)
    return tested, grid, 0


def _outcome(
    engines: Sequence[_Engine],
    tested: Sequence[NDArray[np.intp]],
    grid: NDArray[np.float64],
    *,
    first: int,
    alpha: float,
    delta: float,
) -> tuple[int, dict[str, Any]]:
    """The engine that sets the threshold, and the fields of a `Calibration` that depend on its walk.

    Every engine walks the same thresholds, each at level delta, and all stop where the first of them stops. That the
    promise then fails for any one of them has probability at most delta, not delta for each: to go past the first
    threshold whose risk exceeds alpha for some engine, that engine's own test must fail (an intersection-union test:
    Berger, Technometrics 24, 1982).
    """

    def walked(until: NDArray[np.float64]) -> list[dict[str, Any]]:
        return [
            _walked(engine.answers, rows, until, first=first, alpha=alpha, delta=delta)
            for engine, rows in zip(engines, tested, strict=True)
        ]

    alone = walked(grid)
    thresholds = [fields["threshold"] for fields in alone]
    if None in thresholds:
        return (at := thresholds.index(None)), alone[at]
    together = walked(grid[grid <= min(thresholds)])
    hardest = max(range(len(engines)), key=lambda i: together[i]["risk_bound"])
    return hardest, together[hardest]


def _walked(
    answers: CalibrationSet,
    tested: NDArray[np.intp],
    grid: NDArray[np.float64],
    *,
    first: int,
    alpha: float,
    delta: float,
) -> dict[str, Any]:
    """What comes of one engine's walk over the grid."""
    scores, wrong = answers.scores[tested], ~answers.correct[tested]
    fewest = binomial.fewest_answers(alpha=alpha, delta=delta)
    if len(scores) < fewest or not len(grid):
        return {**_NOTHING, "reason": _too_few(answers, len(scores), fewest, alpha=alpha, delta=delta)}
    walk = fixed_sequence.walk(scores, wrong, grid, first=first, alpha=alpha, delta=delta)
    if walk.accepted is None:
        return {**_NOTHING, "reason": _not_kept(walk, float(grid[first]), fewest, alpha=alpha, delta=delta)}
    threshold = float(grid[walk.accepted])
    return {
        "threshold": threshold,
        "reason": None,
        "coverage": int((answers.scores <= threshold).sum()) / answers.n,
        "risk_bound": binomial.upper_bound(walk.wrong, walk.answered, delta=delta),
        "n_answered": walk.answered,
        "n_answered_wrong": walk.wrong,
    }


def _too_few(answers: CalibrationSet, n_tested: int, fewest: int, *, alpha: float, delta: float) -> str:
    """Why a set is too small, whatever its labels."""
    if not len(answers.scores):
        return (
            f"None of the {answers.n} answers has a finite score, so none could be let through. "
            "Look at why: an empty answer has none."
        )
    counts = f"{answers.n} answers, {len(answers.scores)} of them scored, {n_tested} left to test"
    return (
        f"Too few answers ({counts}): even without a single error, an error rate of at most {alpha:g} with probability "
        f"{1 - delta:g} takes {fewest} tested answers, and about three times as many to allow for errors. "
        "Label more answers, or promise less (a larger alpha or delta). In Python, a grid made from unlabelled scores "
        "(calibrate(..., grid=...)) spends none on it."
    )


def _not_kept(walk: fixed_sequence.Walk, threshold: float, fewest: int, *, alpha: float, delta: float) -> str:
    """Why even the most certain answers fail the promise, and what would help."""
    if walk.answered < fewest:
        return (
            f"Only {walk.answered} tested answers are at or below the threshold to begin with ({threshold:g}); "
            f"{fewest} without an error are the fewest that could show an error rate of at most {alpha:g} with "
            f"probability {1 - delta:g}. Label more answers. In Python, calibrate(..., grid=...) takes a grid that "
            "reaches higher uncertainties."
        )
    allowed = binomial.most_errors(walk.answered, alpha=alpha, delta=delta)
    seen = (
        f"Of the {walk.answered} most certain answers tested (uncertainty at most {threshold:g}), {walk.wrong} were "
        f"wrong; at most {allowed} may be, for an error rate of at most {alpha:g} with probability {1 - delta:g}. "
    )
    if walk.wrong <= alpha * walk.answered:
        return seen + "Their error rate is within alpha but not surely so: label more answers, or promise less."
    return seen + (
        "Their error rate is above alpha, so more answers alone are unlikely to help: "
        "promise less (a larger alpha), or use a model or an estimator that tells right from wrong better."
    )

"""The threshold that the answers of one engine allow, or those of several for which a promise is to hold together.

Why: docs/decisions.md#0180
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from semgrad_guard.calibration import gates, hand_grades, planning
from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_set import CalibrationSet, Copies, read_grades, read_set
from semgrad_guard.calibration.sentences import SentenceSet, sentence_advice
from semgrad_guard.errors import CalibrationError


class Reachable(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The promise that labels support which do not support the one that was asked for (see `gates`).

    Of the `n_answered` tested answers up to `threshold`, `n_wrong` were wrong. Of all such answers at most a share
    `alpha` is, with the probability of the promise.
    """

    threshold: float
    alpha: float = Field(gt=0, lt=1)
    n_answered: int = Field(ge=1)
    n_wrong: int = Field(ge=0)

    @classmethod
    def of(cls, walk: gates.Walk, *, alpha: float) -> Reachable | None:
        """That of a walk that accepted no gate; None where it has none, or no bound."""
        if walk.accepted is not None or not walk.answered or not walk.spare:
            return None
        bound = gates.upper_bound(walk.wrong, walk.answered, delta=walk.spare)
        if bound >= 1:
            return None
        counts = {"n_answered": walk.answered, "n_wrong": walk.wrong}
        return cls(threshold=walk.thresholds[0], alpha=max(alpha, bound), **counts)

    def in_words(self, tested: int, *, requested: float) -> str:
        """What would be delivered of so many tested answers, and the promise that was requested."""
        right = self.n_answered - self.n_wrong
        low = 1 - gates.upper_bound(right, self.n_answered, delta=0.025)
        high = gates.upper_bound(self.n_wrong, self.n_answered, delta=0.025)
        return (
            f"At u <= {self.threshold:.4g}, {self.n_answered} of {tested} delivered, {self.n_wrong} wrong: "
            f"{self.n_wrong / self.n_answered:.0%} (95% interval {100 * low:.0f}-{high:.0%}). You asked for at most "
            f"{100 * requested:g}%; these labels support at most {upwards(self.alpha)}."
        )


def upwards(share: float) -> str:
    """A share in per cent with one decimal, rounded up."""
    return f"{math.ceil(1000 * share - 1e-9) / 10:g}%"


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


@dataclass(frozen=True)
class Engine:
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
        copies: Copies,
    ) -> Engine:
        """The columns, checked."""
        named = list(groups) if isinstance(groups, Iterable) else groups
        return cls(read_set(uncertainties, correct, groups=named, copies=copies), named, binding)

    @property
    def names(self) -> Sequence[Hashable]:
        """The names of the scored answers' questions, or their rows."""
        rows = self.answers.scored
        return rows if self.questions is None else [self.questions[row] for row in rows]

    def draw(self, *, alpha: float, count: int, machine: bool) -> hand_grades.Part:
        """The surest answers, and the part of them that people grade."""
        return hand_grades.draw(self.answers.scores, self.names, alpha=alpha, count=count, machine=machine)

    def graded(self, part: hand_grades.Part, labels: Sequence[Any]) -> CalibrationSet:
        """The answers that people graded.

        Raises:
            CalibrationError: one has no grade.
        """
        rows = part.rows(self.answers.scored)[: part.record.count]
        if missing := [row for row in rows if labels[row] is None]:
            raise CalibrationError(
                f"{len(missing)} of the {len(rows)} answers that are to be graded by hand have no grade (row "
                f"{missing[0]}, for example). Grade those of `rows_to_grade`, all of them: without the hard ones the "
                "rest is no random sample."
            )
        scores, correct = self.answers.scores[part.by_hand], self.answers.correct[part.by_hand]
        return replace(self.answers, scores=scores, correct=correct, n_unscored=0, n_unscored_wrong=0)


def others_of(own: Engine, also: Sequence[EngineAnswers], *, copies: Copies) -> list[Engine]:
    """The further engines: their bindings are the first one's, except for the engine."""
    others: list[Engine] = []
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
        columns = answers.uncertainties, answers.correct
        others.append(Engine.read(*columns, groups=answers.groups, binding=answers.binding, copies=copies))
    return others


def joint_binding(engines: Sequence[Engine], at: int) -> Binding | None:
    """The binding of one engine, which names the others."""
    own = engines[at].binding
    others = tuple(x.binding.engine for i, x in enumerate(engines) if i != at and x.binding is not None)
    return own.model_copy(update={"also": others}) if own is not None and others else own


_NOTHING: dict[str, Any] = {
    "threshold": None,
    "coverage": 0.0,
    "bound_if_fixed": None,
    "n_answered": 0,
    "n_answered_wrong": 0,
}


def at_gates(
    engines: Sequence[Engine], sentences: SentenceSet | None, *, robust: bool, alpha: float, delta: float
) -> tuple[int, dict[str, Any]]:
    """The engine that sets the threshold, and the fields of a `Calibration` that depend on its walk.

    Every engine walks its own gates at level delta, and the smallest threshold is delivered: the promise fails for any
    of them with probability at most delta (see `gates`).
    """
    outcomes: list[dict[str, Any]] = []
    for engine in engines:
        answers = engine.answers
        if sentences is None:
            walk = gates.walk(answers.scores, ~answers.correct, robust=robust, alpha=alpha, delta=delta)
        else:
            walk = sentences.part(answers.scored).walk(robust=robust, alpha=alpha, delta=delta)
        walk = walk if len(engines) == 1 else replace(walk, spare=0.0)
        outcome = _outcome(answers, walk, sentences, alpha=alpha, delta=delta)
        outcomes.append({"procedure": walk.procedure, "grid": walk.thresholds, **outcome})
    return min(enumerate(outcomes), key=lambda numbered: _order(numbered[1]))


def of_part(
    engine: Engine,
    part: hand_grades.Part,
    tested: CalibrationSet,
    machine: Iterable[Any] | None,
    *,
    alpha: float,
    delta: float,
) -> dict[str, Any]:
    """The fields that depend on the walk over the surest answers, of which `tested` are graded by hand."""
    answers, surest, record = engine.answers, part.surest, part.record
    if machine is None:
        walk = gates.walk(tested.scores, ~tested.correct, alpha=alpha, delta=delta, known=answers.scores)
    else:
        grades = read_grades(machine, answers, part.rows(answers.scored))
        names = part.rows(engine.names)
        columns = answers.scores[surest], ~answers.correct[surest], ~grades, names
        rates = {"alpha": alpha, "delta": delta}
        walk = hand_grades.walk_with_machine(*columns, by_hand=record.count, **rates, known=answers.scores)
    outcome = _outcome(tested, walk, alpha=alpha, delta=delta)
    if walk.threshold is not None:
        outcome["coverage"] = int((answers.scores <= walk.threshold).sum()) / answers.n
    else:
        beside = "" if machine is None else ", and a machine's grades of all"
        outcome["reason"] = (
            f"Of {walk.answered or record.count} grades by hand of the most certain answers, {walk.wrong} are 'wrong'. "
            f"These{beside} do not show an error rate of at most {alpha:g} with probability {1 - delta:g}. Grade more "
            "by hand, promise less (a larger alpha or delta), or take scores that tell right from wrong better."
            + _no_better(tested, walk, alpha=alpha)
        )
    if machine is not None:
        outcome["bound_if_fixed"] = None  # exact for the grades by hand alone
    return {"procedure": walk.procedure, "grid": walk.thresholds, **outcome}


def _order(outcome: Mapping[str, Any]) -> tuple[float, float]:
    """Engines without a threshold come first, then those with the smallest; of equal ones that of the largest bound."""
    threshold = outcome["threshold"]
    return (-math.inf if threshold is None else threshold, -(outcome["bound_if_fixed"] or 0.0))


def on_grid(
    engines: Sequence[Engine], grid: NDArray[np.float64], *, alpha: float, delta: float
) -> tuple[int, dict[str, Any]]:
    """The same for thresholds from outside.

    Every engine walks the same thresholds, each at level delta, and all stop where the first of them stops. That the
    promise then fails for any one of them has probability at most delta, not delta for each: to go past the first
    threshold whose risk exceeds alpha for some engine, that engine's own test must fail (an intersection-union test:
    Berger, Technometrics 24, 1982).
    """
    firsts = [gates.first_testable(e.answers.scores, grid, alpha=alpha, delta=delta) for e in engines]

    def walked(until: NDArray[np.float64]) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = []
        for answers in (engine.answers for engine in engines):
            walk = gates.walk_grid(answers.scores, ~answers.correct, until, first=max(firsts), alpha=alpha, delta=delta)
            outcomes.append({"grid": tuple(grid.tolist()), **_outcome(answers, walk, alpha=alpha, delta=delta)})
        return outcomes

    alone = walked(grid)
    thresholds = [outcome["threshold"] for outcome in alone]
    if None in thresholds:
        return (at := thresholds.index(None)), alone[at]
    together = walked(grid[grid <= min(thresholds)])
    return min(enumerate(together), key=lambda numbered: _order(numbered[1]))


def _outcome(
    answers: CalibrationSet, walk: gates.Walk, sentences: SentenceSet | None = None, *, alpha: float, delta: float
) -> dict[str, Any]:
    """The fields of a `Calibration` that depend on one engine's walk."""
    threshold = walk.threshold
    fewest = gates.fewest_answers(alpha=alpha, delta=delta)
    if threshold is None:
        reason = _why_none(answers, walk, fewest, alpha=alpha, delta=delta)
        scored = len(answers.scores)
        if not scored or (scored >= fewest and walk.answered < fewest):
            return {**_NOTHING, "reason": reason}
        reason += _no_better(answers, walk, alpha=alpha)
        rates = {"alpha": alpha, "delta": delta}
        planned = (
            planning.advice(answers.scores, answers.correct, **rates)
            if sentences is None
            else sentence_advice(sentences.part(answers.rows), **rates)
        )
        reachable = Reachable.of(walk, alpha=alpha)
        useful = reachable is not None and reachable.alpha < answers.error
        return {**_NOTHING, "reason": f"{reason} {planned}", "reachable": reachable if useful else None}
    return {
        "threshold": threshold,
        "reason": None,
        "coverage": int((answers.scores <= threshold).sum()) / answers.n,
        "bound_if_fixed": gates.upper_bound(walk.wrong, walk.answered, delta=delta),
        "n_answered": walk.answered,
        "n_answered_wrong": walk.wrong,
    }


def _no_better(answers: CalibrationSet, walk: gates.Walk, *, alpha: float) -> str:
    """Where the reachable promise is not offered: why not."""
    found = Reachable.of(walk, alpha=alpha)
    if found is None or found.alpha < answers.error:
        return ""
    return (
        f" These labels support a promise of at most {upwards(found.alpha)}, no better than without a guard "
        f"({answers.error:.1%} wrong)."
    )


def _why_none(answers: CalibrationSet, walk: gates.Walk, fewest: int, *, alpha: float, delta: float) -> str:
    """Why a set is too small, whatever its labels; or why even the most certain answers fail the promise."""
    if not len(answers.scores):
        return (
            f"None of the {answers.n} answers has a finite score, so none could be let through. "
            "Look at why: an empty answer has none."
        )
    if len(answers.scores) < fewest:
        return (
            f"Too few answers ({answers.n} answers, {len(answers.scores)} of them scored): even without a single error,"
            f" an error rate of at most {alpha:g} with probability {1 - delta:g} takes {fewest} scored answers."
        )
    if walk.answered < fewest:
        return (
            f"Only {walk.answered} answers are at or below the first threshold of the grid; {fewest} without an error "
            f"are the fewest that could show an error rate of at most {alpha:g} with probability {1 - delta:g}. Give "
            "a grid that reaches higher uncertainties, or none."
        )
    allowed = int(gates.most_errors(walk.answered, alpha=alpha, delta=delta))
    return (
        f"Of the {walk.answered} most certain answers, {walk.wrong} were wrong; at most {allowed} may be, for an error "
        f"rate of at most {alpha:g} with probability {1 - delta:g}."
    )

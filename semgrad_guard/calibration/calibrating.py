"""`calibrate`: from scores and labels to a threshold that keeps a promise, and P(correct) for every score.

The promise: among the answers that are let through, the error rate is at most alpha, with probability at least
1 - delta over the draw of the calibration set. It assumes that calibration questions and later questions are
exchangeable (drawn from one population, independently); `drift.py` watches for the day when they are not.

Why: docs/adr/0180-one-threshold-for-several-engines.md
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.calibration import binomial, fixed_sequence, gates, hand_grades, planning
from semgrad_guard.calibration.binding import Binding
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.calibration_set import (
    CalibrationSet,
    Copies,
    read_column,
    read_grades,
    read_grid,
    read_prompts,
    read_rate,
    read_set,
)
from semgrad_guard.calibration.choice import EstimatorChoice
from semgrad_guard.calibration.confidence import ConfidenceMethod, fit
from semgrad_guard.calibration.prompt_shape import PromptForm, PromptShape
from semgrad_guard.calibration.sentence_set import SentenceSet
from semgrad_guard.calibration.slots import read_slots
from semgrad_guard.calibration.tries import share_of
from semgrad_guard.errors import CalibrationError

_NOTHING: dict[str, Any] = {
    "threshold": None,
    "coverage": 0.0,
    "bound_if_fixed": None,
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
    confidence: ConfidenceMethod | None = None,
    robust: bool = False,
    groups: Iterable[Hashable] | None = None,
    copies: Copies | None = None,
    tries: int = 0,
    created: str | None = None,
    choice: EstimatorChoice | None = None,
    prompts: Iterable[PromptForm | None] | None = None,
    extra_prompts: Iterable[PromptForm] = (),
    slots: Iterable[str] = (),
    also: Sequence[EngineAnswers] = (),
    n_recorded: int = 0,
    aurocs: Mapping[str, float | None] | None = None,
    auto: str | None = None,
    by_hand: int | None = None,
    machine: Iterable[Any] | None = None,
    sentences: SentenceSet | None = None,
    kind: Iterable[str] | None = None,
) -> Calibration:
    """Find the largest threshold whose error rate is at most alpha, with probability at least 1 - delta.

    `uncertainties` (higher = less certain) and `correct` (True or False) describe one answer each. An answer whose
    score is None, NaN or infinite is never let through, and counted. All scored answers are tested at gates (see
    `gates`); `robust` takes the variant for scores with confident mistakes, and has to be chosen before labels are
    seen. `grid` holds thresholds fixed *without* these answers' labels, from unlabelled scores of other questions: they
    are tested instead (see `fixed_sequence`).

    `groups` names each answer's question. In a list of questions, copies of one are not independent draws: they make
    the set look larger than it is, so only the first answer of each group is used, and the others are counted
    (`copies="once"`, the default). In a sample of traffic a popular question repeats because it is asked often:
    `copies="keep"` uses every answer, and the promise is about the traffic.

    `tries` numbers the calibrations on these labels, this one included: they share delta (see `tries.py`). 0: this is
    the only one.

    `confidence` is the map to P(correct); None takes Platt's curve over ranks for fewer than 300 scored answers, and
    isotonic regression from then on.

    `choice` tells how the estimator was learned from other answers, and is kept. If `groups` name a question among
    those that it was learned from, the set is refused; not of traffic, in which a question that is drawn for both parts
    will be drawn again.

    `prompts` are the forms of the answers' prompts (`model.render(conversation).form`; None: none was sent). Their
    common shape is kept, and the promise is about prompts of that shape. Without them the calibration gives a threshold
    and promises nothing. `extra_prompts` are forms of further real prompts, without labels, that are to be familiar as
    well (second turns, greetings); the promise about them assumes that questions in such prompts are like those of the
    labelled ones. `slots` are pieces of prompts in which a name or a date varies ("You help {user}."; see `slots.py`).

    `also` are answers of other engines, for which the promise is to hold as well: with probability at least 1 - delta,
    the error rate among the answers let through is at most alpha for each of them. This needs `groups` and `binding`.

    `n_recorded` answers were read from a record; the calibration keeps their number. It keeps `aurocs`, too: those of
    all estimators that scored these answers, and `auto`, the one of them that `--estimator auto` would take.

    `by_hand` is for few grades by people: only so many of the answers are looked at, a random part of the surest ones
    (`rows_to_grade`); `correct` may be None for all others. `machine` has a grader's grades of the same answers, True
    or False (None where it is not needed): they are corrected by those of the people, whatever their mistakes
    (prediction-powered bets, see `hand_grades`). Decide on both before you see labels.

    `sentences` are those of the answers (see `calibrate_sentences`).

    `kind` names the kind of each answer's question. Each kind is calibrated by itself, with its own threshold and
    promise at delta (`calibration.kinds`), and later questions have to come with their kind.

    Where no threshold keeps the promise, `threshold` is None, with a `reason`: nothing is then let through.
    """
    if kind is not None:
        return _of_kinds(kind, **{name: value for name, value in locals().items() if name != "kind"})
    alpha, delta = read_rate(alpha, "alpha"), read_rate(delta, "delta")
    _require_choices(confidence, copies)
    _require_by_hand(by_hand, machine, others=grid is not None or robust or bool(also))
    if sentences is not None and (grid is not None or also or by_hand is not None):
        raise CalibrationError("A promise about sentences takes no `grid`, no `also` and no `by_hand`: leave them out.")
    treated, labels = copies or "once", [] if by_hand is None else list(correct)
    known = correct if by_hand is None else [False if label is None else label for label in labels]
    own = _Engine.read(uncertainties, known, groups=groups, binding=binding, copies=treated)
    engines = [own, *_others(own, also, copies=treated)]
    if choice is not None and copies != "keep":
        for engine in engines:
            choice.require_others(map(str, engine.questions or ()))
    extra_prompts, slots = list(extra_prompts), read_slots(slots)
    if prompts is None and (extra_prompts or slots):
        raise CalibrationError("extra_prompts and slots widen the shape of `prompts`: pass these, too.")
    outside, part = None if grid is None else read_grid(grid), None
    if robust and outside is not None:
        raise CalibrationError("`robust` is about gates, which a `grid` replaces. Give one of them.")
    level, at, tested = share_of(delta, tries), 0, own.answers
    if by_hand is not None:
        part = own.draw(alpha=alpha, count=by_hand, machine=machine is not None)
        tested = own.graded(part, labels)
        outcome = _of_part(own, part, tested, machine, alpha=alpha, delta=level)
    elif outside is None:
        at, outcome = _at_gates(engines, sentences, robust=robust, alpha=alpha, delta=level)
    else:
        at, outcome = _on_grid(engines, outside, alpha=alpha, delta=level)
    answers = engines[at].answers
    tested = answers if part is None else tested
    parts = None if sentences is None else sentences.part(answers.rows)
    graded = (tested.scores, tested.correct) if parts is None else parts.graded
    return Calibration.seal(
        created=created or datetime.datetime.now(datetime.UTC).date().isoformat(),
        alpha=alpha,
        delta=delta,
        n=answers.n,
        n_wrong=int((~tested.correct).sum()) + tested.n_unscored_wrong,
        n_unscored=answers.n_unscored,
        n_duplicates=answers.n_duplicates,
        n_tested=len(tested.scores),
        split_seed=None,
        scores=tuple(np.sort(answers.scores).tolist()),
        confidence_map=fit(*graded, confidence) if len(graded[0]) else None,
        binding=_bound(engines, at),
        choice=choice,
        n_recorded=n_recorded,
        shape=None if prompts is None else _shape(read_prompts(prompts, own.answers), extra_prompts, slots),
        copies=copies,
        tries=tries,
        auroc=planning.auroc(*graded),
        aurocs=dict(aurocs or {}),
        auto=auto,
        by_hand=None if part is None else part.record,
        sentences=None if parts is None else parts.record(outcome["threshold"]),
        **outcome,
    )


def _of_kinds(
    kind: Iterable[str], *, prompts: Any, groups: Any, extra_prompts: Any, slots: Any, **how: Any
) -> Calibration:
    """The calibration of all answers, with those of each kind in it.

    Raises:
        CalibrationError: a kind is no text, or an option does not go with kinds.
    """
    if how["also"] or any(how[name] is not None for name in ("by_hand", "grid", "sentences")):
        raise CalibrationError("`kind` takes no `grid`, `by_hand`, `sentences` or `also`: leave them out.")
    columns = {"uncertainties": how.pop("uncertainties"), "correct": how.pop("correct")}
    columns |= {name: column for name, column in (("prompts", prompts), ("groups", groups)) if column is not None}
    columns = {name: read_column(column, name) for name, column in columns.items()}
    how |= {"extra_prompts": list(extra_prompts), "slots": read_slots(slots)}
    named = read_column(kind, "kind")
    if len(named) != len(columns["correct"]) or not all(isinstance(one, str) and one.strip() for one in named):
        raise CalibrationError("`kind` names the kind of question of each answer, a text; give one for each.")
    parts: dict[str, Calibration] = {}
    for one in dict.fromkeys(named):
        rows = [row for row, own in enumerate(named) if own == one]
        part = calibrate(**{name: [column[row] for row in rows] for name, column in columns.items()}, **how)
        parts[one] = part.with_content(kind=one)
    return calibrate(**columns, **how).with_content(kinds=parts)


def _require_by_hand(by_hand: int | None, machine: object, *, others: bool) -> None:
    if by_hand is None and machine is not None:
        raise CalibrationError("`machine` has the grades next to those of people: give `by_hand`, too.")
    if by_hand is not None and others:
        raise CalibrationError("`by_hand` takes no `grid`, no `robust` and no `also`: leave them out.")


def _require_choices(confidence: object, copies: object) -> None:
    if confidence not in ("isotonic", "platt", "ranks", None):
        raise CalibrationError(f"confidence must be 'isotonic' or 'platt' or 'ranks', not {confidence!r}.")
    if copies not in ("keep", "once", None):
        raise CalibrationError(f"copies must be 'keep' (a sample of traffic) or 'once' (a list), not {copies!r}.")


def _shape(prompts: Sequence[PromptForm], extra: Iterable[PromptForm], slots: Iterable[str]) -> PromptShape:
    others = list(extra)
    if any(not isinstance(form, PromptForm) for form in others):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CalibrationError("extra_prompts are forms of prompts: `model.render(conversation).form`.")
    return PromptShape.of(prompts, extra=others, slots=slots)


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
        copies: Copies,
    ) -> _Engine:
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


def _others(own: _Engine, also: Sequence[EngineAnswers], *, copies: Copies) -> list[_Engine]:
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
        columns = answers.uncertainties, answers.correct
        others.append(_Engine.read(*columns, groups=answers.groups, binding=answers.binding, copies=copies))
    return others


def _bound(engines: Sequence[_Engine], at: int) -> Binding | None:
    """The binding of one engine, which names the others."""
    own = engines[at].binding
    others = tuple(x.binding.engine for i, x in enumerate(engines) if i != at and x.binding is not None)
    return own.model_copy(update={"also": others}) if own is not None and others else own


def _at_gates(
    engines: Sequence[_Engine], sentences: SentenceSet | None, *, robust: bool, alpha: float, delta: float
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
        outcome = _outcome(answers, walk, walk.threshold, alpha=alpha, delta=delta)
        outcomes.append({"procedure": walk.procedure, "grid": walk.thresholds, **outcome})
    return min(enumerate(outcomes), key=lambda numbered: _order(numbered[1]))


def _of_part(
    engine: _Engine,
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
        walk = gates.walk(tested.scores, ~tested.correct, alpha=alpha, delta=delta)
    else:
        grades = read_grades(machine, answers, part.rows(answers.scored))
        names = part.rows(engine.names)
        columns = answers.scores[surest], ~answers.correct[surest], ~grades, names
        walk = hand_grades.walk_with_machine(*columns, by_hand=record.count, alpha=alpha, delta=delta)
    outcome = _outcome(tested, walk, walk.threshold, alpha=alpha, delta=delta)
    if walk.threshold is not None:
        outcome["coverage"] = int((answers.scores <= walk.threshold).sum()) / answers.n
    else:
        beside = "" if machine is None else ", and a machine's grades of all"
        outcome["reason"] = (
            f"Of {walk.answered or record.count} grades by hand of the most certain answers, {walk.wrong} are 'wrong'. "
            f"These{beside} do not show an error rate of at most {alpha:g} with probability {1 - delta:g}. Grade more "
            "by hand, promise less (a larger alpha or delta), or take scores that tell right from wrong better."
        )
    if machine is not None:
        outcome["bound_if_fixed"] = None  # exact for the grades by hand alone
    return {"procedure": walk.procedure, "grid": walk.thresholds, **outcome}


def _order(outcome: Mapping[str, Any]) -> tuple[float, float]:
    """Engines without a threshold come first, then those with the smallest; of equal ones that of the largest bound."""
    threshold = outcome["threshold"]
    return (-math.inf if threshold is None else threshold, -(outcome["bound_if_fixed"] or 0.0))


def _on_grid(
    engines: Sequence[_Engine], grid: NDArray[np.float64], *, alpha: float, delta: float
) -> tuple[int, dict[str, Any]]:
    """The same for thresholds from outside.

    Every engine walks the same thresholds, each at level delta, and all stop where the first of them stops. That the
    promise then fails for any one of them has probability at most delta, not delta for each: to go past the first
    threshold whose risk exceeds alpha for some engine, that engine's own test must fail (an intersection-union test:
    Berger, Technometrics 24, 1982).
    """
    firsts = [fixed_sequence.first_testable(e.answers.scores, grid, alpha=alpha, delta=delta) for e in engines]

    def walked(until: NDArray[np.float64]) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = []
        for answers in (engine.answers for engine in engines):
            walk = fixed_sequence.walk(
                answers.scores, ~answers.correct, until, first=max(firsts), alpha=alpha, delta=delta
            )
            at = None if walk.accepted is None else float(until[walk.accepted])
            outcomes.append({"grid": tuple(grid.tolist()), **_outcome(answers, walk, at, alpha=alpha, delta=delta)})
        return outcomes

    alone = walked(grid)
    thresholds = [outcome["threshold"] for outcome in alone]
    if None in thresholds:
        return (at := thresholds.index(None)), alone[at]
    together = walked(grid[grid <= min(thresholds)])
    return min(enumerate(together), key=lambda numbered: _order(numbered[1]))


def _outcome(
    answers: CalibrationSet,
    walk: gates.Walk | fixed_sequence.Walk,
    threshold: float | None,
    *,
    alpha: float,
    delta: float,
) -> dict[str, Any]:
    """The fields of a `Calibration` that depend on one engine's walk and the threshold that it ended at."""
    fewest = binomial.fewest_answers(alpha=alpha, delta=delta)
    if threshold is None:
        if len(answers.scores) < fewest:
            return {**_NOTHING, "reason": _too_few(answers, fewest, alpha=alpha, delta=delta)}
        return {**_NOTHING, "reason": _not_kept(answers, walk, fewest, alpha=alpha, delta=delta)}
    return {
        "threshold": threshold,
        "reason": None,
        "coverage": int((answers.scores <= threshold).sum()) / answers.n,
        "bound_if_fixed": binomial.upper_bound(walk.wrong, walk.answered, delta=delta),
        "n_answered": walk.answered,
        "n_answered_wrong": walk.wrong,
    }


def _too_few(answers: CalibrationSet, fewest: int, *, alpha: float, delta: float) -> str:
    """Why a set is too small, whatever its labels."""
    if not len(answers.scores):
        return (
            f"None of the {answers.n} answers has a finite score, so none could be let through. "
            "Look at why: an empty answer has none."
        )
    return (
        f"Too few answers ({answers.n} answers, {len(answers.scores)} of them scored): even without a single error, an "
        f"error rate of at most {alpha:g} with probability {1 - delta:g} takes {fewest} scored answers. "
        + planning.advice(answers.scores, answers.correct, alpha=alpha, delta=delta)
    )


def _not_kept(
    answers: CalibrationSet, walk: gates.Walk | fixed_sequence.Walk, fewest: int, *, alpha: float, delta: float
) -> str:
    """Why even the most certain answers fail the promise, and what would help."""
    if walk.answered < fewest:
        return (
            f"Only {walk.answered} answers are at or below the first threshold of the grid; {fewest} without an error "
            f"are the fewest that could show an error rate of at most {alpha:g} with probability {1 - delta:g}. Give "
            "a grid that reaches higher uncertainties, or none."
        )
    allowed = int(binomial.most_errors(walk.answered, alpha=alpha, delta=delta))
    return (
        f"Of the {walk.answered} most certain answers, {walk.wrong} were wrong; at most {allowed} may be, for an error "
        f"rate of at most {alpha:g} with probability {1 - delta:g}. "
        + planning.advice(answers.scores, answers.correct, alpha=alpha, delta=delta)
    )

"""`calibrate`: from scores and labels to a threshold that keeps a promise, and P(correct) for every score; by answer
or, with `calibrate_sentences`, by sentence.

The promise: among the answers that are let through, the error rate is at most alpha, with probability at least
1 - delta over the draw of the calibration set. It assumes that calibration questions and later questions are
exchangeable (drawn from one population, independently); `drift.py` watches for the day when they are not.

`recalibrate` makes a new calibration from the decisions of an old one: a proposal, for a person to take or not. The
grades are those of promised answers that were drawn at random. These are a random part of the answers up to the old
threshold, so gates over them are exact as in `hand_grades`. Answers above it were not delivered, and none of them is
graded: a proposal can keep the threshold or lower it, and never raise it.
"""

from __future__ import annotations

import datetime
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from semgrad_guard.calibration import planning
from semgrad_guard.calibration.binding import Binding, EstimatorChoice
from semgrad_guard.calibration.calibration_record import Calibration, is_score
from semgrad_guard.calibration.calibration_set import (
    Copies,
    read_grid,
    read_languages,
    read_prompts,
    read_rate,
)
from semgrad_guard.calibration.confidence import ConfidenceMethod, fit
from semgrad_guard.calibration.gates import share_of
from semgrad_guard.calibration.hand_grades import HandGrades
from semgrad_guard.calibration.prompt_parts import read_slots
from semgrad_guard.calibration.prompt_shape import PromptShape
from semgrad_guard.calibration.sentences import AnswerSentences, Promise, SentenceSet
from semgrad_guard.calibration.thresholds import (
    Engine,
    EngineAnswers,
    at_gates,
    joint_binding,
    of_part,
    on_grid,
    others_of,
)
from semgrad_guard.errors import CalibrationError
from semgrad_guard.records import PromptForm
from semgrad_guard.settings import OnDoubt


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
    languages: Iterable[str] = (),
) -> Calibration:
    """Find the largest threshold whose error rate is at most alpha, with probability at least 1 - delta.

    `uncertainties` (higher = less certain) and `correct` (True or False) describe one answer each. An answer whose
    score is None, NaN or infinite is never let through, and counted. All scored answers are tested at gates (see
    `gates`); `robust` takes the variant for scores with confident mistakes, and has to be chosen before labels are
    seen. `grid` holds thresholds fixed *without* these answers' labels, from unlabelled scores of other questions: they
    are tested instead (see `gates`).

    `groups` names each answer's question. In a list of questions, copies of one are not independent draws: they make
    the set look larger than it is, so only the first answer of each group is used, and the others are counted
    (`copies="once"`, the default). In a sample of traffic a popular question repeats because it is asked often:
    `copies="keep"` uses every answer, and the promise is about the traffic.

    `tries` numbers the calibrations on these labels, this one included: they share delta (see `gates.py`). 0:
    this is the only one.

    `confidence` is the map to P(correct); None takes Platt's curve over ranks for fewer than 300 scored answers, and
    isotonic regression from then on.

    `choice` tells how the estimator was learned from other answers, and is kept. If `groups` name a question among
    those that it was learned from, the set is refused; not of traffic, in which a question that is drawn for both parts
    will be drawn again.

    `prompts` are the forms of the answers' prompts (`model.render(conversation).form`; None: none was sent). Their
    common shape is kept, and the promise is about prompts of that shape. Without them the calibration gives a threshold
    and promises nothing. `extra_prompts` are forms of further real prompts, without labels, that are to be familiar as
    well (second turns, greetings); the promise about them assumes that questions in such prompts are like those of the
    labelled ones. `slots` are pieces of prompts in which a name or a date varies ("You help {user}."; see
    `prompt_parts.py`).

    `also` are answers of other engines, for which the promise is to hold as well: with probability at least 1 - delta,
    the error rate among the answers let through is at most alpha for each of them. This needs `groups` and `binding`.

    `n_recorded` answers were read from a record; the calibration keeps their number. It keeps `aurocs`, too: those of
    all estimators that scored these answers, and `auto`, the one of them that `--estimator auto` would take.

    `by_hand` is for few grades by people: only so many of the answers are looked at, a random part of the surest ones
    (`rows_to_grade`); `correct` may be None for all others. `machine` has a grader's grades of the same answers, True
    or False (None where it is not needed): they are corrected by those of the people, whatever their mistakes
    (prediction-powered bets, see `hand_grades`). Decide on both before you see labels.

    `sentences` are those of the answers (see `calibrate_sentences`).

    `languages` are those of the questions, as tags of BCP 47. They are kept, and nothing is refused by them.

    Where no threshold keeps the promise, `threshold` is None, with a `reason`: nothing is then let through.
    """
    alpha, delta = read_rate(alpha, "alpha"), read_rate(delta, "delta")
    _require_choices(confidence, copies, by_hand, machine, others=grid is not None or robust or bool(also))
    if sentences is not None and (grid is not None or also or by_hand is not None):
        raise CalibrationError("A promise about sentences takes no `grid`, no `also` and no `by_hand`: leave them out.")
    treated, labels = copies or "once", [] if by_hand is None else list(correct)
    known = correct if by_hand is None else [False if label is None else label for label in labels]
    own = Engine.read(uncertainties, known, groups=groups, binding=binding, copies=treated)
    engines = [own, *others_of(own, also, copies=treated)]
    if choice is not None and copies != "keep":
        for engine in engines:
            choice.require_others(map(str, engine.questions or ()))
    extra_prompts, slots = list(extra_prompts), read_slots(slots)
    if prompts is None and (extra_prompts or slots):
        raise CalibrationError("extra_prompts and slots widen the shape of `prompts`: pass these, too.")
    if not all(isinstance(form, PromptForm) for form in extra_prompts):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CalibrationError("extra_prompts are forms of prompts: `model.render(conversation).form`.")
    seen = None if prompts is None else read_prompts(prompts, own.answers)
    shape = None if seen is None else PromptShape.of(seen, extra=extra_prompts, slots=slots)
    outside, part = None if grid is None else read_grid(grid), None
    if robust and outside is not None:
        raise CalibrationError("`robust` is about gates, which a `grid` replaces. Give one of them.")
    level, at, tested = share_of(delta, tries), 0, own.answers
    if by_hand is not None:
        part = own.draw(alpha=alpha, count=by_hand, machine=machine is not None)
        tested = own.graded(part, labels)
        outcome = of_part(own, part, tested, machine, alpha=alpha, delta=level)
    elif outside is None:
        at, outcome = at_gates(engines, sentences, robust=robust, alpha=alpha, delta=level)
    else:
        at, outcome = on_grid(engines, outside, alpha=alpha, delta=level)
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
        scores=tuple(np.sort(answers.scores).tolist()),
        confidence_map=fit(*graded, confidence) if len(graded[0]) else None,
        binding=joint_binding(engines, at),
        choice=choice,
        n_recorded=n_recorded,
        shape=shape,
        copies=copies,
        tries=tries,
        auroc=planning.auroc(*graded),
        aurocs=dict(aurocs or {}),
        languages=read_languages(languages),
        auto=auto,
        by_hand=None if part is None else part.record,
        sentences=None if parts is None else parts.record(outcome["threshold"]),
        **outcome,
    )


def _require_choices(confidence: object, copies: object, by_hand: int | None, machine: object, *, others: bool) -> None:
    if confidence not in ("isotonic", "platt", "ranks", None):
        raise CalibrationError(f"confidence must be 'isotonic' or 'platt' or 'ranks', not {confidence!r}.")
    if copies not in ("keep", "once", None):
        raise CalibrationError(f"copies must be 'keep' (a sample of traffic) or 'once' (a list), not {copies!r}.")
    if by_hand is None and machine is not None:
        raise CalibrationError("`machine` has the grades next to those of people: give `by_hand`, too.")
    if by_hand is not None and others:
        raise CalibrationError("`by_hand` takes no `grid`, no `robust` and no `also`: leave them out.")


def calibrate_sentences(
    answers: Sequence[AnswerSentences],
    *,
    on_doubt: OnDoubt,
    promise: Promise = "sentence",
    binding: Binding | None = None,
    **how: Any,
) -> Calibration:
    """Find the largest threshold that keeps a promise about the sentences that `on_doubt` delivers.

    `promise` is `"sentence"` (take an answer of which something is delivered, and one of its delivered sentences at
    random: it is wrong with probability at most alpha) or `"answer"` (of the answers from which something is delivered,
    at most alpha hold a wrong sentence); see `sentences.py`. The calibration is bound to `on_doubt`. `how` are
    options of `calibrate` (alpha, delta, copies, prompts ...); the answers name their questions.

    Raises:
        CalibrationError: a form or an entry is none of those described.
    """
    if on_doubt not in get_args(get_args(OnDoubt)[0]) or promise not in get_args(Promise):
        raise CalibrationError(
            'on_doubt is "stop", "drop", "mark" or "escalate", and promise is "sentence" or "answer"; they are '
            f"{on_doubt!r} and {promise!r}."
        )
    found = SentenceSet.read(answers, on_doubt=on_doubt, promise=promise)
    if binding is not None:
        form = {"by": "sentence", "on_doubt": on_doubt}
        binding = binding.model_copy(update={"settings": {**(binding.settings or {}), **form}})
    return calibrate(
        found.most_certain,
        found.all_right,
        groups=[answer.question for answer in answers],
        binding=binding,
        sentences=found,
        **how,
    )


def calibrate_runs(
    runs: Iterable[Hashable],
    uncertainties: Iterable[float | None],
    correct: Iterable[bool],
    *,
    alpha: float,
    delta: float,
    **options: Any,
) -> Calibration:
    """A calibration of decisions of which several belong together: to one run of an agent, or to one object.

    They depend on each other, so the run is the independent unit, as an answer is that of its sentences: "take a run of
    which something is let through, and one of these decisions at random: it is wrong with probability at most alpha".

    Args:
        runs: the run of each decision.
        uncertainties: that of each decision; None: it has none, and is never let through.
        correct: whether letting it through is right.
        alpha: the largest error rate of that drawn decision, in (0, 1).
        delta: the largest probability of breaking that promise, in (0, 1).
        **options: others of `calibrate` (binding, tries; prompts, one for each run in the order of their first
            decisions).

    Raises:
        CalibrationError: the columns differ in length, or an entry cannot be read.
    """
    by_run: dict[Hashable, tuple[list[float | None], list[bool]]] = {}
    try:
        for run, uncertainty, right in zip(runs, uncertainties, correct, strict=True):
            scores, grades = by_run.setdefault(run, ([], []))
            scores.append(uncertainty)
            grades.append(right)
    except ValueError as error:
        raise CalibrationError(f"Each decision has a run, an uncertainty and a label: {error}.") from None
    answers = [AnswerSentences(f"run {run}", "", *own, [None] * len(own[0])) for run, own in by_run.items()]
    found = SentenceSet.read(answers, on_doubt="drop", promise="sentence")
    return calibrate(found.most_certain, found.all_right, alpha=alpha, delta=delta, sentences=found, **options)


@dataclass(frozen=True)
class Proposal:
    """A new calibration in the place of an old one. Nothing takes it by itself."""

    old: Calibration
    new: Calibration

    def __str__(self) -> str:
        old, new = self.old, self.new
        before = sum(old.lets_through(score) for score in new.scores) / new.n
        graded = f"{new.n_tested} answers drawn at random, {new.n_wrong} of them wrong"
        if new.threshold is None:
            return f"No threshold up to the present one keeps the promise, by the grades of {graded}. {new.reason}"
        kept = "the same" if new.threshold == old.threshold else f"{old.threshold:.4g} now"
        return (
            f"Proposed threshold: {new.threshold:.4g} ({kept}), by the grades of {graded}. It would let "
            f"{new.coverage:.0%} of the {new.n} answers through ({before:.0%} now). Of the graded answers it would "
            f"withhold {new.n_tested - new.n_answered}, and {new.n_wrong - new.n_answered_wrong} of these were wrong."
        )


def recalibrate(
    old: Calibration, scores: Sequence[float | None], grades: Sequence[tuple[float, bool]], *, tries: int = 0
) -> Proposal:
    """Propose a calibration with the promise of an old one.

    Args:
        old: the calibration that has decided.
        scores: the uncertainties of all its answers, delivered or not (None: an answer has none).
        grades: the uncertainty of each promised answer that was drawn at random and graded, and whether it was right.
        tries: numbers the proposals on these grades, this one included; 0: there is no other.

    Raises:
        CalibrationError: the old calibration has no threshold, no answer is graded, or the promise is by engine, or
            about sentences.
    """
    if old.threshold is None or not grades:
        why = "it lets nothing through" if old.threshold is None else "none of its answers drawn at random is graded"
        raise CalibrationError(
            f"Calibration {old.id} cannot be made anew from its decisions: {why}. Calibrate on graded answers instead."
        )
    if old.binding is not None and old.binding.also:
        raise CalibrationError(
            f"Calibration {old.id} has a promise for each of several engines, and the log does not tell which of them "
            "answered. Calibrate on graded answers of each instead."
        )
    if old.sentences is not None:
        raise CalibrationError(
            f"Calibration {old.id} is about sentences, and the log keeps no score of these. Calibrate on graded "
            "answers by sentence instead."
        )
    known = sorted(score for score in scores if is_score(score))
    delivered = sum(score <= old.threshold for score in known)
    found = calibrate(*zip(*grades, strict=True), alpha=old.alpha, delta=old.delta, copies="keep", tries=tries)
    # The last gate holds all that were graded, which are drawn from up to the old threshold.
    grid = (*found.grid[:-1], old.threshold)
    threshold = None if found.threshold is None else grid[found.grid.index(found.threshold)]
    new = found.with_content(
        threshold=threshold,
        grid=grid,
        n=len(scores),
        n_unscored=len(scores) - len(known),
        scores=tuple(known),
        coverage=sum(threshold is not None and score <= threshold for score in known) / len(scores),
        binding=None if old.binding is None else old.binding.model_copy(update={"grader": "human"}),
        choice=old.choice,
        shape=old.shape,
        requested=old.requested,
        languages=old.languages,
        by_hand=HandGrades(count=len(grades), share=delivered / len(known), drawn_from=delivered, below=old.threshold),
    )
    return Proposal(old, new)

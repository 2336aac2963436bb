"""`calibrate`: from scores and labels to a threshold that keeps a promise, and P(correct) for every score; by answer
or, with `calibrate_sentences`, by sentence.

The promise: among the answers that are let through, the error rate is at most alpha, with probability at least
1 - delta over the draw of the calibration set. It assumes that calibration questions and later questions are
exchangeable (drawn from one population, independently); `monitors.py` watches for the day when they are not.

`recalibrate` makes a new calibration from the decisions of an old one: a proposal, for a person to take or not. The
grades are those of promised answers that were drawn at random. These are a random part of the answers up to the old
threshold, so gates over them are exact as in `planning`. Answers above it were not delivered, and none of them is
graded: a proposal can keep the threshold or lower it, and never raise it.
"""

from __future__ import annotations

import datetime
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from semgrad_guard.calibration import planning
from semgrad_guard.calibration.binding import Binding, EstimatorChoice, Unit
from semgrad_guard.calibration.calibration_record import Calibration
from semgrad_guard.calibration.calibration_set import (
    ABSTAINED,
    Copies,
    Prompts,
    claims,
    read_column,
    read_prompts,
    read_rate,
    read_set,
    require_same_length,
)
from semgrad_guard.calibration.gates import share_of
from semgrad_guard.calibration.prompt_shape import PromptShape
from semgrad_guard.calibration.sentence_gates import AnswerSentences, Promise, SentenceSet
from semgrad_guard.calibration.thresholds import fit, of_answers, of_part
from semgrad_guard.declared import is_score
from semgrad_guard.errors import CalibrationError
from semgrad_guard.settings import OnDoubt


def calibrate(  # a promise has these conditions, and every one has its default
    uncertainties: Iterable[float | None],
    correct: Iterable[Any],
    *,
    alpha: float,
    delta: float,
    binding: Binding | None = None,
    groups: Iterable[Hashable] | None = None,
    copies: Copies | None = None,
    tries: int = 0,
    prompts: Iterable[Prompts] | None = None,
    by_hand: int | None = None,
    sentences: SentenceSet | None = None,
    choice: EstimatorChoice | None = None,
) -> Calibration:
    """Find the largest threshold whose error rate is at most alpha, with probability at least 1 - delta.

    Where no threshold keeps the promise, `threshold` is None, with a `reason`: nothing is then let through.

    Args:
        uncertainties: one for each answer, higher for less certain ones. An answer whose score is None, NaN or infinite
            is never let through, and counted. All scored answers are tested at gates (see `gates`).
        correct: whether each answer is right; "abstained" where the model itself has declined to answer. Such an
            answer is neither right nor wrong, and counted apart: the promise is about the answers that are none.
            (An unlabelled answer's `by_hand` may be one: n counts it.)
        alpha: the error rate to promise among the answers let through.
        delta: how likely the promise may fail.
        binding: the conditions of the answers; later ones are compared with it.
        groups: the name of each answer's question. In a list of questions, copies of one are not independent draws:
            they make the set look larger than it is.
        copies: "once" (the default) uses the first answer of each group, and counts the others. In a sample of traffic
            a popular question repeats because it is asked often: "keep" uses every answer, and the promise is about the
            traffic.
        tries: numbers the calibrations on these labels, this one included: they share delta (see `gates`). 0: this
            is the only one.
        prompts: the forms of the answers' prompts (`model.render(conversation).form`; None: none was sent; several of a
            question that took several calls, first that of the call whose score counts). Their common shape is kept,
            and the promise is about prompts of that shape. Without them the calibration promises nothing.
        by_hand: for few grades by people: only so many of the answers are looked at, a random part of the surest ones
            (`rows_to_grade`); `correct` may be None for all others. Decide on it before you see labels.
        sentences: those of the answers (see `calibrate_sentences`).
        choice: how the estimator was learned from other answers. If `groups` name a question among those that it was
            learned from, the set is refused; not of traffic, in which a question that is drawn for both parts will be
            drawn again.

    Raises:
        CalibrationError: an argument is not as described.
    """
    alpha, delta = read_rate(alpha, "alpha"), read_rate(delta, "delta")
    if type(tries) is not int or tries < 0:
        raise CalibrationError(f"tries numbers the calibrations on these labels: 0, 1, 2 and so on, not {tries!r}.")
    if copies not in ("keep", "once", None):
        raise CalibrationError(f"copies must be 'keep' (a sample of traffic) or 'once' (a list), not {copies!r}.")
    if sentences is not None and by_hand is not None:
        raise CalibrationError("A promise about sentences takes no `by_hand`: leave it out.")
    labels, named = read_column(correct, "correct"), None if groups is None else read_column(groups, "groups")
    kept = claims(labels)
    n_abstained = len(labels) - len(kept)
    if n_abstained and by_hand is None:
        uncertainties = _some(uncertainties, kept, len(labels), "uncertainties")
        named = None if named is None else _some(named, kept, len(labels), "groups")
        prompts = None if prompts is None else _some(prompts, kept, len(labels), "prompts")
        labels = [labels[row] for row in kept]
    known = labels if by_hand is None else [False if label in (None, ABSTAINED) else label for label in labels]
    answers = read_set(uncertainties, known, groups=named, copies=copies or "once")
    if choice is not None and copies != "keep":
        choice.require_others(map(str, named or ()))
    shape = None
    if prompts is not None:
        calls = read_prompts(prompts, answers)
        shape = PromptShape.of([own[0] for own in calls], calls=[other for own in calls for other in own[1:]])
    rates = {"alpha": alpha, "delta": share_of(delta, tries)}
    part, tested = None, answers
    if by_hand is None:
        outcome = of_answers(answers, sentences, **rates)
    else:
        part = planning.draw(answers, named, alpha=alpha, count=by_hand)
        tested = part.graded(answers, labels)
        outcome = of_part(answers, tested, **rates)
    parts = None if sentences is None else sentences.part(answers.rows)
    graded = (tested.scores, tested.correct) if parts is None else parts.graded
    return Calibration.seal(
        created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        alpha=alpha,
        delta=delta,
        n=answers.n,
        n_wrong=int((~tested.correct).sum()) + tested.n_unscored_wrong,
        n_unscored=answers.n_unscored,
        n_unscored_wrong=tested.n_unscored_wrong,
        n_duplicates=answers.n_duplicates,
        n_abstained=n_abstained,
        n_tested=len(tested.scores),
        scores=tuple(np.sort(answers.scores).tolist()),
        confidence_map=fit(*graded) if len(graded[0]) else None,
        binding=binding,
        choice=choice,
        shape=shape,
        copies=copies,
        tries=tries,
        auroc=planning.auroc(*graded),
        by_hand=None if part is None else part.record,
        sentences=None if parts is None else parts.record(outcome["threshold"]),
        **outcome,
    )


def _some(column: Iterable[Any], rows: Sequence[int], length: int, name: str) -> list[Any]:
    """Some rows of a column.

    Raises:
        CalibrationError: it has another length than the labels.
    """
    entries = read_column(column, name)
    require_same_length("correct", length, name, len(entries))
    return [entries[row] for row in rows]


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
    if on_doubt not in get_args(OnDoubt) or promise not in get_args(Promise):
        raise CalibrationError(
            'on_doubt is "stop" or "drop", and promise is "sentence" or "answer"; they are '
            f"{on_doubt!r} and {promise!r}."
        )
    found = SentenceSet.read(answers, on_doubt=on_doubt, promise=promise)
    if binding is not None:
        binding = binding.model_copy(update={"settings": Unit.sentences(on_doubt).among(binding.settings)})
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
    names, scores, labels = read_column(runs, "runs"), read_column(uncertainties, "uncertainties"), list(correct)
    require_same_length("runs", len(names), "uncertainties", len(scores))
    require_same_length("runs", len(names), "labels", len(labels))
    for row, (run, score, label) in enumerate(zip(names, scores, labels, strict=True)):
        try:
            own = by_run.setdefault(run, ([], []))
        except TypeError:  # one that cannot be hashed, such as a list
            raise CalibrationError(f"runs[{row}] is {run!r:.60}. Name each run by a text or a number.") from None
        if run is None:
            raise CalibrationError(f"runs[{row}] is None: name each run, or leave runs= out.")
        own[0].append(score)
        own[1].append(label)
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
        CalibrationError: the old calibration has no threshold, no answer is graded, or the promise is about sentences.
    """
    if old.threshold is None or not grades:
        why = "it lets nothing through" if old.threshold is None else "none of its answers drawn at random is graded"
        raise CalibrationError(
            f"Calibration {old.id} cannot be made anew from its decisions: {why}. Calibrate on graded answers instead."
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
        by_hand=planning.HandGrades(
            count=len(grades), share=delivered / len(known), drawn_from=delivered, below=old.threshold
        ),
    )
    return Proposal(old, new)

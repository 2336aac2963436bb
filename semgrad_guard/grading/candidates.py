"""Choosing and fitting an estimator on one part of the graded answers, and calibrating it on the rest.

The promise needs a threshold whose answers played no part in the learning: they are split by a seeded draw that
looks at no label. By sentence, answers are split, and their sentences compared and fitted on.

Why: docs/decisions.md#0031
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from semgrad_guard.calibration import Binding, Calibration, EstimatorChoice, calibrate, calibrate_sentences
from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.calibration.sentence_gates import compared_scores
from semgrad_guard.errors import FitError, MissingExtraError
from semgrad_guard.estimators import (
    Estimator,
    FusedStates,
    GreatestEntropy,
    GreedyNLL,
    HybridGrad,
    MaxProbability,
    MeanEntropy,
    ParaGrad,
    RootNLL,
    SemGrad,
)
from semgrad_guard.estimators.learned import MIN_ANSWERS, fit_weights, require_enough
from semgrad_guard.grading.grader import Grade
from semgrad_guard.grading.learning_set import LearningSet
from semgrad_guard.metrics import aurc, auroc
from semgrad_guard.questions.run_record import EvaluatedAnswer

CANDIDATES: tuple[Estimator, ...] = (
    MaxProbability(), MeanEntropy(), GreedyNLL(), RootNLL(), FusedStates(), HybridGrad(), SemGrad(), ParaGrad(),
)  # fmt: skip
"""The choices of `auto`: those that generating computes anyway, then those that need a replay."""

FREE: tuple[Estimator, ...] = (MaxProbability(), MeanEntropy(), GreedyNLL(), RootNLL(), GreatestEntropy())
"""Those that generating computes anyway: every record keeps their scores, and a calibration their AUROC."""

LEARN_SHARE, LEARN_MOST = 1 / 4, 200
"""How many of the answers are learned from: this share, at least `MIN_ANSWERS`, and no more than so many. (The
threshold lacks the answers that are learned from.)"""

LEARN_FROM, CHOOSE_FROM = 200, 200
"""From how many answers on an estimator is fitted, and chosen by `auto`.

With fewer, a threshold for `LABEL_FREE` on all of them lets through as much or more (docs/estimators.md).
"""

LABEL_FREE = MaxProbability()
"""Takes the place of learned scores: fixed before any label is seen, at no cost, and ahead of HybridGrad on a real
model (docs/results/smollm2.md)."""

_FOLDS, _REPEATS = 5, 5
_RESAMPLES = 200  # of the answers, for the standard error of a difference
_MARGIN = 1.0  # standard errors that a preferred estimator may lie behind the best


def calibrate_learned(
    graded: LearningSet, estimator: FusedStates, *, bind: Callable[[Estimator], Binding], seed: int = 0, **how: Any
) -> Outcome:
    """Fit a learned estimator on one part of the answers and choose the threshold on the rest.

    `LABEL_FREE` takes its place where the answers with features are fewer than `LEARN_FROM`, on all answers, for
    nothing was learned from a label; and where it cannot be fitted, on the rest. The calibration's binding and `choice`
    tell it. `how` are options of `calibrate` (alpha, delta ...).
    """
    usable = graded.usable([estimator])
    learn, rest = split(usable, seed=seed, least=LEARN_FROM, facts=graded.facts)
    part = graded.part(learn)
    found: Estimator = LABEL_FREE
    reason = f"{LABEL_FREE.title} takes the place of {estimator.title}"
    if not learn:
        reason = (
            f"{reason}, which learns from {LEARN_FROM} graded answers on; there are {sum(usable)}. No label is spent."
        )
    else:
        try:
            units = part.units()
            found = estimator.fitted(units.features[estimator.name], units.correct)
            reason = f"Fitted on {len(learn)} answers."
        except FitError as error:
            reason = f"{reason}. {error}"
    choice = _choice(estimator.name, found, reason, part, seed=seed)
    auto = best_at_hand(graded)
    return calibrate_scored(graded.part(rest), found, binding=bind(found), choice=choice, auto=auto, **how)


def calibrate_best(
    graded: LearningSet,
    candidates: Sequence[Estimator] = CANDIDATES,
    *,
    bind: Callable[[Estimator], Binding],
    seed: int = 0,
    **how: Any,
) -> Outcome:
    """Choose an estimator on one part of the answers, and its threshold on the rest.

    The candidate with the highest AUROC; but first the learned one, and then the best of those that take no replay,
    where it is behind by no more than one standard error of the difference: their answers cost no more
    than generating them, and learned weights lean on likelihoods where labels are few. Learned candidates
    are judged by repeated cross-validation in that part, and fitted on all of it if they are chosen. Where all answers
    are right, or all are wrong, nothing can be compared: then it is the first candidate that learns nothing. So it is
    with fewer than `CHOOSE_FROM` answers that all candidates can score: no label is spent then. `how` are
    options of `calibrate`.
    """
    best, part, rest, aurocs, reason = _compared_on_a_part(graded, candidates, seed=seed)
    units = part.units()
    found = best.fitted(units.features[best.name], units.correct) if isinstance(best, FusedStates) else best
    choice = _choice("auto", found, reason, part, seed=seed, aurocs=aurocs)
    return calibrate_scored(rest, found, binding=bind(found), choice=choice, auto=found.name, **how)


def calibrate_scored(
    graded: LearningSet, estimator: Estimator | str, *, binding: Binding, auto: str | None = None, **how: Any
) -> Outcome:
    """Calibrate on all answers, by the scores of one estimator (or those of this name); nothing is learned from them.

    `auto` is the estimator that `calibrate_best` takes or would take; None finds it among those whose scores are at
    hand. `how` are further options of `calibrate`, or by sentence of `calibrate_sentences`.
    """
    units, how = graded.units(), {"binding": binding, "prompts": graded.prompts, **how}
    if graded.sentences is not None:
        answers = graded.answer_sentences(estimator)
        made = calibrate_sentences(answers, **how)
        compared = (compared_scores(one.uncertainties, one.leans_on, on_doubt=how["on_doubt"]) for one in answers)
        scores = [score for of_an_answer in compared for score in of_an_answer]
    else:
        scores = list(graded.scores(estimator))
        made = calibrate(scores, graded.correct, groups=graded.questions, **how)
    found = made.with_content(
        aurocs={name: auroc(column, units.correct) for name, column in units.uncertainties.items() if units.correct},
        auto=auto or best_at_hand(graded if how.get("copies") == "keep" else graded.distinct()),
        n_abstained=graded.n_abstained,
    )
    return Outcome(found, scores, list(units.correct))


def calibrate_by_hand(scores: Sequence[float | None], grades: Sequence[Grade | None], **how: Any) -> Outcome:
    """Calibrate on a random part of the surest answers, which people graded; all others are None in `grades`.

    The outcome is that of the graded ones. `how` are options of `calibrate`, `by_hand` among them.
    """
    graded = [(score, right) for score, right in zip(scores, grades, strict=True) if isinstance(right, bool)]
    return Outcome(calibrate(scores, grades, **how), [score for score, _ in graded], [right for _, right in graded])


def best_at_hand(graded: LearningSet) -> str | None:
    """The name of the estimator that `calibrate_best` would take of those that scored these answers; None of none."""
    columns = {*graded.uncertainties, *graded.features}
    candidates = [one for one in CANDIDATES if one.name in columns]
    return _compared_on_a_part(graded, candidates, seed=0)[0].name if candidates else None


def _compared_on_a_part(
    graded: LearningSet, candidates: Sequence[Estimator], *, seed: int
) -> tuple[Estimator, LearningSet, LearningSet, Mapping[str, float | None], str]:
    """The best estimator (not fitted), the answers that it was found on and the others, the AUROCs, and the reason."""
    usable = graded.usable([one for one in candidates if sum(graded.usable([one])) >= CHOOSE_FROM])
    learn, rest = split(usable, seed=seed, least=CHOOSE_FROM, facts=graded.facts)
    part = graded.part(learn)
    if not learn:
        kept = _default(candidates)
        reason = (
            f"{kept.name} is kept: comparing takes {CHOOSE_FROM} graded answers, and there are {sum(usable)}. No label "
            "is spent on it."
        )
        return kept, part, graded, {}, reason
    units = part.units()
    compared, refused = _compared(units, candidates, seed=seed)
    aurocs = {candidate.name: auroc(compared[candidate.name], units.correct) for candidate in candidates}
    best = _chosen(units, candidates, compared, aurocs, seed=seed)
    figures = ", ".join(f"{name} {'-' if value is None else f'{value:.3f}'}" for name, value in aurocs.items())
    gradients = "Gradients are worth their price here" if best.objective.gradients else "Gradients add nothing clear"
    reason = f"{gradients}, by the AUROC on {len(learn)} answers: {figures}.{refused}"
    return best, part, graded.part(rest), aurocs, reason


Columns = Mapping[str, Sequence[float | None]]


def _compared(part: LearningSet, candidates: Sequence[Estimator], *, seed: int) -> tuple[Columns, str]:
    """The scores by which candidates are compared, a learned one's from fits without the answer; and who has none."""
    columns: dict[str, Sequence[float | None]] = {}
    refused = ""
    for candidate in candidates:
        try:
            if not isinstance(candidate, FusedStates):
                columns[candidate.name] = part.scores(candidate)
                continue
            rows = zip(*(out_of_fold(part, candidate, seed=seed + repeat) for repeat in range(_REPEATS)), strict=True)
            columns[candidate.name] = [
                None if None in row else math.fsum(x for x in row if x is not None) / len(row) for row in rows
            ]
        except FitError as error:
            columns[candidate.name], refused = [None] * len(part.questions), f"{refused} {error}"
    return columns, refused


def _default(candidates: Sequence[Estimator]) -> Estimator:
    return next((one for one in candidates if not isinstance(one, FusedStates)), candidates[0])


def _chosen(
    part: LearningSet,
    candidates: Sequence[Estimator],
    columns: Columns,
    aurocs: Mapping[str, float | None],
    *,
    seed: int,
) -> Estimator:
    known = {candidate.name: value for candidate in candidates if (value := aurocs[candidate.name]) is not None}
    if not known:
        return _default(candidates)
    ranked = sorted(
        (candidate for candidate in candidates if candidate.name in known), key=lambda candidate: -known[candidate.name]
    )
    best = ranked[0]
    free = [candidate for candidate in ranked if not candidate.objective.gradients]
    preferred = [*(candidate for candidate in free if isinstance(candidate, FusedStates)), *free[:1]]

    def is_behind(one: Estimator) -> bool:
        """Whether its AUROC is lower than the best by more than the standard error of the difference."""
        error = _standard_error(columns[best.name], columns[one.name], part, seed=seed)
        return error is None or known[best.name] - known[one.name] > _MARGIN * error

    return next((candidate for candidate in preferred if candidate is best or not is_behind(candidate)), best)


def _standard_error(
    theirs: Sequence[float | None], mine: Sequence[float | None], part: LearningSet, *, seed: int
) -> float | None:
    """That of the difference of two AUROCs, over resampled facts; None where no sample has one."""
    facts = _rows_of_facts(part.facts or range(len(part.correct)))
    rng = np.random.default_rng([seed, len(facts), _RESAMPLES])
    drawn: list[float] = []
    for _ in range(_RESAMPLES):
        taken: list[int] = rng.integers(len(facts), size=len(facts)).tolist()
        rows = [row for fact in taken for row in facts[fact]]
        correct = [part.correct[i] for i in rows]
        ours, other = auroc([mine[i] for i in rows], correct), auroc([theirs[i] for i in rows], correct)
        if ours is not None and other is not None:
            drawn.append(other - ours)
    return float(np.std(drawn)) if drawn else None


def _rows_of_facts(facts: Sequence[int]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for row, fact in enumerate(facts):
        found.setdefault(fact, []).append(row)
    return [*found.values()]


def split(
    usable: Sequence[bool], *, seed: int, least: int, facts: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Rows to learn from and rows to calibrate on; the seed decides, and no label.

    Only usable rows are learned from, and none where they are fewer than `least`. Rows of one fact stay together.
    """
    n, facts = len(usable), facts or range(len(usable))
    order: list[int] = np.random.default_rng([seed, n]).permutation(n).tolist()
    candidates = [row for row in order if usable[row]]
    size = min(LEARN_MOST, max(MIN_ANSWERS, math.floor(n * LEARN_SHARE))) if len(candidates) >= least else 0
    learned = {facts[row] for row in candidates[:size]}
    learn = [row for row in range(n) if usable[row] and facts[row] in learned]
    return learn, [row for row in range(n) if facts[row] not in learned]


def out_of_fold(part: LearningSet, estimator: FusedStates, *, seed: int) -> list[float | None]:
    """A learned estimator's scores of answers, each by weights that were fitted without it.

    Raises:
        FitError: there are too few answers for a fit on all of them.
    """
    records = part.features[estimator.name]
    rows = [i for i, record in enumerate(records) if record is not None]
    require_enough(np.array([not part.correct[i] for i in rows], dtype=np.bool_), estimator.title)
    scores: list[float | None] = [None] * len(part.questions)
    facts = None if part.facts is None else [part.facts[i] for i in rows]
    for fold in _folds([part.correct[i] for i in rows], facts, seed=seed):
        held = {rows[i] for i in fold}
        inside = part.part([i for i in rows if i not in held])
        wrong = np.array([not right for right in inside.correct], dtype=np.bool_)
        kept = [record for record in inside.features[estimator.name] if record is not None]
        fitted = replace(estimator, weights=fit_weights(kept, wrong))
        for row, score in zip(sorted(held), part.part(sorted(held)).scores(fitted), strict=True):
            scores[row] = score
    return scores


def _folds(correct: Sequence[bool], facts: Sequence[int] | None, *, seed: int) -> list[list[int]]:
    """Five parts of the rows, each with its share of right and wrong answers; those of one fact stay together."""
    together = _rows_of_facts(facts or range(len(correct)))
    right = np.array([all(correct[row] for row in rows) for rows in together])
    rng = np.random.default_rng([seed, len(together), _FOLDS])
    order: list[int] = np.concatenate(
        [rng.permutation(np.flatnonzero(right == kind)) for kind in (True, False)]
    ).tolist()
    return [[row for fact in order[fold::_FOLDS] for row in together[fact]] for fold in range(_FOLDS)]


def _choice(
    request: str,
    found: Estimator,
    reason: str,
    part: LearningSet,
    *,
    seed: int,
    aurocs: Mapping[str, float | None] | None = None,
) -> EstimatorChoice:
    return EstimatorChoice.model_validate(
        {
            "asked": request,
            "estimator": found.name,
            "reason": reason,
            "weights": found.weights if isinstance(found, FusedStates) else None,
            "aurocs": dict(aurocs or {}),
            "questions": tuple(part.questions),
            "split_seed": seed,
        }
    )


def cross_fitted(answers: Sequence[EvaluatedAnswer], correct: Sequence[bool]) -> tuple[list[float | None], str | None]:
    """FusedStates from the features that a run kept, by five-fold cross-validation; none, and why, where that fails.

    Each fold has weights of its own, so its scores are on a scale of their own, too: close, not equal.
    """
    features = {FusedStates.name: [answer.scores[FusedStates.name].features for answer in answers]}
    keys = dict.fromkeys(answer.part_of or answer.key for answer in answers)
    places = {key: place for place, key in enumerate(keys)}  # sentences of one answer stay together
    facts = [places[answer.part_of or answer.key] for answer in answers]
    part = LearningSet([answer.key for answer in answers], list(correct), features, {}, facts=facts)
    try:
        return out_of_fold(part, FusedStates(), seed=0), None
    except (FitError, MissingExtraError) as error:
        return [None] * len(answers), str(error)


@dataclass(frozen=True)
class Outcome:
    """Graded answers and the calibration made from them; `uncertainties` and `correct` are in the questions' order, by
    sentence those of all sentences.

    `no_verdict` counts the answers that are wrong because the grader came to no verdict on them. A limit (`max_tokens`)
    cut off `n_cut` of the graded answers, `n_cut_wrong` of them wrong.
    """

    calibration: Calibration
    uncertainties: list[float | None]
    correct: list[bool]
    no_verdict: int = 0
    n_cut: int = 0
    n_cut_wrong: int = 0

    @property
    def auroc(self) -> float | None:
        """P(a wrong answer is less certain than a right one); None where all are right, or all wrong."""
        return auroc(self.uncertainties, self.correct)

    @property
    def effect(self) -> Effect | None:
        """The effect of the threshold on these answers; None where they are the surest alone."""
        if self.calibration.by_hand is not None:
            return None
        if self.calibration.sentences is not None:
            return self.calibration.effect
        return Effect.of(zip(self.uncertainties, self.correct, strict=True), self.calibration.lets_through)

    @property
    def aurc(self) -> float | None:
        """Mean selective risk; None where no answer has a score."""
        return aurc(self.uncertainties, self.correct)

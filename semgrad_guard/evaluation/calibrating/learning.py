"""Choosing and fitting an estimator on one part of the graded answers, and calibrating it on the rest.

The promise needs a threshold whose answers played no part in what was learned: they are split by a seeded draw that
looks at no label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from semgrad_guard.calibration import Binding, EstimatorChoice, calibrate
from semgrad_guard.calibration.fixed_sequence import GRID_SIZE
from semgrad_guard.errors import FitError
from semgrad_guard.estimators import (
    Estimator,
    FusedGrad,
    GreedyNLL,
    HybridGrad,
    MaxProbability,
    MeanEntropy,
    ParaGrad,
    SemGrad,
)
from semgrad_guard.estimators.fusedgrad import MIN_ANSWERS, Features, fit_weights
from semgrad_guard.evaluation.calibrating.outcome import Outcome
from semgrad_guard.evaluation.graders import Grader
from semgrad_guard.evaluation.metrics import auroc
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.runs.run_file import Answer
from semgrad_guard.records import PromptForm

CANDIDATES: tuple[Estimator, ...] = (
    HybridGrad(), SemGrad(), ParaGrad(), GreedyNLL(), MaxProbability(), MeanEntropy(), FusedGrad(),
)  # fmt: skip
"""What `auto` chooses among: all that one ordinary replay yields."""

LEARN_SHARE, LEARN_MOST = 1 / 4, 200
"""How many of the answers are learned from: this share, and no more than so many. (What fitting takes, the threshold
lacks: docs/results/fused.md.)"""

_FOLDS = 5


@dataclass(frozen=True)
class LearningSet:
    """Answers in the questions' order: their questions' names, grades, features, and scores by estimator.

    `prompts` are what the questions' prompts looked like; nothing is promised without them.
    """

    questions: Sequence[str]
    correct: Sequence[bool]
    features: Sequence[Features | None]
    uncertainties: Mapping[str, Sequence[float | None]]
    prompts: Sequence[PromptForm] | None = None

    @classmethod
    def of(
        cls,
        questions: Sequence[Question],
        answers: Sequence[Answer],
        grader: Grader,
        *,
        prompts: Sequence[PromptForm] | None = None,
    ) -> LearningSet:
        """Grade the answers of a run whose estimators go by their own names, FusedGrad among them."""
        pairs = list(zip(questions, answers, strict=True))
        names = answers[0].scores if answers else {}
        return cls(
            [question.key for question in questions],
            [answer.text is not None and grader(answer.text, question.answers) for question, answer in pairs],
            [answer.scores[FusedGrad.name].features for answer in answers],
            {name: [answer.uncertainty(name) for answer in answers] for name in names if name != FusedGrad.name},
            prompts,
        )

    def part(self, rows: Sequence[int]) -> LearningSet:
        """Some of the rows."""
        return LearningSet(
            [self.questions[i] for i in rows],
            [self.correct[i] for i in rows],
            [self.features[i] for i in rows],
            {name: [column[i] for i in rows] for name, column in self.uncertainties.items()},
            None if self.prompts is None else [self.prompts[i] for i in rows],
        )

    def scores(self, estimator: Estimator) -> list[float | None]:
        """The uncertainties by an estimator: a fitted one's from the features."""
        if isinstance(estimator, FusedGrad):
            return [estimator.uncertainty(record)[0] for record in self.features]
        return list(self.uncertainties[estimator.name])


def calibrate_fused(
    graded: LearningSet,
    estimator: FusedGrad,
    instead: HybridGrad | None = None,
    *,
    bind: Callable[[Estimator], Binding],
    alpha: float,
    delta: float,
    seed: int = 0,
) -> Outcome:
    """Fit FusedGrad on one part of the answers and choose the threshold on the rest.

    Where it cannot be fitted, HybridGrad takes its place (`instead`, for one with settings of its own): the
    calibration's binding and `choice` say so. The rest is then all answers if their mere number is the reason, for
    nothing was learned from a label.
    """
    learn, rest = split(len(graded.questions), seed=seed)
    part = graded.part(learn)
    try:
        found: Estimator = _fit(part, estimator)
    except FitError as error:
        seen = tuple(part.questions) if len(learn) >= MIN_ANSWERS else ()
        reason = f"HybridGrad takes the place of FusedGrad. {error}"
        choice = EstimatorChoice(
            asked="fused", estimator=HybridGrad.name, reason=reason, questions=seen, split_seed=seed
        )
        rows = rest if seen else range(len(graded.questions))
        learned = part if seen else None
        found = instead or HybridGrad()
        return _calibrated(graded.part(rows), found, choice, learned, bind=bind, alpha=alpha, delta=delta)
    choice = _choice("fused", found, f"Fitted on {len(learn)} answers.", part, seed=seed)
    return _calibrated(graded.part(rest), found, choice, part, bind=bind, alpha=alpha, delta=delta)


def calibrate_best(
    graded: LearningSet,
    candidates: Sequence[Estimator] = CANDIDATES,
    *,
    bind: Callable[[Estimator], Binding],
    alpha: float,
    delta: float,
    seed: int = 0,
) -> Outcome:
    """Choose the candidate with the highest AUROC on one part of the answers, and its threshold on the rest.

    FusedGrad is judged by cross-validation in that part, and fitted on all of it if it wins. Equal ones: the first.
    """
    learn, rest = split(len(graded.questions), seed=seed)
    part = graded.part(learn)
    aurocs: dict[str, float | None] = {}
    refused = ""
    for each in candidates:
        try:
            scores = out_of_fold(part, each, seed=seed) if isinstance(each, FusedGrad) else part.scores(each)
            aurocs[each.name] = auroc(scores, part.correct) if scores else None
        except FitError as error:
            aurocs[each.name], refused = None, f" {error}"
    best = max(candidates, key=lambda each: -math.inf if aurocs[each.name] is None else aurocs[each.name] or 0.0)
    figures = ", ".join(f"{name} {'-' if value is None else f'{value:.3f}'}" for name, value in aurocs.items())
    reason = f"The highest AUROC on {len(learn)} answers, {figures}.{refused}"
    found = _fit(part, best) if isinstance(best, FusedGrad) else best
    choice = _choice("auto", found, reason, part, seed=seed, aurocs=aurocs)
    return _calibrated(graded.part(rest), found, choice, part, bind=bind, alpha=alpha, delta=delta)


def split(n: int, *, seed: int) -> tuple[list[int], list[int]]:
    """Rows to learn from and rows to calibrate on, of n; the seed decides, and no label."""
    order = np.random.default_rng([seed, n]).permutation(n)
    size = min(LEARN_MOST, math.floor(n * LEARN_SHARE))
    return sorted(order[:size].tolist()), sorted(order[size:].tolist())


def out_of_fold(part: LearningSet, estimator: FusedGrad, *, seed: int) -> list[float | None]:
    """FusedGrad's scores of answers, each by weights that were fitted without it.

    Raises:
        FitError: there are too few answers for a fit on all of them.
    """
    _fit(part, estimator)
    rows = [i for i, record in enumerate(part.features) if record is not None]
    scores: list[float | None] = [None] * len(part.questions)
    for fold in _folds([part.correct[i] for i in rows], seed=seed):
        held = {rows[i] for i in fold}
        inside = part.part([i for i in rows if i not in held])
        wrong = np.array([not right for right in inside.correct], dtype=np.bool_)
        weights = fit_weights([record for record in inside.features if record is not None], wrong)
        for row, score in zip(sorted(held), part.part(sorted(held)).scores(FusedGrad(weights=weights)), strict=True):
            scores[row] = score
    return scores


def _folds(correct: Sequence[bool], *, seed: int) -> list[list[int]]:
    """Five parts of the rows, each with its share of right and wrong answers."""
    rng = np.random.default_rng([seed, len(correct), _FOLDS])
    kinds = [rng.permutation(np.flatnonzero(np.array(correct) == right)) for right in (True, False)]
    order = np.concatenate(kinds)
    return [order[fold::_FOLDS].tolist() for fold in range(_FOLDS)]


def _fit(part: LearningSet, like: FusedGrad) -> FusedGrad:
    fitted = FusedGrad.fit(part.features, part.correct)
    return replace(like, weights=fitted.weights)


def _choice(
    asked: str,
    found: Estimator,
    reason: str,
    part: LearningSet,
    *,
    seed: int,
    aurocs: Mapping[str, float | None] | None = None,
) -> EstimatorChoice:
    return EstimatorChoice.model_validate(
        {
            "asked": asked,
            "estimator": found.name,
            "reason": reason,
            "weights": found.weights if isinstance(found, FusedGrad) else None,
            "aurocs": dict(aurocs or {}),
            "questions": tuple(part.questions),
            "split_seed": seed,
        }
    )


def _calibrated(
    rest: LearningSet,
    estimator: Estimator,
    choice: EstimatorChoice,
    learned: LearningSet | None,
    *,
    bind: Callable[[Estimator], Binding],
    alpha: float,
    delta: float,
) -> Outcome:
    """The threshold on the rest. What was learned from gives the thresholds to try, so that the rest is spared that."""
    scores = rest.scores(estimator)
    seen = [] if learned is None else [score for score in learned.scores(estimator) if score is not None]
    found = calibrate(
        scores,
        rest.correct,
        alpha=alpha,
        delta=delta,
        grid=np.quantile(seen, np.linspace(0, 1, GRID_SIZE)) if seen else None,
        binding=bind(estimator),
        groups=rest.questions,
        choice=choice,
        prompts=rest.prompts,
    )
    return Outcome(found, scores, list(rest.correct))

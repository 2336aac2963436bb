"""An evaluation's run: every method on every answer, with its cost, batch after batch into a record that continues."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from semgrad_guard.engine.answers.answer import BatchScoring, Evidence
from semgrad_guard.engine.answers.options import GenerationOptions, plan_record
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import DetachedRecordError, InputError, ScoringError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.base import timed
from semgrad_guard.estimators.own_tokens import ObservedEstimator, ReplayEstimator
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.questions.data import Phrasing, Question
from semgrad_guard.questions.run import A, Answering, kept_score, observing_first
from semgrad_guard.questions.run_record import AnswerScore, EvaluatedAnswer, JobRecord, Progress, SampleSet
from semgrad_guard.records import Message

_DIGITS = 6  # of a sample's log-probabilities


@dataclass(frozen=True)
class Cell:
    """One method's number for one answer, and its cost in milliseconds."""

    score: AnswerScore
    milliseconds: float


def measure(
    answers: Sequence[Evidence],
    estimators: Mapping[str, Estimator],
    *,
    plans: Mapping[Any, float],
    sampled: Sequence[int],
) -> tuple[list[dict[str, Cell]], list[tuple[SampleSet, ...]]]:
    """For every answer each method's cell, by name, and the samples of each plan, at the temperature in `plans`.

    Method after method, since a batch shares work among its rows; those that draw samples take only the rows `sampled`:
    the others have no cell of theirs. What several methods need (samples, a replay, an observation) is
    done before the first of them, and its time counts for each.
    """
    whole = list(enumerate(answers))
    drawing = whole
    if len(sampled) < len(answers):  # a batch of their own
        some = BatchScoring.joined([answers[row] for row in sampled]).evidence if sampled else ()
        drawing = list(zip(sampled, some, strict=True))
    measured: list[dict[str, Cell]] = [{} for _ in answers]
    samples: dict[tuple[int, Any], SampleSet | None] = {}
    common: dict[Hashable, float] = {}
    for name in observing_first(estimators):
        estimator = estimators[name]
        rows, plan = drawing if isinstance(estimator, AskingEstimator) else whole, getattr(estimator, "plan", None)
        if not rows:
            continue
        for (row, _), cell in zip(rows, _cells(estimator, [one for _, one in rows], plans, common), strict=True):
            measured[row][name] = cell
        for row, evidence in rows if plan in plans else ():
            if (row, plan) not in samples and evidence.response_ids:
                samples[row, plan] = _samples(evidence, plan, plans[plan])
    kept = [tuple(found for plan in plans if (found := samples.get((row, plan)))) for row in range(len(answers))]
    return [{name: row[name] for name in estimators if name in row} for row in measured], kept


def _cells(
    estimator: Estimator, answers: Sequence[Evidence], plans: Mapping[Any, float], common: dict[Hashable, float]
) -> list[Cell]:
    """One method's cells; `common` keeps the milliseconds an answer of what others need as well."""
    name, work = _needed(estimator, plans)
    if name not in common:
        common[name] = timed(lambda: [work(evidence) for evidence in answers])[1] / len(answers)
    scores, own = timed(lambda: [estimator(evidence) for evidence in answers])
    milliseconds = round(common[name] + own / len(answers), 3)
    return [Cell(score=kept_score(score), milliseconds=milliseconds) for score in scores]


def _needed(estimator: Estimator, plans: Mapping[Any, float]) -> tuple[Hashable, Callable[[Evidence], object]]:
    """What a method needs as others do: its name among such things, and the work for an answer."""
    plan = getattr(estimator, "plan", None)
    if plan in plans:
        return plan, lambda evidence: _samples(evidence, plan, plans[plan]) if evidence.response_ids else None
    if isinstance(estimator, ObservedEstimator):
        return ObservedEstimator, lambda evidence: evidence.observed()
    if isinstance(estimator, ReplayEstimator):
        return estimator.objective, lambda evidence: evidence.gradients(estimator.objective)
    return estimator, lambda _: None


def _samples(evidence: Evidence, plan: Any, temperature: float) -> SampleSet | None:
    """The samples of a plan for an answer; None if they cannot be scored, as the method's cell tells."""
    try:
        drawn = evidence.samples(plan, temperature=temperature)
    except DetachedRecordError:  # a fault of the program, not of the answer
        raise
    except ScoringError:
        return None
    return SampleSet(
        plan={"kind": type(plan).__name__, **plan_record(plan)},
        temperature=temperature,
        texts=tuple(sample.text for sample in drawn),
        log_probs=tuple(
            tuple(round(value, _DIGITS) if math.isfinite(value) else None for value in sample.log_probs)
            for sample in drawn
        ),
    )


@dataclass(frozen=True)
class Ablation:
    """SemGrad under another objective; where `layers` are given, of these alone, at t* or at the last token."""

    objective: Objective
    layers: tuple[int, ...] | None = None
    last_token: bool = False

    def __call__(self, evidence: Evidence) -> float | None:
        """The variant's uncertainty, None where there is none."""
        replayed = evidence.gradients(self.objective)
        if replayed is None or replayed.scores.semgrad is None:
            return None
        if self.layers is None:
            return replayed.scores.semgrad
        if not replayed.scores.grid:
            return None
        # The objective names every layer from 1 on, and the grid begins at t*.
        return fmean(replayed.scores.grid[layer - 1][-1 if self.last_token else 0] for layer in self.layers)


def semgrad_ablations(n_layers: int) -> Mapping[str, Ablation]:
    """The rows of Table 2 below SemGrad itself, for a model of `n_layers` decoder layers (L).

    Layers are those of `Objective`; variants that a shallow model does not have are left out. One replay with the
    gradients of all layers serves every choice of layers and tokens.
    """
    wide = Objective(layers=tuple(range(1, n_layers)))
    upper = tuple(range(n_layers // 2 + 1, n_layers))
    spans = {
        "l = L-1": (n_layers - 1,),
        "l = L-4": (n_layers - 4,),
        "l = 2L/3 .. L-1": tuple(range(2 * n_layers // 3, n_layers)),
        "l = 1 .. L-1": tuple(range(1, n_layers)),
    }
    found = {"l2 norm": Ablation(Objective(norm="l2")), "without entropy weights": Ablation(Objective(weighted=False))}
    found |= {name: Ablation(wide, span) for name, span in spans.items() if span and min(span) >= 1}
    if upper:
        found["last token"] = Ablation(wide, upper, last_token=True)
    return found if upper else {}


@dataclass(frozen=True)
class SampledQuestions:
    """At most `count` questions of each kind, by their keys. The choice depends on the seed and the questions."""

    count: int
    seed: int
    keys: frozenset[str]

    @classmethod
    def of(cls, questions: Sequence[Question], *, count: int, seed: int) -> SampledQuestions | None:
        """The choice; None where no kind has more than `count` questions, so that none is left out.

        Raises:
            InputError: count is less than 1.
        """
        if count < 1:
            raise InputError(f"sampled questions must be at least 1 of each kind, not {count}")
        kinds: defaultdict[str | None, list[str]] = defaultdict(list)
        for question in questions:
            kinds[question.kind].append(question.key)
        if all(len(keys) <= count for keys in kinds.values()):
            return None

        def place(key: str) -> str:
            """The place of a question in the draw, apart from the others, so that more questions change little."""
            return hashlib.sha256(f"{seed} {key}".encode()).hexdigest()

        chosen = (key for keys in kinds.values() for key in sorted(keys, key=place)[:count])
        return cls(count, seed, frozenset(chosen))

    @property
    def settings(self) -> dict[str, Any]:
        """Plain JSON, for the record of a run."""
        return {"of each kind": self.count, "seed": self.seed}


@dataclass(frozen=True)
class Experiment(Answering):
    """The model, the prompts and the methods of an evaluation, each method under its own name.

    `ablations` are variants of SemGrad to record besides; `sampled` tells which questions the methods that draw samples
    take part in, all by default. By sentence, costs are not measured.
    """

    ablations: Mapping[str, Ablation] = field(default_factory=dict[str, Ablation])
    sampled: SampledQuestions | None = None

    def settings(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Everything that answers and scores depend on, as plain JSON; the titles of the methods with it."""
        found = super().settings(questions)
        for name, estimator in self.estimators.items():
            found["estimators"][name]["title"] = estimator.title
        asking = any(isinstance(estimator, AskingEstimator) for estimator in self.estimators.values())
        drawn = {"sampled_questions": self.sampled.settings} if asking and self.sampled is not None else {}
        prompt = self.phrasing.wording if self.phrasing.prompt is None else self.phrasing.prompt
        return {**found, **drawn, "prompt": prompt, "ablations": list(self.ablations)}

    def run(
        self, questions: Sequence[Question], path: Path, *, batch_size: int = 8, on_progress: Progress | None = None
    ) -> list[EvaluatedAnswer]:
        """Answer and measure the questions that the record at `path` lacks; returns every answer, in the questions'
        order.

        Raises:
            BindingMismatchError: the record belongs to a run with other settings; the message names them.
            InputError: questions with and without context are mixed, or the run could not be continued.
        """
        return self._kept(EvaluatedAnswer, questions, path, batch_size, on_progress)

    @property
    def _plans(self) -> dict[Any, float]:
        """The sampling plans of the estimators, and at which temperature their samples are read: 1 if any does that.

        The samples of the record are then there already, and need no further pass.
        """
        plans: dict[Any, float] = {}
        for estimator in self.estimators.values():
            plan, temperature = getattr(estimator, "plan", None), getattr(estimator, "temperature", 1.0)
            if plan is not None and plans.get(plan) != 1.0:
                plans[plan] = temperature
        return plans

    def _begin(self, record: JobRecord[A], questions: Sequence[Question]) -> None:
        """Work that happens once per process (the self-check, loading of kernels) belongs to no question's run time."""
        record.require_continuable()  # a report is about the methods of its run, and no others
        if any(question.key not in record.rows for question in questions):
            short = replace(self.options, max_tokens=2, temperature=0.0)
            turns = Phrasing().conversation(Question(question="?"))
            self.model.generate(turns, short, objective=Objective()).evidence.gradients(Objective())

    def _answers(
        self,
        row: type[A],
        options: GenerationOptions,
        questions: Sequence[Question],
        conversations: Sequence[list[Message]],
    ) -> list[A]:
        generate = partial(self.model.generate_batch, conversations, options, objective=Objective())
        generations, generating = timed(generate)
        pairs = list(zip(questions, generations, strict=True))
        if self.by_sentence:
            return [self._scored(row, *pair, token_ids=pair[1].evidence.response_ids) for pair in pairs]
        measured, drawn = measure(
            [generation.evidence for generation in generations],
            self.estimators,
            plans=self._plans,
            sampled=[
                place for place, one in enumerate(questions) if self.sampled is None or one.key in self.sampled.keys
            ],
        )
        share = round(generating / len(questions), 3)
        found: list[A] = []
        for (question, generation), cells, samples in zip(pairs, measured, drawn, strict=True):
            replayed = generation.evidence.gradients(Objective())  # the replay that the methods share
            kept = {
                "token_ids": generation.evidence.response_ids,
                "entropies": replayed.scores.entropies if replayed else (),
                "log_probs": replayed.scores.log_probs if replayed else (),
                "scores": {name: cells[name].score if name in cells else _NOT_ASKED for name in self.estimators},
                "milliseconds": {name: cell.milliseconds for name, cell in cells.items()},
                "ablations": {name: ablation(generation.evidence) for name, ablation in self.ablations.items()},
                "samples": samples,
            }
            found.append(self._scored(row, question, generation, rows=len(questions), generation_ms=share, **kept))
        return found


_NOT_ASKED = AnswerScore(uncertainty=None, reason="the question is not among those that samples are drawn for")

"""An evaluation's run: every method on every answer, with its cost, batch after batch into a record that continues."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from semgrad_guard.engine.answers.answer import Evidence, Generation
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.base import timed
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.paper.measuring import Step, measure
from semgrad_guard.questions.answered import AnswerScore, EvaluatedAnswer
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.job_record import JobRecord, Progress
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.questions.run import (
    check_run,
    complete,
    run_settings,
    scores_of,
    seeded,
    sentence_fields,
    where_it_fits,
)
from semgrad_guard.records import Message


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
class Experiment:
    """The model, the prompts and the methods of an evaluation.

    Args:
        model: answers.
        estimators: score, each under its own name.
        options: how to answer; greedy by default, as in the paper.
        phrasing: how the questions are put to the model.
        ablations: variants of SemGrad to record besides.
        sampled: which questions the methods that draw samples take part in; all by default.
        by_sentence: every sentence is scored by itself; costs are not measured then.
    """

    model: LanguageModel
    estimators: Sequence[Estimator]
    options: GenerationOptions = field(default_factory=GenerationOptions)
    phrasing: Phrasing = field(default_factory=Phrasing)
    ablations: Mapping[str, Ablation] = field(default_factory=dict[str, Ablation])
    sampled: SampledQuestions | None = None
    by_sentence: bool = False

    def settings(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Everything that answers and scores depend on, as plain JSON; the titles of the methods with it."""
        self.phrasing.require(questions)
        template = self.phrasing.name(questions)
        form = {"options": self.options, "by_sentence": self.by_sentence}
        found = run_settings(self.model, self._named, template=template, **cast("Any", form))
        for name, estimator in self._named.items():
            found["estimators"][name]["title"] = estimator.title
        asking = any(isinstance(estimator, AskingEstimator) for estimator in self.estimators)
        drawn = {"sampled_questions": self.sampled.settings} if asking and self.sampled is not None else {}
        prompt = self.phrasing.wording if self.phrasing.prompt is None else self.phrasing.prompt
        return {**found, **drawn, "prompt": prompt, "ablations": list(self.ablations)}

    def run(
        self,
        questions: Sequence[Question],
        path: Path,
        *,
        batch_size: int = 8,
        on_progress: Progress | None = None,
        on_step: Step | None = None,
    ) -> list[EvaluatedAnswer]:
        """Answer and measure the questions that the record at `path` lacks; returns every answer, in the questions'
        order.

        `on_step` is called with the title of the method that measures.

        Raises:
            BindingMismatchError: the record belongs to a run with other settings; the message names them.
            InputError: questions with and without context are mixed, or the run could not be continued.
        """
        check_run(self._named, self.options, batch_size)
        settings = self.settings(questions)
        with JobRecord(path, settings, EvaluatedAnswer) as record:
            record.require_continuable()  # a report is about the methods of its run, and no others
            if any(question.key not in record.rows for question in questions):
                self._warm_up()
            answer = partial(self._answer, on_step=on_step)
            return complete(record, questions, answer, batch_size=batch_size, on_progress=on_progress)

    @property
    def _named(self) -> dict[str, Estimator]:
        return {estimator.name: estimator for estimator in self.estimators}

    @property
    def _plans(self) -> dict[Any, float]:
        """The sampling plans of the estimators, and at which temperature their samples are read: 1 if any does that.

        The samples of the record are then there already, and need no further pass.
        """
        plans: dict[Any, float] = {}
        for estimator in self.estimators:
            plan, temperature = getattr(estimator, "plan", None), getattr(estimator, "temperature", 1.0)
            if plan is not None and plans.get(plan) != 1.0:
                plans[plan] = temperature
        return plans

    def _warm_up(self) -> None:
        """Work that happens once per process (the self-check, loading of kernels) belongs to no question's run time."""
        short = replace(self.options, max_tokens=2, temperature=0.0)
        self.model.generate(
            Phrasing().conversation(Question(question="?")), short, objective=Objective()
        ).evidence.gradients(Objective())

    def _answer(self, batch: Sequence[Question], start: int, *, on_step: Step | None) -> list[EvaluatedAnswer]:
        measured = partial(self._measure, start=start, on_step=on_step)
        return where_it_fits(self.model, self.phrasing, batch, measured, self._unanswered)

    def _measure(
        self, questions: Sequence[Question], conversations: Sequence[list[Message]], *, start: int, on_step: Step | None
    ) -> list[EvaluatedAnswer]:
        generate = partial(self.model.generate_batch, conversations, seeded(self.options, start), objective=Objective())
        generations, generating = timed(generate)
        if self.by_sentence:
            return [self._by_sentence(*pair) for pair in zip(questions, generations, strict=True)]
        answers = [generation.evidence for generation in generations]
        measured, drawn = measure(
            answers,
            self._named,
            plans=self._plans,
            sampled=[row for row, one in enumerate(questions) if self.sampled is None or one.key in self.sampled.keys],
            on_step=on_step,
        )
        share = round(generating / len(questions), 3)
        found: list[EvaluatedAnswer] = []
        for question, generation, row, samples in zip(questions, generations, measured, drawn, strict=True):
            replayed = generation.evidence.gradients(Objective())  # the replay that the methods share
            found.append(
                _answered(
                    question,
                    text=generation.text,
                    finish_reason=generation.finish_reason,
                    token_ids=generation.evidence.response_ids,
                    entropies=replayed.scores.entropies if replayed else (),
                    log_probs=replayed.scores.log_probs if replayed else (),
                    scores={name: row[name].score if name in row else _NOT_ASKED for name in self._named},
                    milliseconds={name: cell.milliseconds for name, cell in row.items()},
                    rows=len(questions),
                    generation_ms=share,
                    ablations={name: ablation(generation.evidence) for name, ablation in self.ablations.items()},
                    samples=samples,
                )
            )
        return found

    def _by_sentence(self, question: Question, generation: Generation) -> EvaluatedAnswer:
        evidence, score = generation.evidence, partial(scores_of, self._named)
        return _answered(
            question,
            text=generation.text,
            finish_reason=generation.finish_reason,
            token_ids=evidence.response_ids,
            **sentence_fields(self.model, evidence, score, self._named),
        )

    def _unanswered(self, question: Question, reason: str) -> EvaluatedAnswer:
        none = AnswerScore(uncertainty=None, reason=reason)
        return _answered(question, text=None, scores=dict.fromkeys(self._named, none))


_NOT_ASKED = AnswerScore(uncertainty=None, reason="the question is not among those that samples are drawn for")


def _answered(question: Question, **fields: Any) -> EvaluatedAnswer:
    given = {"references": question.answers, "kind": question.kind, "context": question.context}
    return EvaluatedAnswer.to(question, **given, **fields)

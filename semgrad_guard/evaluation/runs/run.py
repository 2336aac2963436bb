"""A resumable run: a model answers questions, estimators score the answers, and every answer is kept as it comes.

Batches are fixed by the order of the questions and the batch size, so a run that was interrupted and continued, or
whose batches were spread over other processes, gives exactly the answers and scores of one that was not: a batch of
which some answers are missing is asked again as a whole. (Another batch size may change the last digits of a score.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from semgrad_guard.calibration import Binding
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import InputError, PromptTooLongError
from semgrad_guard.estimators import Estimator
from semgrad_guard.evaluation.job_record import JobRecord, Progress, R, unwatched
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import (
    Wording,
    conversation,
    form_of,
    prompt_name,
    require_examples,
    require_prompt,
)
from semgrad_guard.evaluation.runs.answers import Answer, AnswerScore
from semgrad_guard.guard import Answerer, template_name
from semgrad_guard.records import Message, Score


class Batch(NamedTuple):
    """Questions that are answered and scored together, and the index of the first one in the run."""

    start: int
    rows: Sequence[Question]


AnswerBatch = Callable[[Sequence[Question], int], list[R]]
"""Answers a batch; the second argument is the index of its first question."""
Spread = Callable[[Iterable[Batch]], Iterable[list[R]]]
"""Answers many batches, elsewhere perhaps, and gives each one's answers as soon as they are there, in any order."""


@dataclass(frozen=True)
class Answering:
    """How a model answers and scores a batch. What is not the model is plain data, which other processes are sent."""

    model: LanguageModel
    estimators: Mapping[str, Estimator]
    options: GenerationOptions
    system: str | None = None
    wording: Wording = "plain"
    prompt: str | None = None
    examples: Sequence[Question] = ()

    def __call__(self, batch: Sequence[Question], start: int) -> list[Answer]:
        """The answers to a batch, in its order."""
        turns = [
            conversation(
                each.question,
                each.context,
                system=self.system,
                wording=self.wording,
                prompt=self.prompt,
                examples=self.examples,
            )
            for each in batch
        ]
        return _answer(batch, turns, self.model, self.estimators, options=seeded(self.options, start))

    @property
    def recipe(self) -> Callable[[LanguageModel], Answering]:
        """The same with another copy of the model; it pickles, and holds no model."""
        return partial(
            Answering,
            estimators=self.estimators,
            options=self.options,
            system=self.system,
            wording=self.wording,
            prompt=self.prompt,
            examples=self.examples,
        )


def collect_answers(
    questions: Sequence[Question],
    path: Path,
    *,
    model: LanguageModel,
    estimators: Mapping[str, Estimator],
    options: GenerationOptions | None = None,
    system: str | None = None,
    wording: Wording = "plain",
    prompt: str | None = None,
    examples: Sequence[Question] = (),
    batch_size: int = 8,
    spread: Spread[Answer] | None = None,
    on_progress: Progress | None = None,
) -> list[Answer]:
    """Answer and score the questions, in order, keeping every answer at `path`; what is there already is not redone.

    Args:
        questions: distinct ones, as `read_questions` gives them.
        path: the record of the run (see `JobRecord`).
        model: answers.
        estimators: score, each under a name of the caller's choice; they share a replay where their objectives agree.
        options: how to generate; greedy by default. Sampled runs need a seed.
        system: a system message for every question.
        wording: the question as it stands, or after the paper's instruction.
        prompt: a template of the user's turn, with {question} and perhaps {context} in it.
        examples: questions with answers that go before every question, as turns.
        batch_size: questions answered and scored at once.
        spread: answers the batches in the model's place, by copies of it in other processes.
        on_progress: told (answers there are, questions in all), at the start and after every batch.

    A question that does not fit the context window is kept without an answer, and with the reason.
    """
    options = options or GenerationOptions()
    check_run(estimators, options, batch_size)
    form = form_of(questions)
    require_examples(examples, questions)
    worded = None if prompt is None else require_prompt(prompt, form)
    template = prompt_name(form, system=system, wording=wording, prompt=worded, examples=examples)
    settings = run_settings(model, estimators, options=options, template=template)
    answering = Answering(model, estimators, options, system, wording, prompt, examples)
    with JobRecord(path, settings, Answer) as record:
        return complete(record, questions, spread or in_turn(answering), batch_size=batch_size, on_progress=on_progress)


def in_turn(answer: AnswerBatch[R]) -> Spread[R]:
    """One batch after the other, here."""
    return lambda batches: (answer(batch.rows, batch.start) for batch in batches)


def batches_of(questions: Iterable[Question], size: int) -> Iterator[Batch]:
    """The questions in their order, so many at a time, each group when it is asked for."""
    rest = iter(questions)
    for start in itertools.count(0, size):
        rows = list(itertools.islice(rest, size))
        if not rows:
            return
        yield Batch(start, rows)


def complete(
    record: JobRecord[R],
    questions: Sequence[Question],
    spread: Spread[R],
    *,
    batch_size: int,
    key: Callable[[Question], str] = attrgetter("key"),
    on_progress: Progress | None = None,
) -> list[R]:
    """Answer the batches of which the record misses something; all answers, in the questions' order.

    `key` names a question in the record.
    """
    tell = on_progress or unwatched
    done = sum(key(question) in record.rows for question in questions)
    tell(done, len(questions))
    missing = [
        batch
        for batch in batches_of(questions, batch_size)
        if any(key(question) not in record.rows for question in batch.rows)
    ]
    if missing:
        record.require_continuable()
    for answers in spread(missing) if missing else ():
        new = [found for found in answers if found.key not in record.rows]
        record.append(new)
        done += len(new)
        tell(done, len(questions))
    return [record.rows[key(question)] for question in questions]


def run_settings(
    model: LanguageModel, estimators: Mapping[str, Estimator], *, options: GenerationOptions, template: str
) -> dict[str, Any]:
    """Everything that answers and scores depend on, as plain JSON; two runs may share a file if this is the same."""
    identity = model.identity
    return {
        "model": identity.name,
        "revision": identity.revision,
        "fingerprint": identity.fingerprint,
        "dtype": identity.dtype,
        **model.departures,
        "prompt_template": template_name(model, template),
        "estimators": {name: {"name": each.name, **each.settings()} for name, each in estimators.items()},
        "generation": {
            "max_new_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "seed": options.seed if options.temperature else None,
            "stop": list(options.stop),
        },
    }


def run_binding(
    model: LanguageModel,
    estimator: Estimator,
    *,
    options: GenerationOptions,
    template: str,
    grader: str | None = None,
    upstream: str | None = None,
) -> Binding:
    """What a calibration made from such a run is bound to; the same as a guard's with this prompt template."""
    bound = Answerer(model, estimator, options, prompt_template=template).binding()
    return bound.model_copy(update={"grader": grader, "upstream": upstream})


def _answer(
    batch: Sequence[Question],
    conversations: Sequence[list[Message]],
    model: LanguageModel,
    estimators: Mapping[str, Estimator],
    *,
    options: GenerationOptions,
) -> list[Answer]:
    """Answers in the batch's order; those that do not fit the context window without text."""
    too_long = {i: reason for i, each in enumerate(conversations) if (reason := why_too_long(model, each))}
    fitting = [i for i in range(len(batch)) if i not in too_long]
    objective = shared_objective(estimators.values())
    generations = model.generate_batch([conversations[i] for i in fitting], options, objective=objective)
    answered = {i: _scored(batch[i], g, estimators) for i, g in zip(fitting, generations, strict=True)}
    return [
        answered[i] if i in answered else _unanswered(question, estimators, too_long[i])
        for i, question in enumerate(batch)
    ]


def shared_objective(estimators: Iterable[Estimator]) -> Objective:
    """What a generation keeps for several estimators: what the first that differentiates asks for, if one does."""
    asked = [estimator.objective for estimator in estimators]
    return next((objective for objective in asked if objective.gradients), asked[0])


def observing_first(estimators: Mapping[str, Estimator]) -> list[str]:
    """The names in an order that costs least: what a generation left is let go with the first replay."""
    return sorted(estimators, key=lambda name: estimators[name].objective.gradients)


def why_too_long(model: LanguageModel, turns: Sequence[Message]) -> str | None:
    """Why a conversation cannot be answered: its prompt fills the context window. None where it can."""
    try:
        length, window = len(model.render(turns).ids), model.context_window
    except PromptTooLongError as error:
        return str(error)
    if window is None or length < window:
        return None
    return f"the prompt has {length} tokens and the context window {window}: there is no room for an answer"


def _scored(question: Question, generation: Generation, estimators: Mapping[str, Estimator]) -> Answer:
    evidence = generation.evidence
    found = {name: estimators[name](evidence) for name in observing_first(estimators)}
    return Answer(
        key=question.key,
        id=question.id,
        question=question.question,
        text=generation.text,
        finish_reason=generation.finish_reason,
        scores={name: kept_score(found[name]) for name in estimators},
    )


def kept_score(score: Score) -> AnswerScore:
    """What the record of a run keeps of a score."""
    features = None if score.features is None else dict(score.features)
    return AnswerScore(uncertainty=score.uncertainty, reason=score.reason, features=features)


def _unanswered(question: Question, estimators: Mapping[str, Estimator], reason: str) -> Answer:
    none = AnswerScore(uncertainty=None, reason=reason)
    return Answer(
        key=question.key, id=question.id, question=question.question, text=None, scores=dict.fromkeys(estimators, none)
    )


def seeded(options: GenerationOptions, start: int) -> GenerationOptions:
    """Row i of a batch draws from seed + i: with this, every question of a run has a seed of its own."""
    return options if options.seed is None else replace(options, seed=options.seed + start)


def check_run(estimators: Mapping[str, Estimator], options: GenerationOptions, batch_size: int) -> None:
    """Raise InputError for a run that cannot be made, or could not be continued."""
    if not estimators:
        raise InputError("a run needs at least one estimator")
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, not {batch_size}")
    if options.temperature and options.seed is None:
        raise InputError("a sampled run needs a seed, or it could not be continued")

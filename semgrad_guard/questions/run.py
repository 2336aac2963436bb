"""A resumable run: a model answers questions, estimators score the answers, and every answer is kept as it comes; and
texts from any source, scored batch by batch.

Batches are fixed by the order of the questions and the batch size, so a run that was interrupted and continued gives
exactly the answers and scores of one that was not: a batch of which some answers are missing is answered again as a
whole. (Another batch size may change the last digits of a score.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel

from semgrad_guard.calibration import Binding
from semgrad_guard.engine.answers.answer import BatchScoring, Evidence, Generation
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.sentence_evidence import sentences_of
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.text_units import leanings
from semgrad_guard.errors import InputError, PromptTooLongError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Answerer, Policy, Terms, require_by_sentence, settle, template_name, unscored
from semgrad_guard.guard.parts import OTHER_TOKENS, WITHOUT_END
from semgrad_guard.guard.policy import lets_every_score_through
from semgrad_guard.questions.data import Phrasing, Question
from semgrad_guard.questions.run_record import Answer, AnsweredSentence, AnswerScore, JobRecord, Progress, R, unwatched
from semgrad_guard.records import Message, PromptForm, Score, Verdict
from semgrad_guard.settings import OnCut, OnDoubt


class Batch(NamedTuple):
    """Questions that are answered and scored together, and the index of the first one in the run."""

    start: int
    rows: Sequence[Question]


A = TypeVar("A", bound=Answer)
Scores = dict[str, AnswerScore]
AnswerBatch = Callable[[Sequence[Question], int], list[R]]
"""Answers a batch; the second argument is the index of its first question."""


@dataclass(frozen=True)
class Answering:
    """How a model answers and scores questions.

    The estimators go by names of the caller's choice; they share a replay if their objectives agree. `by_sentence`:
    every sentence is scored by itself.
    """

    model: LanguageModel
    estimators: Mapping[str, Estimator]
    options: GenerationOptions = field(default_factory=GenerationOptions)
    phrasing: Phrasing = field(default_factory=Phrasing)
    by_sentence: bool = False

    def settings(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Everything that answers and scores depend on, as plain JSON; two runs may share a file if this is the same.

        Raises:
            InputError: questions with and without context are mixed, or the prompts do not go with them.
        """
        self.phrasing.require(questions)
        form = {"options": self.options, "template": self.phrasing.name(questions), "by_sentence": self.by_sentence}
        return run_settings(self.model, self.estimators, **cast("Any", form))

    def run(
        self, questions: Sequence[Question], path: Path, *, batch_size: int = 8, on_progress: Progress | None = None
    ) -> Sequence[Answer]:
        """Answer and score the questions, in order, keeping every answer at `path`; recorded answers are not redone.

        A question that does not fit the context window is kept without an answer, and with the reason.

        Args:
            questions: distinct ones, as `read_questions` gives them.
            path: the record of the run (see `JobRecord`).
            batch_size: questions answered and scored at once. Sampled runs need a seed.
            on_progress: called with (recorded answers, questions in all), at the start and after every batch.
        """
        return self._kept(Answer, questions, path, batch_size, on_progress)

    def _kept(
        self, row: type[A], questions: Sequence[Question], path: Path, batch_size: int, on_progress: Progress | None
    ) -> list[A]:
        """The answers of a run, as rows of this type."""
        if not self.estimators:
            raise InputError("a run needs at least one estimator")
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, not {batch_size}")
        seed = self.options.seed
        if self.options.temperature and seed is None:
            raise InputError("a sampled run needs a seed, or it could not be continued")

        def unanswered(question: Question, reason: str) -> A:
            none = dict.fromkeys(self.estimators, AnswerScore(uncertainty=None, reason=reason))
            return row.to(question, text=None, scores=none)

        def answer(batch: Sequence[Question], start: int) -> list[A]:
            # row i of a batch draws from seed + i: with this, every question of a run has a seed of its own
            options = self.options if seed is None else replace(self.options, seed=seed + start)
            return where_it_fits(self.model, self.phrasing, batch, partial(self._answers, row, options), unanswered)

        with JobRecord(path, self.settings(questions), row) as record:
            self._begin(record, questions)
            return complete(record, questions, answer, batch_size=batch_size, on_progress=on_progress)

    def _begin(self, record: JobRecord[A], questions: Sequence[Question]) -> None:
        """What is to be done before the questions that the record lacks."""

    def _answers(
        self,
        row: type[A],
        options: GenerationOptions,
        questions: Sequence[Question],
        conversations: Sequence[list[Message]],
    ) -> list[A]:
        """The answers to a batch, in its order."""
        objectives = [estimator.objective for estimator in self.estimators.values()]
        objective = next((one for one in objectives if one.gradients), objectives[0])
        generations = self.model.generate_batch(conversations, options, objective=objective)
        return [self._scored(row, *pair) for pair in zip(questions, generations, strict=True)]

    def _scored(self, row: type[A], question: Question, generation: Generation, **more: Any) -> A:
        evidence, score = generation.evidence, partial(scores_of, self.estimators)
        if self.by_sentence:
            more |= sentence_fields(evidence, score, self.estimators)
        elif "scores" not in more:
            more["scores"] = score([evidence])[0]
        return row.to(question, text=generation.text, finish_reason=generation.finish_reason, **more)


def batches_of(questions: Iterable[Question], size: int) -> Iterator[Batch]:
    """The questions in their order, so many at a time, each group on request."""
    rest = iter(questions)
    for start in itertools.count(0, size):
        rows = list(itertools.islice(rest, size))
        if not rows:
            return
        yield Batch(start, rows)


def complete(
    record: JobRecord[R],
    questions: Sequence[Question],
    answer: AnswerBatch[R],
    *,
    batch_size: int,
    on_progress: Progress | None = None,
) -> list[R]:
    """Answer the batches of which the record misses something; all answers, in the questions' order."""
    tell = on_progress or unwatched
    done = sum(question.key in record.rows for question in questions)
    tell(done, len(questions))
    missing = [
        batch
        for batch in batches_of(questions, batch_size)
        if any(question.key not in record.rows for question in batch.rows)
    ]
    if missing:
        record.require_continuable()
    for batch in missing:
        new = [found for found in answer(batch.rows, batch.start) if found.key not in record.rows]
        record.append(new)
        done += len(new)
        tell(done, len(questions))
    return [record.rows[question.key] for question in questions]


def run_settings(
    model: LanguageModel,
    estimators: Mapping[str, Estimator],
    *,
    options: GenerationOptions,
    template: str,
    by_sentence: bool = False,
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
        "estimators": {
            name: {"name": estimator.name, **estimator.settings()} for name, estimator in estimators.items()
        },
        "generation": {
            "max_new_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "seed": options.seed if options.temperature else None,
            "stop": list(options.stop),
        },
        **({"by": "sentence"} if by_sentence else {}),
    }


def run_binding(
    model: LanguageModel,
    estimator: Estimator,
    *,
    options: GenerationOptions,
    template: str,
    grader: str | None = None,
    on_doubt: OnDoubt | None = None,
    on_cut: OnCut = "unscored",
) -> Binding:
    """The binding of a calibration made from such a run; the same as a guard's with this prompt template."""
    bound = Answerer(model, estimator, options, prompt_template=template, by_sentence=on_doubt).binding()
    return bound.model_copy(update={"grader": grader, "on_cut": on_cut})


def scores_of(estimators: Mapping[str, Estimator], answers: Sequence[Evidence]) -> list[dict[str, AnswerScore]]:
    """The scores of each answer, or of each sentence of one, by the estimators' names."""
    columns = {name: [kept_score(estimators[name](one)) for one in answers] for name in observing_first(estimators)}
    return [{name: columns[name][row] for name in estimators} for row in range(len(answers))]


def sentence_fields(
    evidence: Evidence, score: Callable[[Sequence[Evidence]], list[Scores]], names: Iterable[str]
) -> dict[str, Any]:
    """The fields of an `Answer` about its sentences; `score` scores several by the estimators of these names."""
    parts = sentences_of(evidence) if evidence.response_ids else []
    if not parts:
        reason = evidence.why_empty if parts is not None else OTHER_TOKENS
        return {"scores": _nothing(names, reason), "sentences": ()}
    scored = iter(score([own for _, own in parts if own is not None]))
    scores = [_nothing(names, WITHOUT_END) if own is None else next(scored) for _, own in parts]
    leans_on = leanings(evidence.text, [span for span, _ in parts])
    return {
        "scores": {
            name: max(
                (own[name] for own in scores),
                key=lambda score: math.inf if score.uncertainty is None else score.uncertainty,
            )
            for name in names
        },
        "sentences": tuple(
            AnsweredSentence(start=start, end=end, leans_on=earlier, scores=own)
            for ((start, end), _), earlier, own in zip(parts, leans_on, scores, strict=True)
        ),
    }


def _nothing(names: Iterable[str], reason: str | None) -> Scores:
    return dict.fromkeys(names, AnswerScore(uncertainty=None, reason=reason))


def observing_first(estimators: Mapping[str, Estimator]) -> list[str]:
    """The names in an order that costs least: the first replay frees the leftovers of a generation."""
    return sorted(estimators, key=lambda name: estimators[name].objective.gradients)


def where_it_fits(
    model: LanguageModel,
    phrasing: Phrasing,
    batch: Sequence[Question],
    answer: Callable[[Sequence[Question], Sequence[list[Message]]], Iterable[R]],
    unanswered: Callable[[Question, str], R],
) -> list[R]:
    """The answers to a batch, in its order.

    `answer` gets the questions whose prompts leave room in the context window, with their messages; `unanswered` gets
    each of the others, with the reason.
    """

    def why_too_long(turns: Sequence[Message]) -> str | None:
        try:
            length, window = len(model.render(turns).ids), model.context_window
        except PromptTooLongError as error:
            return str(error)
        if window is None or length < window:
            return None
        return f"the prompt has {length} tokens and the context window {window}: there is no room for an answer"

    conversations = [phrasing.conversation(question) for question in batch]
    reasons = [*map(why_too_long, conversations)]
    fitting = [i for i, reason in enumerate(reasons) if reason is None]
    answers = iter(answer([batch[i] for i in fitting], [conversations[i] for i in fitting]) if fitting else ())
    return [
        next(answers) if reason is None else unanswered(question, reason)
        for question, reason in zip(batch, reasons, strict=True)
    ]


def kept_score(score: Score) -> AnswerScore:
    """The score as a run records it."""
    features = None if score.features is None else dict(score.features)
    return AnswerScore(uncertainty=score.uncertainty, reason=score.reason, features=features)


class ScoredText(BaseModel, frozen=True, extra="forbid"):
    """A text's verdict, or why it does not fit the context window."""

    verdict: Verdict | None = None
    too_long: str | None = None


@dataclass(frozen=True)
class TextScorer:
    """How texts are scored and decided about.

    With `by_sentence`, the action at a doubtful one, every sentence is, and the verdict has the whole text.
    """

    model: LanguageModel
    estimator: Estimator
    policy: Policy | None = None
    phrasing: Phrasing = field(default_factory=Phrasing)
    by_sentence: OnDoubt | None = None

    def __post_init__(self) -> None:
        if self.by_sentence is not None:
            require_by_sentence(self.estimator)

    def __call__(self, rows: Sequence[Question]) -> list[ScoredText]:
        """The texts of a batch, in its order, from one backward pass for all of them."""
        fitting: dict[int, Evidence] = {}
        unread: dict[int, str] = {}
        for i, row in enumerate(rows):
            try:
                fitting[i] = self.model.evidence(self.phrasing.conversation(row), row.response or "")
            except PromptTooLongError as error:
                unread[i] = str(error)
        together = BatchScoring.joined([*fitting.values()]).evidence if fitting else ()
        verdicts: dict[int, Verdict] = {}
        for i, evidence in zip(fitting, together, strict=True):
            template = self.phrasing.name([rows[i]])
            answerer = Answerer(self.model, self.estimator, prompt_template=template, by_sentence=self.by_sentence)
            verdicts[i] = self._settled(answerer.assessed(evidence, evidence.text), evidence.prompt.form)
        return [ScoredText(verdict=verdicts.get(i), too_long=unread.get(i)) for i in range(len(rows))]

    def unscored(self, text: str, reason: str) -> Verdict:
        """The verdict on a text that cannot be scored."""
        return self._settled(unscored(text, reason=reason, model=self.model.name), None)

    def _settled(self, draft: Verdict, prompt: PromptForm | None) -> Verdict:
        policy = self.policy or lets_every_score_through("abstain")
        mode = "enforce" if self.by_sentence is None else "annotate"  # no sentence is left out
        return settle(draft, Terms(policy=policy, mode=mode), prompt=prompt).verdict

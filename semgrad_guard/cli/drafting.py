"""Answers for `calibrate` and `gate`: of a model here, scored by its own states and gradients, or of another server,
scored by the log-probabilities that it reports; and what `gate` finds in them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from semgrad_guard.calibration import Binding, Calibration
from semgrad_guard.calibration.binding import call_options
from semgrad_guard.cli import from_options, grading
from semgrad_guard.cli.grading import Files
from semgrad_guard.cli.terminal import kept_on_interrupt, say, say_unscored
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.grading import AnswerGrader
from semgrad_guard.guard import Policy, estimator_of, template_name
from semgrad_guard.guard.reported import ReportedScorer, prompt_of
from semgrad_guard.loading import ModelSource
from semgrad_guard.paper.coverage import Band, Departure, Measured, decided, digest
from semgrad_guard.questions.data import Phrasing, Question
from semgrad_guard.questions.run import Answering, complete, run_binding
from semgrad_guard.questions.run_record import Answer, AnsweredSentence, AnswerScore, JobRecord
from semgrad_guard.records import Message, PromptForm, SentenceVerdict, Verdict
from semgrad_guard.settings import REPORTED, UPSTREAM_KEY, OnCut, OnDoubt

if TYPE_CHECKING:
    from semgrad_guard.server.remote import RemoteServer

T = TypeVar("T")


@dataclass(frozen=True)
class ModelWriter:
    """The answers of `model`."""

    model: LanguageModel
    estimators: Mapping[str, Estimator]
    template: str
    decoding: GenerationOptions
    phrasing: Phrasing
    on_doubt: OnDoubt | None = None
    """The action at a doubtful sentence, where every sentence is scored by itself."""
    on_cut: OnCut = "unscored"

    def prompt_name(self, template: str) -> str:
        """The full name of the prompts."""
        return template_name(self.model, template)

    def answers(self, rows: Sequence[Question], path: Path, template: str) -> list[Answer]:
        """The answers; Ctrl-C tells how many are kept, and how to resume."""
        by_sentence = self.on_doubt is not None
        answering = Answering(self.model, self.estimators, self.decoding, self.phrasing, by_sentence)
        with kept_on_interrupt("Answering", f"answers are kept in {path}") as tell:
            found = answering.run(rows, path, batch_size=from_options.BATCH, on_progress=tell)
        return [answer.judged(self.on_cut) for answer in found]

    def binding(self, grader: str) -> Callable[[Estimator], Binding]:
        """The binding of a calibration on these answers, for each estimator."""
        return lambda estimator: run_binding(
            self.model,
            estimator,
            options=self.decoding,
            template=self.template,
            grader=grader,
            on_doubt=self.on_doubt,
            on_cut=self.on_cut,
        )

    def form(self, conversation: Sequence[Message]) -> PromptForm:
        """The form of a prompt."""
        return self.model.render(conversation).form


async def _gathered(url: str, work: Callable[[RemoteServer], Iterable[Awaitable[T]]]) -> list[T]:
    """The results of work with the server at `url`, all of it at once; its connections are closed behind it."""
    from semgrad_guard.server.remote import RemoteServer

    server = RemoteServer(url, api_key=os.environ.get(UPSTREAM_KEY))
    try:
        return list(await asyncio.gather(*work(server)))
    finally:
        await server.close()


def asking(url: str, model: str) -> Callable[[Sequence[str]], list[str]]:
    """Prompts to replies, by this model of the server at `url`, greedily.

    Raises:
        InputError: the URL is none.
        UpstreamError: the server fails.
    """
    from semgrad_guard.server.remote import RemoteServer, answers_in

    RemoteServer(url)

    async def reply(server: RemoteServer, prompt: str) -> str:
        turns = [{"role": "user", "content": prompt}]
        body = {"model": model, "messages": turns, "temperature": 0.0, "stream": False}
        (found,) = answers_in(await server.chat(body), 1)
        return found.text

    return lambda prompts: asyncio.run(_gathered(url, lambda server: (reply(server, prompt) for prompt in prompts)))


@dataclass(frozen=True)
class ServerWriter:
    """The answers of the server at `url`, of its model that `scorer` names.

    Raises:
        InputError: the URL is none.
    """

    url: str
    scorer: ReportedScorer
    decoding: GenerationOptions
    phrasing: Phrasing
    on_cut: OnCut = "unscored"

    def __post_init__(self) -> None:
        from semgrad_guard.server.remote import RemoteServer

        RemoteServer(self.url)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the calls, which the calibration is bound to."""
        return {"temperature": 0.0, "max_tokens": self.decoding.max_tokens}

    def prompt_name(self, template: str) -> str:
        """The name of the prompts; the template that the server puts them into is not known."""
        return template

    def answers(self, rows: Sequence[Question], path: Path, template: str) -> list[Answer]:
        """The recorded answers and those that are missing.

        Raises:
            UpstreamError: the server fails. The answers so far are in the record.
        """
        settings = {"server": self.url, "model": self.scorer.model, "prompt_template": template}
        whole = replace(self.scorer, by_sentence=None)
        settings |= {"generation": self.options, "estimators": dict.fromkeys(REPORTED, whole.settings)}
        settings |= {} if self.scorer.by_sentence is None else {"by": "sentence"}

        def answer(batch: Sequence[Question], _: int) -> list[Answer]:
            answering = _gathered(self.url, lambda server: (self._answer(server, one) for one in batch))
            return asyncio.run(answering)

        with (
            kept_on_interrupt("Answering", f"answers are kept in {path}") as tell,
            JobRecord(path, settings, Answer) as record,
        ):
            found = complete(record, rows, answer, batch_size=from_options.BATCH, on_progress=tell)
        return [answer.judged(self.on_cut) for answer in found]

    def binding(self, grader: str) -> Callable[[object], Binding]:
        """The binding of a calibration on these answers."""
        facts = {"options": call_options(self.options), "max_tokens": self.decoding.max_tokens}
        facts |= {"stop": (), "grader": grader, "on_cut": self.on_cut}
        bound = self.scorer.binding.model_copy(update=facts)
        return lambda _: bound

    def form(self, conversation: Sequence[Message]) -> PromptForm | None:
        """The form of a prompt."""
        return prompt_of(conversation)

    async def _answer(self, server: RemoteServer, question: Question) -> Answer:
        from semgrad_guard.server.remote import answers_in

        turns = [{"role": turn.role, "content": turn.content} for turn in self.phrasing.conversation(question)]
        body = {"model": self.scorer.model, "messages": turns, **self.options, **self.scorer.request, "stream": False}
        (found,) = answers_in(await server.chat(body), 1)
        scorers = {name: replace(self.scorer, estimator=name) for name in REPORTED}
        verdicts = {name: own.verdict(found.text, found.logprobs, options={}) for name, own in scorers.items()}

        def scores(found: Mapping[str, Verdict | SentenceVerdict]) -> dict[str, AnswerScore]:
            return {name: AnswerScore(uncertainty=one.uncertainty, reason=one.reason) for name, one in found.items()}

        parts = zip(*(verdict.sentences for verdict in verdicts.values()), strict=True)
        sentences = tuple(
            AnsweredSentence(
                start=part[0].start,
                end=part[0].end,
                leans_on=part[0].leans_on,
                scores=scores(dict(zip(verdicts, part, strict=True))),
            )
            for part in parts
        )
        fields = {} if self.scorer.by_sentence is None else {"sentences": sentences}
        return Answer.to(
            question, text=found.text, finish_reason=found.finish_reason, scores=scores(verdicts), **fields
        )


def writer_for(
    policy: Policy,
    source: ModelSource,
    server: str | None,
    *,
    decoding: GenerationOptions,
    phrasing: Phrasing,
    template: str,
) -> ModelWriter | ServerWriter:
    """The model or the server that answers as the calibration's did.

    Raises:
        BindingMismatchError: the calibration was made for something else.
        InputError: it is bound to nothing.
    """
    bound = policy.binding
    if bound is None:
        raise InputError("The calibration is bound to nothing: it cannot be told whether it fits. Calibrate again.")
    if server is None:
        estimator = estimator_of(policy.calibration)
        named = {estimator.name: estimator}
        writer = ModelWriter(
            from_options.load(source), named, template, decoding, phrasing, on_cut=policy.on_cut or "score"
        )
        mine = writer.binding(bound.grader or "")(estimator)
    else:
        scorer = ReportedScorer.of(source.model, policy.calibration)
        writer = ServerWriter(server, scorer, decoding, phrasing, policy.on_cut or "score")
        mine = writer.binding(bound.grader or "")(None)
    mine = mine.model_copy(update={"upstream": bound.upstream})
    policy.check(mine)
    for name in ("max_tokens", "stop", "options") if bound.max_tokens is not None else ():
        was, now = getattr(bound, name), getattr(mine, name)
        if was != now:
            raise BindingMismatchError(
                f"The calibration's answers were made with {name} {was!r}, and these would be with {now!r}. Give the "
                "options of the calibration."
            )
    return writer


def measure(
    rows: Sequence[Question],
    writer: ModelWriter | ServerWriter,
    policy: Policy,
    grader: AnswerGrader,
    files: Files,
) -> Measured:
    """Answer, grade, and decide as a guard with this policy does."""
    answers = writer.answers(rows, files.answers, writer.phrasing.name(rows))
    say_unscored(answers)
    grades = grading.grade(rows, answers, grader, book=files.grades)
    estimator = "" if policy.binding is None else policy.binding.estimator
    prompts = writer.phrasing.forms(rows, writer.form)
    decisions = [
        decided(answer, right, policy, score=answer.uncertainty(estimator), prompt=prompt)
        for answer, right, prompt in zip(answers, grades.of_answers.values(), prompts, strict=True)
        if isinstance(right, bool)  # an abstention is neither right nor wrong
    ]
    return Measured(digest(rows), grades.grader, policy.calibration_id or "", decisions)


def show(
    measured: Measured,
    band: Band,
    left: Sequence[Departure],
    calibration: Calibration | None,
    recorded_in: Path | None,
    *,
    as_json: bool,
) -> None:
    """The verdict, for people or as JSON."""
    effect = measured.readings[0]
    strange = Counter(reason for one in measured.answers for reason in one.unfamiliar)
    for reason, count in strange.items():
        say(f"nothing is promised about {count} of {effect.answers} answers: {reason}.", label="Warning")
    if as_json:
        document = {
            "passed": not left,
            "left": [{**asdict(one), "range": one.range.model_dump()} for one in left],
            "coverage": effect.coverage,
            "error": effect.delivered_error,
            "answers": effect.answers,
            "delivered": effect.delivered,
            "delivered_wrong": effect.delivered_wrong,
            "at_threshold": sum(one.at_threshold for one in measured.answers),
            "unfamiliar": strange,
            "calibration_id": measured.calibration_id,
            "alpha": calibration and calibration.alpha,
            "requested_alpha": calibration and calibration.requested,
            "band": band.model_dump(mode="json"),
        }
        typer.echo(json.dumps(document, ensure_ascii=False))
        return
    error = "none" if effect.delivered_error is None else f"{effect.delivered_error:.1%}"
    typer.echo(f"coverage {effect.coverage:.1%} ({effect.delivered} of {effect.answers}), band {band.coverage}")
    typer.echo(f"error    {error} ({effect.delivered_wrong} of {effect.delivered}), band {band.error}")
    for one in left:
        typer.echo(f"{one}.")
    if recorded_in is not None:
        typer.echo(f"The band is in {recorded_in}; keep it with the code.")
    else:
        typer.echo("The gate fails." if left else "The gate passes.")

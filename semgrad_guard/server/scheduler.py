"""Requests to one model, and their queue.

A request is read (`Assignment`), written and scored; `ModelQueue` is the server's view of a model, `Scheduler` that of
a model in this process, and `ReportedQueue` that of another server's model.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, InstanceOf

from semgrad_guard.adapters.calls import AnswerForm, new_id, openai_logprobs, token_texts
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.sentence_evidence import EndedSentences
from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.interruption import Pieces, Stop, Ticket, current_stop, stopping
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.errors import AnswerCancelledError, InputError, PromptTooLongError, QueueFullError
from semgrad_guard.estimators.own_tokens import ReplayEstimator
from semgrad_guard.guard import (
    Answerer,
    Draft,
    Live,
    Terms,
    Work,
    ain_time,
    cancelling,
    read_off_loop,
)
from semgrad_guard.guard.reported import ReportedScorer, prompt_of
from semgrad_guard.records import Message, Verdict
from semgrad_guard.server.answers import Answer, Cuts, pieces_of

T = TypeVar("T")
Batching = Literal["steps", "none"]
"""How requests share a model: they join and leave at any step; not at all."""
RETRY = 5
"""Seconds after which a client that was refused may try again."""
_ENDING = "the server is shutting down; try again later"
_NO_MODEL = "this server has no model of its own: it scores the answers of its upstream alone; see --scorer"


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """A client's request to a model: `count` answers to one conversation, in one form.

    With `logprobs` the answers have the tokens' log-probabilities, with `top_logprobs` those of so many alternatives to
    each token. `cuts` are made after the decision. `prompt_limit` is how many tokens the prompt may have.
    `on_piece` is called, in the model's thread, with each piece of text or thought as it is written; where answers are
    judged by sentence, and `terms` withhold, with the sentences that these let through. Both stay in this process.
    """

    conversation: tuple[Message, ...]
    options: GenerationOptions
    form: AnswerForm = field(default_factory=AnswerForm)
    count: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    cuts: Cuts = field(default_factory=Cuts)
    prompt_limit: int | None = None
    on_piece: Annotated[Callable[[Piece], None] | None, Field(exclude=True)] = None
    terms: Annotated[InstanceOf[Terms] | None, Field(exclude=True)] = None


@dataclass(frozen=True, kw_only=True)
class ForeignText:
    """A text that the model did not write, as the answer to a conversation. With a `reason` it cannot be scored.

    `cut` is true where the text was cut off. `reasoning` is that of its author, "" where it is not known. `entries` are
    the log-probabilities that its server reports, `options` those of the call; `is_part`: it was ended behind a
    sentence.
    """

    text: str
    conversation: tuple[Message, ...] = ()
    form: AnswerForm = field(default_factory=AnswerForm)
    cut: bool = False
    reasoning: str | None = None
    reason: str | None = None
    entries: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_part: bool = False


@dataclass(frozen=True)
class Assignment:
    """A request that can be written: its prompt, and how each of its answers is written and scored."""

    request: AnswerRequest
    conversation: tuple[Message, ...]
    prompt: Prompt
    answerer: Answerer
    options: tuple[GenerationOptions, ...]

    @classmethod
    def of(cls, request: AnswerRequest, answerer: Answerer) -> Self:
        """A request, read.

        Raises:
            SemGradGuardError: it cannot be answered.
        """
        form, model = request.form, answerer.model
        conversation = form.instructed(request.conversation)
        prompt, limit = model.render(conversation, **form.template_options), request.prompt_limit
        if limit is not None and (length := len(prompt.ids)) > limit:
            raise PromptTooLongError(f"the prompt has {length} tokens, and this server takes {limit}; shorten it")
        options = replace(request.options, grammar=form.grammar(model))
        rows = model.fitted(options, prompt).rows(request.count)
        return cls(request, conversation, prompt, replace(answerer, options=options), rows)

    def submit(self) -> Ticket[list[Draft[Answer]]]:
        """Have the request answered; the ticket is of its scored drafts."""
        request = self.request
        made = self.answerer.request_of(
            self.prompt,
            self.options,
            self.drafts,
            template_options=request.form.template_options,
            on_piece=None if request.count > 1 else request.on_piece,
            terms=request.terms if self.has_parts else None,
        )
        return self.answerer.model.submit(made)

    @property
    def has_parts(self) -> bool:
        """Whether sentences may leave before the answer ends: not where it is one of several, or is cut afterwards."""
        request = self.request
        if request.count > 1 or request.cuts.may_end(request.options.max_tokens):
            return False
        return self.answerer.has_parts(request.form.template_options)

    def opened(self, ended: EndedSentences, known: Verdict | None) -> Draft[None]:
        """As `Answerer.opened`."""
        return self.answerer.opened(ended, known, template_options=self.request.form.template_options)

    def drafts(self, generations: Sequence[Generation], known: Verdict | None) -> list[Draft[Answer]]:
        """The texts that were written for it, scored; `known` as in `Answerer.draft`."""
        return [self._draft(generation, known) for generation in generations]

    def _draft(self, generation: Generation, known: Verdict | None) -> Draft[Answer]:
        request, form = self.request, self.request.form
        model, estimator = self.answerer.model, self.answerer.estimator
        draft = self.answerer.draft(
            generation, template_options=form.template_options, known=known, structure=form.structure
        )
        verdict = draft.verdict
        if broken := form.taken_apart(model, generation).broken:
            # OpenAI's form has no place for a call that cannot be read: it is delivered as text.
            verdict = verdict.revised(text="\n".join((verdict.text, *broken)).lstrip("\n"))
        logprobs: list[dict[str, Any]] | None = None
        if request.logprobs:
            found = openai_logprobs(model, estimator, generation.evidence, top=request.top_logprobs)
            logprobs = [] if found is None else found["content"]
        answer = Answer(
            text=verdict.text,
            # Clients join a tool's answer to its call by its id, and templates may write none.
            tool_calls=tuple(call if call.id else replace(call, id=new_id()) for call in verdict.tool_calls),
            finish_reason="tool_calls" if verdict.tool_calls else generation.finish_reason,
            logprobs=logprobs,
            completion_tokens=generation.completion_tokens,
            pieces=token_pieces(model, verdict.text, generation.response_ids) if request.cuts else None,
        )
        return Draft(verdict, answer, draft.prompt)


def judged(text: ForeignText, answerer: Answerer) -> Draft[None]:
    """A text from elsewhere with its score, or without one; the record has the same form."""
    options = text.form.template_options
    if text.reason is not None:
        return Draft(answerer.unscored(text.text, text.reason, options), None)
    return answerer.scored(
        text.conversation, text.text, template_options=options, cut=text.cut, reasoning=text.reasoning
    )


Segment = dict[str, Any]
"""A sentence of a text, as clients get it: `text`, `start`, `end`, and an `uncertainty` of its own; None where none of
its tokens has one."""


def segments(text: ForeignText, answerer: Answerer) -> list[Segment]:
    """A text's sentences.

    Raises:
        InputError: the estimator compares whole answers.
    """
    estimator = answerer.estimator
    if not isinstance(estimator, ReplayEstimator):
        raise InputError(f"{estimator.name} compares whole answers; leave 'by' out, or serve with hybridgrad").about(
            "by"
        )
    found = answerer.model.segments(text.conversation, text.text, objective=estimator.objective)
    values = [None if one.scores is None else estimator.value(one.scores) for one in found]
    return [
        {"text": one.text, "start": one.start, "end": one.end, "uncertainty": value}
        for one, value in zip(found, values, strict=True)
    ]


def token_pieces(model: LanguageModel, text: str, ids: Sequence[int] = ()) -> tuple[str, ...]:
    """The text that each token adds: of these tokens, where they spell the text, else of the text's own."""
    texts = token_texts(model, ids, special=False)
    if (spelled := "".join(texts)) == text:
        return tuple(texts)
    if (begin := spelled.find(text)) >= 0:  # behind white space that the answer does not begin with
        return pieces_of(texts, [(begin, begin + len(text))])
    tokenizer: Any = model.tokenizer
    return tuple(token_texts(model, tokenizer(text, add_special_tokens=False)["input_ids"]))


class ModelQueue:
    """The owner of a model, in this process or in another one. Its methods raise a `SemGradGuardError` if they fail.

    This one has no model: its subclasses answer and score.
    """

    name: str
    """The model's name."""
    estimator_name: str
    """The name of the estimator that scores the answers."""

    @property
    def batching(self) -> Batching | None:
        """How requests share the model; None as long as that is not known."""
        return None

    @property
    def depth(self) -> int:
        """How many requests wait, without those in work."""
        return 0

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused."""
        return False

    def require_room(self) -> None:
        """Refuse one request more where it would be too many.

        Raises:
            QueueFullError: it would.
        """
        if self.is_full:
            raise QueueFullError(
                f"{self.name} has as many requests as this server takes; try again later", retry_after=RETRY
            )

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """The scored drafts of a request.

        Raises:
            QueueFullError: too many requests wait already.
            SemGradGuardError: any error of answering.
        """
        raise InputError(_NO_MODEL)

    def live(self, request: AnswerRequest) -> LiveAnswers:
        """An answer that is being written."""
        return LiveAnswers(self, request)

    async def judged(self, text: ForeignText) -> Draft[None]:
        """A text from elsewhere with its score, or without one; the record has the same form."""
        raise InputError(_NO_MODEL)

    async def segments(self, text: ForeignText) -> list[Segment]:
        """As `writing.segments`."""
        raise InputError(_NO_MODEL)

    async def pieces(self, text: str) -> tuple[str, ...]:
        """The text that each token of a text from elsewhere adds."""
        raise InputError(_NO_MODEL)

    def close(self) -> None:
        """Refuse the requests that wait, and stop."""


class Scheduler(ModelQueue):
    """A `ModelQueue` in this process: a bounded view of the model's worker.

    Requests are read in a thread of their own, in the order of their arrival: neither HTTP nor the model waits for it.

    Args:
        answerer: the model, and how its answers are scored.
        limit: how many requests may wait; one more is refused.

    Raises:
        EmptyLayerSpanError: the estimator has no layers to differentiate by in this model.
    """

    def __init__(self, answerer: Answerer, *, limit: int = 64) -> None:
        self.answerer, self.model, self.limit = answerer, answerer.model, limit
        self.name, self.estimator_name = self.model.name, answerer.estimator.name
        if (objective := answerer.estimator.objective).gradients:
            objective.span(self.model.n_layers)  # refused here, and not at each request
        self._open: dict[Stop, Ticket[Any] | None] = {}
        self._reader = ThreadPoolExecutor(1, "semgrad-guard-reader")
        self._closed = False
        self._joins = self.model.worker.run(lambda: self.model.joins).outcome()

    @property
    def batching(self) -> Batching | None:
        return "steps" if self._joins else "none"

    @property
    def depth(self) -> int:
        return sum(ticket is None or not (ticket.running() or ticket.done()) for ticket in list(self._open.values()))

    @property
    def is_full(self) -> bool:
        return self._closed or self.depth >= self.limit

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        return await self._submit(lambda: Assignment.of(request, self.answerer).submit())

    async def judged(self, text: ForeignText) -> Draft[None]:
        return await self.work(lambda: judged(text, self.answerer))

    async def segments(self, text: ForeignText) -> list[Segment]:
        return await self.work(lambda: segments(text, self.answerer))

    async def pieces(self, text: str) -> tuple[str, ...]:
        return await self.work(lambda: token_pieces(self.model, text))

    async def work(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in the model's thread in its order. A cancelled task stops it.

        Raises:
            QueueFullError: too many requests wait already.
            DeadlineExceededError: the current deadline was over before it was done.
        """
        return await self._submit(lambda: self.model.worker.run(work))

    async def _submit(self, make: Callable[[], Ticket[T]]) -> T:
        if self._closed:
            raise AnswerCancelledError(_ENDING)
        self.require_room()
        stop = Stop()
        self._open[stop] = None
        try:
            with stopping(stop), cancelling(stop):
                return await ain_time(self._result(make, stop))
        except AnswerCancelledError:
            if self._closed:
                raise AnswerCancelledError(_ENDING) from None
            raise
        finally:
            del self._open[stop]

    async def _result(self, make: Callable[[], Ticket[T]], stop: Stop) -> T:
        ticket = await read_off_loop(make, readers=self._reader)
        self._open[stop] = ticket
        return await asyncio.wrap_future(ticket)

    def close(self) -> None:
        """Refuse the requests that wait, stop those in work, and return once the model works for none of them."""
        self._closed = True
        for stop in list(self._open):
            stop.cancel()
        self._reader.shutdown()
        wait([ticket for ticket in self._open.values() if ticket is not None])


class LiveAnswers(Live[Piece]):
    """An answer that a model of this server is writing: its pieces, then its scored draft."""

    def __init__(self, queue: ModelQueue, request: AnswerRequest) -> None:
        super().__init__(amake=self._shown)
        self._queue, self._request = queue, request
        self._drafts = list[Draft[Answer]]()

    async def _shown(self) -> AsyncGenerator[Piece]:
        pieces = Pieces[Piece]()

        def on_piece(piece: Piece) -> None:
            current_stop().check()
            pieces.put(piece)

        task = asyncio.ensure_future(self._queue.answer(replace(self._request, on_piece=on_piece)))
        task.add_done_callback(lambda _: pieces.end())
        try:
            while (ready := await asyncio.wrap_future(pieces.next())) is not None:
                for piece in ready:
                    yield piece
            self._drafts = await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def draft(self) -> Work:
        """The whole answer with its score."""
        return Work.at_once(lambda: self._drafts[0])


_WORDS = re.compile(r"\s*\S+|\s+$")


class ReportedQueue(ModelQueue):
    """Another server's model, whose answers are scored by the log-probabilities that they carry.

    Nothing waits here, and no other text can be scored.
    """

    def __init__(self, scorer: ReportedScorer) -> None:
        self.scorer, self.name, self.estimator_name = scorer, scorer.model, scorer.estimator

    async def judged(self, text: ForeignText) -> Draft[None]:
        prompt = prompt_of(text.conversation, text.form.tools)
        if text.reason is not None:
            return Draft(self.scorer.unscored(text.text, text.reason), None, prompt)
        verdict = self.scorer.verdict(
            text.text,
            text.entries,
            options=text.options,
            prompt=prompt,
            cut=text.cut,
            reasoning=text.reasoning,
            is_part=text.is_part,
        )
        parts = self.scorer.parts(text.entries, (), text.form.structure)
        return Draft(verdict.revised(**parts), None, prompt)

    async def pieces(self, text: str) -> tuple[str, ...]:
        return tuple(_WORDS.findall(text))

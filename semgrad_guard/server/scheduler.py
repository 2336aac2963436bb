"""`Scheduler`: one thread owns a model, and everything that is asked of the model waits for its turn.

Requests are submitted as what they ask for, and not as code, so that the inside may answer several of them together.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.adapters.call_ids import new_id
from semgrad_guard.adapters.logprobs import openai_logprobs
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.interruption import Stop, current_stop, stopping
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.scoring.segments import By, Segment
from semgrad_guard.errors import (
    AnswerCancelledError,
    InputError,
    PromptTooLongError,
    QueueFullError,
    SemGradGuardError,
)
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.base import ReplayEstimator
from semgrad_guard.guard import Answerer, Draft, ain_time, cancelling
from semgrad_guard.records import Message, ToolCall
from semgrad_guard.server.answers import Answer

T = TypeVar("T")
_FIRST_GUESS = 5.0
"""Seconds that a turn takes, as long as none has been seen."""
_WEIGHT = 0.2


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """What a client asks of a model: `count` answers to one conversation, in one form.

    `logprobs` asks for the tokens' log-probabilities, `top_logprobs` for those of so many others beside each token.
    `prompt_limit` is how many tokens the prompt may have. `heard` is called, in the model's thread, with each piece of
    text as it is written.
    """

    conversation: tuple[Message, ...]
    options: GenerationOptions
    form: AnswerForm = field(default_factory=AnswerForm)
    count: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_limit: int | None = None
    heard: Callable[[str], None] | None = None


@dataclass(eq=False)
class _Turn(Generic[T]):
    """Work that waits for the model's thread, in the context (and so under the stops) of whoever submitted it."""

    work: Callable[[], T]
    context: Context
    future: Future[T] = field(default_factory=Future[Any])


class Scheduler:
    """Answers requests with one model, one after the other, in the order in which they came.

    Args:
        model: the model; nobody else runs it while the scheduler lives.
        estimator: scores its answers.
        limit: how many requests may wait; one more is refused.
        prompt_template: the name for the form of the prompts.
        served: the model scores what others have written, and writes nothing itself.

    Raises:
        EmptyLayerSpanError: the estimator has no layers to differentiate by in this model.
    """

    def __init__(
        self,
        model: LanguageModel,
        estimator: Estimator,
        *,
        limit: int = 64,
        prompt_template: str = "chat",
        served: bool = False,
    ) -> None:
        if estimator.objective.gradients:
            estimator.objective.span(model.n_layers)  # refused here, and not at each request
        self.model, self.estimator, self.limit = model, estimator, limit
        self.prompt_template, self.served = prompt_template, served
        self._waiting: deque[_Turn[Any]] = deque()
        self._changed = threading.Condition()
        self._closed, self._busy, self._turn_seconds = False, False, _FIRST_GUESS
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"semgrad-guard-{model.name}")
        self._thread.start()

    @property
    def depth(self) -> int:
        """How many requests wait, the one that is being worked on aside."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused."""
        return self._closed or self.depth >= self.limit

    async def answer(self, request: AnswerRequest) -> list[Draft[Answer]]:
        """The scored drafts of a request.

        Raises:
            QueueFullError: too many wait already.
            SemGradGuardError: whatever answering raises.
        """
        return await self.work(lambda: self._answered(request))

    async def scored(
        self, conversation: tuple[Message, ...], text: str, *, form: AnswerForm | None = None, cut: bool = False
    ) -> Draft[None]:
        """A text from elsewhere as the answer to a conversation, with its score."""
        options = {} if form is None else form.template_options
        answerer = self._answerer(GenerationOptions())
        return await self.work(lambda: answerer.scored(conversation, text, template_options=options, cut=cut))

    async def segments(
        self, conversation: tuple[Message, ...], text: str, *, by: By
    ) -> list[tuple[Segment, float | None]]:
        """A text's sentences or clauses, each with an uncertainty of its own; None where none of its tokens has one.

        Raises:
            InputError: the estimator compares whole answers.
        """
        estimator = self.estimator
        if not isinstance(estimator, ReplayEstimator):
            raise InputError(f"{estimator.name} compares whole answers; leave 'by' out, or serve with hybridgrad")

        def work() -> list[tuple[Segment, float | None]]:
            found = self.model.score(conversation, text, by=by, objective=estimator.objective)
            return [(each, None if each.scores is None else estimator.value(each.scores)) for each in found]

        return await self.work(work)

    async def unscored(self, text: str, reason: str) -> Draft[None]:
        """A text from elsewhere that cannot be scored, with the reason."""
        answerer = self._answerer(GenerationOptions())
        return await self.work(lambda: Draft(answerer.unscored(text, reason), None))

    async def work(self, work: Callable[[], T]) -> T:
        """What `work` returns, run in the model's thread when its turn has come. A cancelled task stops it.

        Raises:
            QueueFullError: too many wait already.
            DeadlineExceededError: the current deadline was over before it was done.
        """
        stop = Stop()
        with stopping(stop), cancelling(stop):
            turn = _Turn(work, copy_context())
            self._put(turn)
            try:
                return await ain_time(asyncio.wrap_future(turn.future))
            finally:
                if not turn.future.done() or turn.future.cancelled():
                    stop.cancel()
                    self._drop(turn)

    def retry_after(self) -> int:
        """Whole seconds after which there should be room again, at least 1."""
        return max(1, math.ceil(self._turn_seconds * (self.depth + 1)))

    def close(self, *, timeout: float = 10.0) -> None:
        """Let go of what waits, and of the thread once it has finished its turn."""
        with self._changed:
            self._closed = True
            left, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for turn in left:
            if turn.future.set_running_or_notify_cancel():
                turn.future.set_exception(AnswerCancelledError("the server is shutting down; ask again later"))
        self._thread.join(timeout)

    # The queue.

    def _put(self, turn: _Turn[Any]) -> None:
        with self._changed:
            if self._closed:
                raise AnswerCancelledError("the server is shutting down; ask again later")
            if len(self._waiting) >= self.limit:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait for {self.model.name} already, which is the limit. Ask again "
                    f"in {self.retry_after()} s",
                    retry_after=self.retry_after(),
                )
            self._waiting.append(turn)
            self._changed.notify()

    def _drop(self, turn: _Turn[Any]) -> None:
        with self._changed:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            began = time.monotonic()
            if turn.future.set_running_or_notify_cancel():
                _settle(turn)
                self._turn_seconds += _WEIGHT * (time.monotonic() - began - self._turn_seconds)
            del turn  # an idle thread holds no answer
            self._busy = False

    def _next(self) -> _Turn[Any] | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
            self._busy = True
            return self._waiting.popleft()

    # How one request is answered.

    def _answered(self, request: AnswerRequest) -> list[Draft[Answer]]:
        form = request.form
        if any(message.tool_calls for message in request.conversation):
            _ = self.model.tool_format  # a template that knows no tools would leave the calls out
        self._require_short(request)
        options = replace(request.options, grammar=form.grammar(self.model))
        answerer, conversation = self._answerer(options), form.instructed(request.conversation)
        if request.heard is None or request.count > 1:
            drafts = answerer.drafts([conversation] * request.count, template_options=form.template_options)
        else:
            drafts = [self._heard(answerer, conversation, request)]
        return [self._as_answer(draft, request) for draft in drafts]

    def _heard(
        self, answerer: Answerer, conversation: tuple[Message, ...], request: AnswerRequest
    ) -> Draft[Generation]:
        """The draft of an answer that is heard while it is written; text that may turn out to be a call is not."""
        live, tools = answerer.live(conversation, template_options=request.form.template_options), request.form.tools
        written, shown = "", 0
        try:
            for piece in live:
                written += piece
                end = self.model.tool_format.shown(written) if tools else len(written)
                if end > shown and request.heard is not None:
                    request.heard(written[shown:end])
                    shown = end
            return live.draft()
        finally:
            live.close()

    def _as_answer(self, draft: Draft[Generation], request: AnswerRequest) -> Draft[Answer]:
        generation, verdict = draft.answer, draft.verdict
        if broken := request.form.taken_apart(self.model, generation).broken:
            # OpenAI's form has no place for a call that nobody can read: it is delivered as the text that it is.
            verdict = verdict.model_copy(update={"text": "\n".join((verdict.text, *broken)).lstrip("\n")})
        logprobs = self._logprobs(generation, request) if request.logprobs else None
        answer = Answer(
            text=verdict.text,
            tool_calls=tuple(_identified(call) for call in verdict.tool_calls),
            finish_reason="tool_calls" if verdict.tool_calls else generation.finish_reason,
            logprobs=logprobs,
            prompt_tokens=len(generation.prompt.ids),
            completion_tokens=generation.completion_tokens,
        )
        return Draft(verdict, answer, draft.prompt)

    def _logprobs(self, generation: Generation, request: AnswerRequest) -> list[dict[str, Any]]:
        found = openai_logprobs(self.model, self.estimator, generation.evidence, top=request.top_logprobs)
        return [] if found is None else found["content"]

    def _require_short(self, request: AnswerRequest) -> None:
        limit = request.prompt_limit
        if limit is None:
            return
        found = len(self.model.render(request.conversation, **request.form.template_options).ids)
        if found > limit:
            raise PromptTooLongError(f"the prompt has {found} tokens, and this server takes {limit}; shorten it")

    def _answerer(self, options: GenerationOptions) -> Answerer:
        return Answerer(
            self.model, self.estimator, options=options, prompt_template=self.prompt_template, served=self.served
        )


class LiveAnswers:
    """An answer that is being written, on the event loop: its pieces, then its scored draft (`AsyncLiveDraft`)."""

    def __init__(self, scheduler: Scheduler, request: AnswerRequest) -> None:
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def heard(piece: str) -> None:
            current_stop().check()
            loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        self._task = asyncio.ensure_future(scheduler.answer(replace(request, heard=heard)))
        self._task.add_done_callback(lambda _: self._pieces.put_nowait(None))

    async def __aiter__(self) -> Any:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def draft(self) -> Draft[Answer]:
        """The whole answer with its score."""
        return (await self._task)[0]

    async def aclose(self) -> None:
        """Stop the model; harmless at any time."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _identified(call: ToolCall) -> ToolCall:
    """The call with an id: clients join a tool's answer to its call by it, and templates may write none."""
    return call if call.id else replace(call, id=new_id())


def _settle(turn: _Turn[Any]) -> None:
    try:
        result = turn.context.run(_under_its_stops, turn.work)
    except SemGradGuardError as error:
        turn.future.set_exception(error.with_traceback(None))  # its frames hold the states of the model
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits
        turn.future.set_exception(error)
    else:
        turn.future.set_result(result)


def _under_its_stops(work: Callable[[], T]) -> T:
    current_stop().check()
    return work()

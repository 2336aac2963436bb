"""Between runs and the flow: the rules for a call, its drafts, and the messages that go out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from langchain_core.callbacks import CallbackManager
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.targets import Asked, Said, Target, escalating, is_escalating
from langchain_semgrad_guard.tools import calls_of
from semgrad_guard import Verdict
from semgrad_guard.guard import (
    AsyncLiveDraft,
    Draft,
    LiveDraft,
    Outcome,
    Terms,
    Waiting,
    arun,
    arun_stream,
    as_draft,
    is_withheld,
    run,
    run_stream,
    unscored,
)
from semgrad_guard.records import PromptForm

NO_SCORE = "the answer carries no score"
CHANGED = "calls were added to an answer that had been judged"
Result = ChatResult | Exception


class LiveAnswer(LiveDraft[ChatGenerationChunk, AIMessage], Protocol):
    """An answer that is being written: its pieces, its scored draft, and the chunks that close it."""

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]: ...


class AsyncLiveAnswer(AsyncLiveDraft[ChatGenerationChunk, AIMessage], Protocol):
    """Like `LiveAnswer`, on the event loop."""

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]: ...


@dataclass(frozen=True, eq=False)
class Rules:
    """How a run's answer is judged, and who is asked for what is not let through.

    `owner` is the router (or guard) itself: one that is attached twice is one. A message that calls none but
    `trusted_tools` may do so whatever its score. `irreplaceable` says why no text can stand in for a withheld message,
    where that is so.
    """

    owner: object
    terms: Terms
    target: Target | None = None
    trusted_tools: frozenset[str] = frozenset()
    irreplaceable: str = ""
    tell: Callable[[AIMessage, AIMessage | None], None] = lambda message, draft: None

    def draft(self, message: AIMessage, prompt: PromptForm | None, source: str | None) -> Draft[AIMessage]:
        """A message as a draft to be judged. One that carries no record is unscored."""
        called = {call["name"] for call in message.tool_calls}
        return Draft(
            draft_verdict(message).model_copy(update={"tool_calls": calls_of(message)}),
            message,
            prompt,
            trusted=bool(called) and called <= self.trusted_tools,
            can_escalate=not is_escalating(self.owner),
            irreplaceable=self.irreplaceable,
            source=source,
        )

    def delivered(self, outcome: Outcome[AIMessage], draft: AIMessage | None) -> AIMessage:
        """The message that goes out."""
        message = self._formed(outcome, draft)
        self.tell(message, draft)
        return message

    def _formed(self, outcome: Outcome[AIMessage], draft: AIMessage | None) -> AIMessage:
        verdict, keep_draft = outcome.verdict, self.terms.keep_draft
        if outcome.answer is None:
            return convert.abstention(draft or AIMessage(""), verdict, keep_draft=keep_draft)
        if draft is None or outcome.answer is not draft:
            return convert.escalation(outcome.answer, verdict, draft or AIMessage(""), keep_draft=keep_draft)
        if self.is_whole(outcome, draft):
            return convert.decided(draft, verdict, keep_draft=keep_draft)
        return convert.calls_alone(draft, verdict, keep_draft=keep_draft)

    def is_whole(self, outcome: Outcome[AIMessage], draft: AIMessage | None) -> bool:
        """Whether all of a draft goes out: not of one whose calls are trusted, while its text is not let through."""
        verdict = outcome.verdict
        trusted = self.terms.withholds and not verdict.enforced and verdict.action != "answer"
        return draft is not None and outcome.answer is draft and not trusted


def draft_verdict(message: BaseMessage) -> Verdict:
    """The undecided verdict on a message."""
    recorded = convert.stage_verdict(message)
    if recorded is None:
        return unscored(convert.message_text(message), reason=NO_SCORE)
    if is_withheld(recorded) and isinstance(message, AIMessage) and message.tool_calls:  # an abstention calls nothing
        return unscored(convert.message_text(message), reason=CHANGED)
    return as_draft(recorded)


@dataclass(frozen=True, eq=False)
class Call:
    """One list of messages to answer, its options, the rules for it, and who hears runs inside its run."""

    messages: list[BaseMessage]
    stop: list[str] | None
    options: Mapping[str, Any]
    rules: Rules | None = None
    heard: CallbackManager = field(default_factory=lambda: CallbackManager(handlers=[]))
    told: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its options as a target is told them: tools as the caller described them, not in one provider's form."""
    configurable: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What its user has configured, for targets."""

    @property
    def source(self) -> str | None:
        """The id of its run, if that is known."""
        return None if self.heard.parent_run_id is None else str(self.heard.parent_run_id)

    @property
    def withholds(self) -> bool:
        """Whether its answer may be kept back."""
        return self.rules is not None and self.rules.terms.withholds

    @property
    def hides(self) -> bool:
        """Whether nobody may hear what its draft is made of."""
        return self.rules is not None and self.rules.terms.withholds and not self.rules.terms.keep_draft


class Answers:
    """The answers to calls under one set of rules. A call has one, or as many as its result holds (`n`).

    `form` says what a call's prompt looks like. `limit` is the model's own, in seconds, where the rules set none.
    """

    def __init__(
        self,
        rules: Rules,
        calls: Sequence[Call],
        *,
        form: Callable[[Rules, Call], PromptForm | None],
        limit: float | None = None,
    ) -> None:
        terms = rules.terms
        self._terms = terms if limit is None or terms.timeout is not None else replace(terms, timeout=limit)
        self._rules, self._calls, self._form = rules, calls, form
        self._results: Sequence[Result] = ()
        self._drafts: list[tuple[Call, AIMessage | None]] = []

    def judged(self, make: Callable[[], Sequence[Result]]) -> list[Result]:
        """Make the drafts, judge them, ask the target about those that are not let through: one result per call."""
        return self._delivered(run(self._terms, lambda: self._drafted(make()), self._ask))

    async def ajudged(self, make: Callable[[], Awaitable[Sequence[Result]]]) -> list[Result]:
        """Like `judged`, without blocking the event loop."""

        async def draft() -> list[Draft[AIMessage] | Exception]:
            return self._drafted(await make())

        return self._delivered(await arun(self._terms, draft, self._aask))

    def streamed(self, start: Callable[[], LiveAnswer]) -> Iterator[ChatGenerationChunk]:
        """The one answer's pieces as they are written, and its verdict in the last: a mode that withholds nothing."""
        started: list[LiveAnswer] = []

        def begin() -> LiveAnswer:
            started.append(start())
            return started[0]

        for step in run_stream(self._terms, begin, lambda _: ()):
            yield from started[0].last(self._message(step)) if isinstance(step, Outcome) else (step,)

    async def astreamed(self, start: Callable[[], Awaitable[AsyncLiveAnswer]]) -> AsyncGenerator[ChatGenerationChunk]:
        """Like `streamed`, on the event loop."""
        started: list[AsyncLiveAnswer] = []

        async def begin() -> AsyncLiveAnswer:
            started.append(await start())
            return started[0]

        async def nobody(_: object) -> Sequence[Said]:
            return ()

        async with aclosing(arun_stream(self._terms, begin, nobody)) as steps:
            async for step in steps:
                for piece in started[0].last(self._message(step)) if isinstance(step, Outcome) else (step,):
                    yield piece

    def _drafted(self, results: Sequence[Result]) -> list[Draft[AIMessage] | Exception]:
        """The results' messages as drafts, call by call; an error stands for its call."""
        self._results = results
        drafts: list[Draft[AIMessage] | Exception] = []
        for call, result in zip(self._calls, results, strict=True):
            if isinstance(result, Exception):
                self._drafts.append((call, None))
                drafts.append(result)
                continue
            prompt = self._form(self._rules, call)
            for generation in result.generations:
                message = cast("AIMessage", generation.message)
                self._drafts.append((call, message))
                drafts.append(self._rules.draft(message, prompt, call.source))
        return drafts

    def _ask(self, waiting: Sequence[Waiting[AIMessage]]) -> Sequence[Said]:
        """What the target says."""
        if self._rules.target is None:
            return ()
        with escalating(self._rules.owner):
            return self._rules.target.ask([self._asked(each) for each in waiting])

    async def _aask(self, waiting: Sequence[Waiting[AIMessage]]) -> Sequence[Said]:
        if self._rules.target is None:
            return ()
        with escalating(self._rules.owner):
            return await self._rules.target.aask([self._asked(each) for each in waiting])

    def _asked(self, waiting: Waiting[AIMessage]) -> Asked:
        call, _ = self._drafts[waiting.index]
        return Asked(
            call.messages, call.stop, call.told, call.heard, waiting.answer, waiting.verdict, call.configurable
        )

    def _message(self, outcome: Outcome[AIMessage]) -> AIMessage:
        """The message of a stream's outcome."""
        return self._rules.delivered(outcome, outcome.answer)

    def _delivered(self, outcomes: Sequence[Outcome[AIMessage] | Exception]) -> list[Result]:
        """One result for each call, in results of our own: the drafts' objects may sit in a cache."""
        pairs = iter(zip(self._drafts, outcomes, strict=True))
        return [self._result(result, pairs) for result in self._results]

    def _result(self, result: Result, pairs: Any) -> Result:
        drafts = [None] if isinstance(result, Exception) else result.generations
        generations: list[ChatGeneration] = []
        error: Exception | None = None
        partly = False
        for generation, ((_, draft), outcome) in zip(drafts, pairs, strict=False):
            if isinstance(outcome, Exception):
                error = error or outcome
                continue
            message = self._rules.delivered(outcome, draft)
            whole = self._rules.is_whole(outcome, draft)
            partly = partly or not whole
            info = generation.generation_info if generation is not None and whole else None
            generations.append(ChatGeneration(message=message, generation_info=info))
        output = None if isinstance(result, Exception) else result.llm_output
        return error or ChatResult(generations=generations, llm_output=convert.safe(output) if partly else output)

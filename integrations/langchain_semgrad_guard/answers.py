"""Between runs and the guard's flow: a call, its model, the rules for it, its drafts, and the delivered messages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast

from langchain_core.callbacks import CallbackManager
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableBinding

from langchain_semgrad_guard import messages as convert
from semgrad_guard import Verdict
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    Draft,
    Live,
    Outcome,
    Paused,
    Refusal,
    Reply,
    Steps,
    StreamSteps,
    Terms,
    Waiting,
    Work,
    answers,
    as_draft,
    is_withheld,
    streamed,
    unscored,
)
from semgrad_guard.records import PromptForm

NO_SCORE = "the answer carries no score"
CHANGED = "calls were added to an answer that had been judged"


@dataclass(frozen=True, eq=False)
class Call:
    """One list of messages to answer, its options, the rules for it, and the callbacks of runs inside its run."""

    messages: list[BaseMessage]
    stop: list[str] | None
    options: Mapping[str, Any]
    rules: Rules | None = None
    inner: CallbackManager = field(default_factory=lambda: CallbackManager(handlers=[]))
    target_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its options for a target: tools as the caller described them, not in one provider's form."""
    configurable: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The user's configuration, for targets."""

    @property
    def source(self) -> str | None:
        """The id of its run, if that is known."""
        return None if self.inner.parent_run_id is None else str(self.inner.parent_run_id)

    @property
    def withholds(self) -> bool:
        """Whether its answer may be kept back."""
        return self.rules is not None and self.rules.terms.withholds

    @property
    def hides(self) -> bool:
        """Whether no handler may hear the parts of its draft."""
        return self.rules is not None and self.rules.terms.withholds and not self.rules.terms.keep_draft


class Inner(NamedTuple):
    """The chat model inside, and the options and the config that are bound to it."""

    model: BaseChatModel
    options: Mapping[str, Any]
    config: Mapping[str, Any]


def inner_of(model: Any) -> Inner:
    """A chat model, or one with bound arguments.

    Raises:
        InputError: it is something else.
    """
    options: dict[str, Any] = {}
    config: dict[str, Any] = {}
    found: Any = model
    while isinstance(found, RunnableBinding):
        binding = cast("RunnableBinding[Any, Any]", found)
        if binding.config_factories:
            raise InputError(
                "listeners on the model inside a guard would hear drafts. Put them on the guard: "
                "GuardedChatModel(model, policy).with_listeners(...)"
            )
        options, config, found = {**binding.kwargs, **options}, {**binding.config, **config}, binding.bound
    if isinstance(found, BaseChatModel):
        return Inner(found, options, config)
    raise InputError(
        f"a guard takes a chat model, not a {type(found).__name__}: guarded(chain, policy, scorer=...) is for anything "
        "else. Or guard the model itself and build the rest around "
        "the guard, which is a chat model too: GuardedChatModel(model, policy).with_retry(), .with_fallbacks([...]), "
        ".configurable_fields(...). In an agent, put ModelRetryMiddleware or ModelFallbackMiddleware behind the guard"
    )


@dataclass(frozen=True)
class TargetRequest:
    """A call whose draft was not let through, for an escalation target."""

    call: Call
    draft: AIMessage
    verdict: Verdict


TargetReply = Reply[AIMessage] | Refusal | Paused | Exception


class Target(Protocol):
    """Answers in place of drafts that are not let through."""

    def ask(self, requests: Sequence[TargetRequest]) -> Sequence[TargetReply]: ...

    async def aask(self, requests: Sequence[TargetRequest]) -> Sequence[TargetReply]: ...


class Writing(Live, Protocol):
    """An answer that is being written. Its pieces and its end become LangChain's chunks."""

    def chunks(self, piece: Any) -> list[ChatGenerationChunk]:
        """The chunks that may be shown once a piece is written."""
        ...

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The rest of the text, and the chunk that holds everything else."""
        ...


def _unnoticed(message: AIMessage, draft: AIMessage | None) -> None:
    """Nobody is notified (a function of a module, so that rules can be pickled)."""


@dataclass(frozen=True, eq=False)
class Rules:
    """How a run's answer is judged, and the target for an answer that is not let through.

    `owner` is the router (or guard) itself: one that is attached twice is one. A message that calls `trusted_tools`
    alone may do so whatever its score. `irreplaceable` is the reason why no text can replace a withheld message, if
    there is one. `notify` gets every delivered message with its draft.
    """

    owner: object
    terms: Terms
    target: Target | None = None
    trusted_tools: frozenset[str] = frozenset()
    irreplaceable: str = ""
    notify: Callable[[AIMessage, AIMessage | None], None] = _unnoticed

    def draft(self, message: AIMessage, prompt: PromptForm | None, source: str | None) -> Draft[AIMessage]:
        """A message as a draft to be judged. One that carries no record is unscored."""
        called = {call["name"] for call in message.tool_calls}
        return Draft(
            draft_verdict(message).model_copy(update={"tool_calls": convert.calls_of(message)}),
            message,
            prompt,
            trusted=bool(called) and called <= self.trusted_tools,
            can_escalate=not is_escalating(self.owner),
            irreplaceable=self.irreplaceable,
            source=source,
        )

    def delivered(self, outcome: Outcome[AIMessage], draft: AIMessage | None) -> AIMessage:
        """The message of an outcome."""
        verdict, keep_draft = outcome.verdict, self.terms.keep_draft
        if outcome.answer is None:
            message = convert.abstention(draft or AIMessage(""), verdict, keep_draft=keep_draft)
        elif draft is None or outcome.answer is not draft:
            message = convert.escalation(outcome.answer, verdict, draft or AIMessage(""), keep_draft=keep_draft)
        elif self.is_whole(outcome, draft):
            message = convert.decided(draft, verdict, keep_draft=keep_draft)
        else:
            message = convert.calls_alone(draft, verdict, keep_draft=keep_draft)
        self.notify(message, draft)
        return message

    def is_whole(self, outcome: Outcome[AIMessage], draft: AIMessage | None) -> bool:
        """Whether a draft is delivered as a whole, not its trusted calls without a text that is not let through."""
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


class Answers:
    """The answers to a call under its rules: one, or as many as its result holds (`n`).

    `form` gives the form of the call's prompt. `limit` is the model's own, in seconds, where the rules set none.
    """

    def __init__(
        self, rules: Rules, call: Call, *, form: Callable[[], PromptForm | None], limit: float | None = None
    ) -> None:
        terms = rules.terms
        self._terms = terms if limit is None or terms.timeout is not None else replace(terms, timeout=limit)
        self._rules, self._call, self._form = rules, call, form
        self._result: ChatResult | None = None

    def judged(self, make: Steps[ChatResult]) -> Steps[ChatResult]:
        """Make the drafts, judge them, and call the target for those that are not let through.

        Raises:
            Exception: of drafting, or the first one in an answer's place.
        """

        def drafted() -> Steps[list[Draft[AIMessage]]]:
            self._result = yield from make
            prompt = self._form()
            return [self._rules.draft(message, prompt, self._call.source) for message in self._drafts]

        outcomes = yield from answers(self._terms, Work.of(drafted), self._ask)
        # Results of our own: the drafts' objects may be in a cache.
        drafts, partly = [None] if self._result is None else self._drafts, False
        generations: list[ChatGeneration] = []
        for index, (draft, outcome) in enumerate(zip(drafts, outcomes, strict=True)):
            if isinstance(outcome, Exception):
                raise outcome
            message, whole = self._rules.delivered(outcome, draft), self._rules.is_whole(outcome, draft)
            partly = partly or not whole
            info = self._result.generations[index].generation_info if self._result and whole else None
            generations.append(ChatGeneration(message=message, generation_info=info))
        output = None if self._result is None else self._result.llm_output
        return ChatResult(generations=generations, llm_output=convert.safe(output) if partly else output)

    def streamed(self, writing: Writing) -> StreamSteps[ChatGenerationChunk, None]:
        """The pieces of the one answer as they are written, as far as they may leave, and the verdict in the last."""
        live = _Noting(writing)

        def show(step: Any) -> list[ChatGenerationChunk]:
            if not isinstance(step, Outcome):
                return writing.chunks(step)
            return writing.last(self._rules.delivered(cast("Outcome[AIMessage]", step), live.message))

        return streamed(self._terms, live, self._ask, show=show)

    @property
    def _drafts(self) -> list[AIMessage]:
        return [] if self._result is None else [cast("AIMessage", made.message) for made in self._result.generations]

    def _ask(self, waiting: Sequence[Waiting[AIMessage]]) -> Work:
        requests = [TargetRequest(self._call, draft.answer, draft.verdict) for draft in waiting]

        def replies() -> Steps[Sequence[TargetReply]]:
            target = self._rules.target
            if target is None:
                return ()
            with escalating(self._rules.owner):
                return (yield Work(lambda: target.ask(requests), lambda: target.aask(requests)))

        return Work.of(replies)


class _Noting:
    """A live answer that keeps the message of its draft (`Live`)."""

    def __init__(self, writing: Writing) -> None:
        self.next, self.close, self._draft = writing.next, writing.close, writing.draft
        self.message: AIMessage | None = None

    def draft(self) -> Work:
        return Work.of(self._noted)

    def _noted(self) -> Steps[Draft[AIMessage]]:
        draft: Draft[AIMessage] = yield self._draft()
        self.message = draft.answer
        return draft


# A target may hold the guarded model itself: inside its own escalation a guard still judges, but hands on no further.


@dataclass(eq=False)
class _Escalation:
    """One escalation of a guard. Tasks that its target has left behind keep its context, but not its meaning."""

    guard: object
    is_over: bool = False


_escalating: ContextVar[tuple[_Escalation, ...]] = ContextVar("semgrad_guard_escalating", default=())


@contextmanager
def escalating(guard: object) -> Generator[None]:
    """The time during which a guard's target answers."""
    escalation = _Escalation(guard)
    token = _escalating.set((*_escalating.get(), escalation))
    try:
        yield
    finally:
        escalation.is_over = True
        _escalating.reset(token)


def is_escalating(guard: object) -> bool:
    """Whether this happens inside the guard's own escalation."""
    return any(escalation.guard is guard and not escalation.is_over for escalation in _escalating.get())

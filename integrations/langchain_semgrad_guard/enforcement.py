"""`EnforcingChatModel`: a chat model whose guarded runs end with the outcome.

Whatever LangChain derives from a run (histories, listeners, token handlers, event streams, usage, a graph's message
stream) is made of the run's end. So the draft is made and judged inside the run, and has no run of its own: LangChain's
cache holds drafts, which every router judges anew, and everything else sees the delivered message.

A router is found among the handlers of the run. LangChain does not give `_stream` its run, so that a copy of the model
carries the rules of one stream.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import cached_property, partial
from typing import Any, Self, cast

from langchain_core.callbacks import (
    BaseCallbackHandler,
    CallbackManager,
    Callbacks,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import (
    run_in_executor,
    var_child_runnable_config,
)
from langchain_core.runnables.utils import coro_with_context
from langchain_core.utils.utils import LC_ID_PREFIX
from pydantic import PrivateAttr

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Answers, Call, Rules, Writing, draft_verdict
from langchain_semgrad_guard.callback import EnforcingDescription, UncertaintyRouterCallback, observe
from langchain_semgrad_guard.runs import (
    WITNESS,
    AsideManager,
    AsyncRun,
    Config,
    RunManager,
    SyncRun,
    configured,
    handlers_of,
    inside,
)
from semgrad_guard import LanguageModel
from semgrad_guard.errors import UnenforcedPolicyError
from semgrad_guard.guard import Draft, Steps, Work, adrive, current_recorder, drive, record_draft
from semgrad_guard.records import PromptForm

Identified = tuple[LanguageModel, Any]
"""A model, and its identity."""

_identified: ContextVar[Identified | None] = ContextVar("semgrad_guard_identified", default=None)


def identity_of(model: LanguageModel) -> Any:
    """A model's identity: as the call in progress has found it, for to look again is to wait for the model's turn."""
    found = _identified.get()
    return found[1] if found is not None and found[0] is model else model.identity


@contextmanager
def _set_identity(found: Identified | None) -> Generator[None]:
    token = _identified.set(found)
    try:
        yield
    finally:
        _identified.reset(token)


class AloudChatModel(BaseChatModel):
    """A chat model that can be made to run in another context than the code that calls it (see `aside`)."""

    _context: Context | None = PrivateAttr(default=None)

    @property
    def context(self) -> Context | None:
        """The context in which it runs, if that is another than its caller's."""
        return self._context

    def aloud_in(self, context: Context) -> Self:
        """A copy whose runs are heard by those who hear this context."""
        copy = self.model_copy()
        copy._context = context
        return copy

    def invoke(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answer one input."""
        if self._context is not None:
            invoked = partial(super().invoke, input, _aloud(config), stop=stop, **kwargs)
            return self._context.copy().run(invoked)
        with configured(config):
            return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AIMessage:
        """Like `invoke`, without blocking the event loop."""
        if self._context is not None:
            invoked = super().ainvoke(input, _aloud(config), stop=stop, **kwargs)
            return await coro_with_context(invoked, self._context.copy(), create_task=True)
        with configured(config):
            return await super().ainvoke(input, config, stop=stop, **kwargs)


def _aloud(config: RunnableConfig | None) -> RunnableConfig | None:
    """A config without the callbacks that code aside has: those of the context hold."""
    if config is None or not isinstance(config.get("callbacks"), AsideManager):
        return config
    return cast("RunnableConfig", {key: value for key, value in config.items() if key != "callbacks"})


class EnforcingChatModel(AloudChatModel):
    """Subclasses answer (`_generate`, `_live`); this class decides how the runs end.

    An answer's way: a run calls `_generate_with_cache`; the model drafts (`_drafted`: `chat_model.py` or, for a served
    model, `served.py`); `answers.py` hands the drafts to the flow, `semgrad_guard/guard/flow.py`, which settles them;
    and the flow's outcome is a message again.
    """

    _rules: Rules | None = PrivateAttr(default=None)
    _inner_callbacks: CallbackManager | None = PrivateAttr(default=None)
    _config: RunnableConfig | None = PrivateAttr(default=None)

    # The way of an answer: drafts are made and judged, the run ends with the outcome.

    def generate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Answer each list of messages in a run of its own."""
        with _set_identity(self._ready()):
            return super().generate(*args, **kwargs)

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Like `generate`, without blocking the event loop; the lists are answered together."""
        with _set_identity(await run_in_executor(None, self._ready)):
            return await super().agenerate(*args, **kwargs)

    def _generate_with_cache(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> ChatResult:
        return drive(self._ended(messages, stop, run_manager, kwargs, is_async=False))

    async def _agenerate_with_cache(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> ChatResult:
        return await adrive(self._ended(messages, stop, run_manager, kwargs, is_async=True))

    def _ended(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run: Any,
        kwargs: dict[str, Any],
        *,
        is_async: bool,
    ) -> Steps[ChatResult]:
        """The end of a run: the delivered answer, which handlers that want it while it is written hear as well."""
        call = self._call(messages, stop, run, kwargs)
        by_events, by_tokens = self._shown(run, kwargs, is_async=is_async)
        if (by_events or by_tokens) and (not call.withholds or self._live(call, is_async=is_async)):
            model = self if call.rules is None else self.guarded_by(call.rules, call.inner)
            if call.withholds:
                model.cache = False  # which holds drafts, and no part of one
            live = super(EnforcingChatModel, model)
            given = (messages, stop, run)
            return (
                yield Work(
                    lambda: live._generate_with_cache(*given, **kwargs),
                    lambda: live._agenerate_with_cache(*given, **kwargs),
                )
            )
        result = yield from self._answered(call)
        if run is None:
            return result
        result = self._own(result, run)
        made = result.generations
        if by_events:
            yield Work(
                lambda: self._replay_v2_events_for_cache_hit(made, run_manager=run, **kwargs),
                lambda: self._areplay_v2_events_for_cache_hit(made, run_manager=run, **kwargs),
            )
        elif by_tokens:
            for chunk in map(convert.whole_chunk, made):
                hear = partial(run.on_llm_new_token, chunk.text, chunk=chunk)
                yield Work(hear, hear)
        return result

    def _own(self, result: ChatResult, run: RunManager) -> ChatResult:
        """The result as the run's: messages in this model's form, with the run's id unless their maker gave one."""
        generations: list[ChatGeneration] = []
        for generation in result.generations:
            message = convert.in_form(cast("AIMessage", generation.message), self.output_version)
            if message.id is None:
                message = message.model_copy(update={"id": f"{LC_ID_PREFIX}-{run.run_id}"})
            generations.append(ChatGeneration(message=message, generation_info=generation.generation_info))
        return ChatResult(generations=generations, llm_output=result.llm_output)

    def _answered(self, call: Call) -> Steps[ChatResult]:
        """Draft, judge, and call the router's target for a draft that it does not let through."""
        if call.rules is not None:
            return (yield from self._judging(call.rules, call).judged(self._drafted(call)))
        result = yield from self._drafted(call)
        for generation in result.generations:
            self._noticed(call, cast("AIMessage", generation.message))
        return result

    def _judging(self, rules: Rules, call: Call) -> Answers:
        return Answers(rules, call, form=lambda: self._form_for(rules, call), limit=self._limit)

    def _noticed(self, call: Call, message: AIMessage) -> None:
        """Record a draft for a calibration, and report it where this very model observes."""
        if current_recorder() is not None:
            record_draft(draft_verdict(message), self._asked_form(call), source=call.source)
        if self.rules is not None and self.rules.terms.observes:
            observe(self.rules, self.draft_of(message, call))
            self.rules.notify(message, message)

    # Which rules hold.

    @property
    def carried(self) -> Rules | None:
        """The rules that were put on this copy (`guarded_by`)."""
        return self._rules

    @property
    def rules(self) -> Rules | None:
        """The rules of this model for all its answers, whatever run they belong to."""
        return self._rules

    @cached_property
    def _serialized(self) -> dict[str, Any]:
        return EnforcingDescription(super()._serialized)

    def guarded_by(
        self, rules: Rules | None, inner: CallbackManager | None = None, config: RunnableConfig | None = None
    ) -> Self:
        """A copy that judges its answers by these rules, whatever run they belong to."""
        copy = self.model_copy()
        copy._rules, copy._inner_callbacks, copy._config = rules, inner, config
        return copy

    @property
    def bare(self) -> Self:
        """This model without rules of its own."""
        return self if self._rules is None else self.guarded_by(None)

    def _rules_among(self, callbacks: Callbacks, labels: frozenset[str]) -> Rules | None:
        """The rules for a run with these tags and names: of this model, or of a router. Observers decide nothing.

        Raises:
            UnenforcedPolicyError: there are several, and one of them would be ignored.
        """
        own = self.rules
        rules_by_owner: dict[int, Rules] = {} if own is None else {id(own.owner): own}
        for handler in (*handlers_of(callbacks), *handlers_of(self.callbacks)):
            if isinstance(handler, UncertaintyRouterCallback) and handler.guards(labels):
                rules_by_owner.setdefault(id(handler), handler.rules)
        deciding = [rules for rules in rules_by_owner.values() if not rules.terms.observes]
        if len(deciding) > 1:
            raise UnenforcedPolicyError(
                f"{len(deciding)} routers are attached to one model and only one can decide. Attach one; to judge a "
                "second stage, give the escalation target a router of its own."
            )
        return deciding[0] if deciding else None

    def _call(
        self, messages: list[BaseMessage], stop: list[str] | None, manager: RunManager | None, options: dict[str, Any]
    ) -> Call:
        options = {name: value for name, value in options.items() if name != "stream"}  # drafts are made whole
        inner = inside(manager) if manager is not None or self._inner_callbacks is None else self._inner_callbacks
        handlers = [] if manager is None else list(manager.handlers)
        rules = self._rules_among(handlers, _labels(manager, handlers))
        config = self._config or var_child_runnable_config.get() or RunnableConfig()
        configurable = config.get("configurable", {})
        return Call(messages, stop, options, rules, inner, self._target_options(options), configurable)

    # For subclasses.

    def _ready(self) -> Identified | None:
        """Whatever blocks before an answer; async paths call it off the event loop. The model and its identity."""

    def _live(self, call: Call, *, is_async: bool) -> Writing | None:
        """Answer piece by piece, from the first piece that is taken; None where only the end decides about the text."""
        raise NotImplementedError

    def _form(self, call: Call) -> PromptForm | None:
        """The form of a call's prompt."""
        return None

    def _drafted(self, call: Call) -> Steps[ChatResult]:
        """The answer to a call, with its record, from LangChain's cache or made anew. No handler hears it."""
        bare, given = self.bare, (call.messages, call.stop, None)
        return (
            yield Work(
                lambda: BaseChatModel._generate_with_cache(bare, *given, **call.options),
                lambda: BaseChatModel._agenerate_with_cache(bare, *given, **call.options),
            )
        )

    def _target_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """A call's options for a target."""
        return options

    @property
    def _at_once(self) -> int | None:
        """How many runs of a batch are under way at once, where its config does not say; None: LangChain's default."""
        return None

    @property
    def _limit(self) -> float | None:
        """Seconds that an answer may take where the router sets no limit."""
        return None

    def draft_of(self, message: AIMessage, call: Call) -> Draft[AIMessage]:
        """A finished message as a draft, by the rules of its call, or those of this model."""
        rules = call.rules or self.rules
        if rules is None:
            return Draft(draft_verdict(message), message)
        return rules.draft(message, self._form_for(rules, call), call.source)

    def _form_for(self, rules: Rules, call: Call) -> PromptForm | None:
        """The form of a call's prompt, where it is needed: by a calibrated policy, or a recorder."""
        needed = rules.terms.policy.calibration is not None or current_recorder() is not None
        return self._asked_form(call) if needed else None

    def _asked_form(self, call: Call) -> PromptForm | None:
        """The form of a call's prompt, and whether it holds the user's own question."""
        form = self._form(call)
        return None if form is None else WITNESS.form(form, call.source, call.messages)

    # LangChain's cache, and whether a run is shown while it is under way.

    def _convert_cached_generations(self, cache_val: list[Generation]) -> list[ChatGeneration]:
        """Drafts: an answer that was annotated while it was streamed was cached with its annotation.

        It is judged anew by the rules of the run that it is replayed to.
        """
        rules, drafts = self.rules, list[ChatGeneration]()
        for cached in super()._convert_cached_generations(cache_val):
            draft, message = cached, cached.message
            if isinstance(message, AIMessage) and convert.stage_verdict(message) is not None:
                message = convert.decided(message, draft_verdict(message))
                if rules is not None and not (rules.terms.withholds or rules.terms.observes):
                    made = Work(partial(ChatResult, generations=[ChatGeneration(message=message)])).alone()
                    answers = Answers(rules, Call([], None, {}, rules), form=lambda: None)  # the prompt is not at hand
                    message = drive(answers.judged(made)).generations[0].message
                draft = ChatGeneration(message=message, generation_info=cached.generation_info)
            drafts.append(draft)
        return drafts

    def _should_stream(self, *, async_api: bool, run_manager: Any = None, **kwargs: Any) -> bool:
        """A draft is made whole: no handler hears it. (`stream` passes an argument of that name.)"""
        if run_manager is None and not kwargs.get("stream"):
            return False
        return super()._should_stream(async_api=async_api, run_manager=run_manager, **kwargs)

    def _shown(self, manager: RunManager | None, options: dict[str, Any], *, is_async: bool) -> tuple[bool, bool]:
        """Whether a handler of the run wants the answer while it is written: as events, as tokens."""
        if manager is None:
            return False, False
        run: Any = {"async_api": is_async, "run_manager": manager, **options}
        return self._should_use_protocol_streaming(**run), self._should_stream(**run)


def _labels(run: RunManager | None, handlers: Sequence[BaseCallbackHandler]) -> frozenset[str]:
    if run is None:
        return frozenset()
    names = [handler.name_of(run.run_id) for handler in handlers if isinstance(handler, UncertaintyRouterCallback)]
    return frozenset([*run.tags, *filter(None, names)])

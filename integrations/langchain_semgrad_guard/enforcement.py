"""`EnforcingChatModel`: a chat model whose guarded runs end with the outcome.

Whatever LangChain derives from a run (histories, listeners, token handlers, event streams, usage, a graph's message
stream) is made of the run's end. So the draft is made and judged inside the run, and has no run of its own: LangChain's
cache holds drafts, which every router judges anew, and everything else sees the delivered message.

A router is found among the handlers of the run. LangChain does not give `_stream` its run, so that a copy of the model
carries the rules of one stream. The runs of a batch meet to be answered together (`batching.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Self, cast

from langchain_core.callbacks import (
    BaseCallbackHandler,
    CallbackManager,
    Callbacks,
)
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import (
    run_in_executor,
    var_child_runnable_config,
)
from langchain_core.utils.utils import LC_ID_PREFIX
from pydantic import PrivateAttr

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Answers, AsyncLiveAnswer, Call, LiveAnswer, Result, Rules, draft_verdict
from langchain_semgrad_guard.batching import take_seat
from langchain_semgrad_guard.callback import EnforcingDescription, Labels, UncertaintyRouterCallback, observe
from langchain_semgrad_guard.hearing import AloudChatModel, AsyncRun, RunManager, SyncRun, handlers_of, inside
from langchain_semgrad_guard.runs import WITNESS
from semgrad_guard.errors import UnenforcedPolicyError
from semgrad_guard.guard import Draft, current_recorder, record_draft
from semgrad_guard.records import PromptForm

_OF_A_RUN = frozenset({"tags", "metadata", "run_name", "run_id", "callbacks"}) | {
    "ls_structured_output_format",
    "structured_output_format",
}
"""The arguments of `generate` that do not reach the model."""


class EnforcingChatModel(AloudChatModel):
    """Subclasses answer (`_generate`, `_live`, `_alive`); this class decides how the runs end.

    An answer's way: a run calls `_generate_with_cache`; the model drafts (`_drafted`: `chat_model.py` or, for a served
    model, `served.py`); `answers.py` hands the drafts to the flow, `semgrad_guard/guard/flow.py`, which settles them;
    and the flow's outcome is a message again.
    """

    _rules: Rules | None = PrivateAttr(default=None)
    _inner_callbacks: CallbackManager | None = PrivateAttr(default=None)
    _origin: Any = PrivateAttr(default=None)
    _config: RunnableConfig | None = PrivateAttr(default=None)
    _is_left_alone: bool = PrivateAttr(default=False)

    # The way of an answer: drafts are made and judged, the run ends with the outcome.

    def generate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Answer each list of messages in a run of its own."""
        self._ready()
        with self._together(_calls(messages, stop, kwargs)):
            return super().generate(messages, stop, *args, **kwargs)

    async def agenerate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Like `generate`, without blocking the event loop."""
        await run_in_executor(None, self._ready)
        with self._together(_calls(messages, stop, kwargs)):
            return await super().agenerate(messages, stop, *args, **kwargs)

    def _generate_with_cache(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> ChatResult:
        call = self._call(messages, stop, run_manager, kwargs)
        by_events, by_tokens = self._shown(run_manager, kwargs, is_async=False)
        if (by_events or by_tokens) and not call.withholds:
            live = self if call.rules is None else self.guarded_by(call.rules, call.inner)
            return super(EnforcingChatModel, live)._generate_with_cache(messages, stop, run_manager, **kwargs)
        seat = take_seat(self._owner)  # in a batch, whose runs are answered together
        result = seat.ask(call) if seat is not None else only(self._answers([call]))
        if run_manager is None:
            return result
        result = self._own(result, run_manager)
        if by_events:
            self._replay_v2_events_for_cache_hit(result.generations, run_manager=run_manager, **kwargs)
        elif by_tokens:
            for chunk in map(convert.whole_chunk, result.generations):
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
        return result

    async def _agenerate_with_cache(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> ChatResult:
        call = self._call(messages, stop, run_manager, kwargs)
        by_events, by_tokens = self._shown(run_manager, kwargs, is_async=True)
        if (by_events or by_tokens) and not call.withholds:
            live = self if call.rules is None else self.guarded_by(call.rules, call.inner)
            return await super(EnforcingChatModel, live)._agenerate_with_cache(messages, stop, run_manager, **kwargs)
        seat = take_seat(self._owner)
        result = await seat.aask(call) if seat is not None else only(await self._aanswers([call]))
        if run_manager is None:
            return result
        result = self._own(result, run_manager)
        if by_events:
            await self._areplay_v2_events_for_cache_hit(result.generations, run_manager=run_manager, **kwargs)
        elif by_tokens:
            for chunk in map(convert.whole_chunk, result.generations):
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
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

    def _answers(self, calls: Sequence[Call]) -> list[Result]:
        """Draft everything, judge it, call each router's target for all that it does not let through."""
        results: dict[int, Result] = {}
        for rules, group in _by_rules(calls):
            made = partial(self._made, group)
            answers = self._unjudged(group, made()) if rules is None else self._judging(rules, group).judged(made)
            results.update(zip(map(id, group), answers, strict=True))
        return [results[id(call)] for call in calls]

    async def _aanswers(self, calls: Sequence[Call]) -> list[Result]:
        results: dict[int, Result] = {}
        for rules, group in _by_rules(calls):
            made = partial(self._amade, group)
            judged = rules and self._judging(rules, group).ajudged(made)
            answers = self._unjudged(group, await made()) if judged is None else await judged
            results.update(zip(map(id, group), answers, strict=True))
        return [results[id(call)] for call in calls]

    def _judging(self, rules: Rules, calls: Sequence[Call]) -> Answers:
        return Answers(rules, calls, form=self._form_for, limit=self._limit)

    def _made(self, calls: Sequence[Call]) -> list[Result]:
        results: list[Result] = []
        with self._together(calls):
            for call in calls:
                try:
                    results.append(self._drafted(call))
                except Exception as error:  # noqa: BLE001 - raised in this call's run
                    results.append(error)
        return results

    async def _amade(self, calls: Sequence[Call]) -> list[Result]:
        results: list[Result] = []
        with self._together(calls):
            for call in calls:
                try:
                    results.append(await self._adrafted(call))
                except Exception as error:  # noqa: BLE001 - as above
                    results.append(error)
        return results

    def _unjudged(self, calls: Sequence[Call], results: list[Result]) -> list[Result]:
        """Answers that no rules decide about."""
        for call, result in zip(calls, results, strict=True):
            for generation in [] if isinstance(result, Exception) else result.generations:
                self._noticed(call, cast("AIMessage", generation.message))
        return results

    def _noticed(self, call: Call, message: AIMessage) -> None:
        """Record a draft for a calibration, and report it where this very model observes."""
        if current_recorder() is not None:
            record_draft(draft_verdict(message), self._asked_form(call), source=call.source)
        if self.rules is not None and self.rules.terms.mode == "observe":
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
        copy._rules, copy._inner_callbacks, copy._config, copy._origin = rules, inner, config, self._owner
        return copy

    def left_alone(self) -> Self:
        """A copy for one stream that no router decides about (see `Labels`)."""
        copy = self.model_copy()
        copy._is_left_alone, copy._origin = True, self._owner
        return copy

    @property
    def _owner(self) -> object:
        """The same object for a model and its copies that carry rules."""
        return self if self._origin is None else self._origin

    @property
    def bare(self) -> Self:
        """This model without rules of its own."""
        return self if self._rules is None else self.guarded_by(None)

    def _rules_among(self, callbacks: Callbacks, labels: Labels) -> Rules | None:
        """The rules for such a run: of this model, or of a router among handlers. Observers decide nothing.

        Raises:
            UnenforcedPolicyError: there are several, and one of them would be ignored.
        """
        if self._is_left_alone or labels.are_internal:
            return None
        own = self.rules
        rules_by_owner: dict[int, Rules] = {} if own is None else {id(own.owner): own}
        for handler in (*handlers_of(callbacks), *handlers_of(self.callbacks)):
            if isinstance(handler, UncertaintyRouterCallback) and handler.guards(labels):
                rules_by_owner.setdefault(id(handler), handler.rules)
        deciding = [rules for rules in rules_by_owner.values() if rules.terms.mode != "observe"]
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

    def _ready(self) -> None:
        """Whatever blocks before the first answer; async paths call it off the event loop."""

    def _live(self, call: Call) -> LiveAnswer:
        """Answer piece by piece."""
        raise NotImplementedError

    async def _alive(self, call: Call) -> AsyncLiveAnswer:
        """Like `_live`, on the event loop."""
        raise NotImplementedError

    def _form(self, call: Call) -> PromptForm | None:
        """The form of a call's prompt."""
        return None

    def _drafted(self, call: Call) -> ChatResult:
        """The answer to a call, with its record, from LangChain's cache or made anew. No handler hears it."""
        return BaseChatModel._generate_with_cache(self.bare, call.messages, call.stop, None, **call.options)

    async def _adrafted(self, call: Call) -> ChatResult:
        return await BaseChatModel._agenerate_with_cache(self.bare, call.messages, call.stop, None, **call.options)

    def _together(self, calls: Sequence[Call]) -> AbstractContextManager[None]:
        """The time during which these calls are answered one after the other."""
        return nullcontext()

    def _target_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """A call's options for a target."""
        return options

    @property
    def _limit(self) -> float | None:
        """Seconds that an answer may take where the router sets no limit."""
        return None

    @property
    def _group_size(self) -> int | None:
        """How many runs of a batch are generated together; None: each by itself, side by side."""
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
        return [self._from_cache(generation) for generation in super()._convert_cached_generations(cache_val)]

    def _from_cache(self, generation: ChatGeneration) -> ChatGeneration:
        message = generation.message
        if not isinstance(message, AIMessage) or convert.stage_verdict(message) is None:
            return generation
        message = convert.decided(message, draft_verdict(message))
        rules = self.rules
        if rules is not None and rules.terms.mode == "annotate":
            answers = Answers(rules, [Call([], None, {}, rules)], form=_no_form)
            made = ChatResult(generations=[ChatGeneration(message=message)])
            message = only(answers.judged(lambda: [made])).generations[0].message
        return ChatGeneration(message=message, generation_info=generation.generation_info)

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


def _no_form(rules: Rules, call: Call) -> None:
    """For a call whose prompt is not at hand."""


def only(results: Sequence[Result]) -> ChatResult:
    """The only result, or the error in its place, raised."""
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result


def _labels(run: RunManager | None, handlers: Sequence[BaseCallbackHandler]) -> Labels:
    if run is None:
        return Labels()
    names = [handler.name_of(run.run_id) for handler in handlers if isinstance(handler, UncertaintyRouterCallback)]
    return Labels(frozenset([*run.tags, *filter(None, names)]), run.metadata)


def _by_rules(calls: Sequence[Call]) -> list[tuple[Rules | None, list[Call]]]:
    groups: dict[object, list[Call]] = {}
    for call in calls:
        groups.setdefault(None if call.rules is None else call.rules.owner, []).append(call)
    return [(group[0].rules, group) for group in groups.values()]


def _calls(messages: Sequence[list[BaseMessage]], stop: list[str] | None, kwargs: Mapping[str, Any]) -> list[Call]:
    """The calls that `generate` makes with these arguments."""
    options = {name: value for name, value in kwargs.items() if name not in _OF_A_RUN}
    return [Call(given, stop, options) for given in messages]

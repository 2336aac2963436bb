"""`AroundChatModel`: any other chat model, its answers scored afterwards by a local copy of its weights, if given."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, Self, cast

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableBinding
from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, SkipValidation

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answering import AnsweringChatModel
from langchain_semgrad_guard.answers import Call
from langchain_semgrad_guard.enforcement import AsyncLiveAnswer, EnforcingChatModel, LiveAnswer
from langchain_semgrad_guard.served_streams import (
    AsyncJudged,
    AsyncServedWriting,
    Judged,
    ServedWriting,
    as_piece,
    awaited,
)
from langchain_semgrad_guard.several import SeveralChatModel
from langchain_semgrad_guard.structured_output import Method, structured, structured_by
from langchain_semgrad_guard.tools import AnyTool, openai_tools
from semgrad_guard import Estimator, HybridGrad, LanguageModel, Verdict
from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Answerer, ain_time, as_estimator, in_time, off_loop
from semgrad_guard.records import PromptForm

_REASONING = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})


class Inner(NamedTuple):
    """The chat model inside, and the options that are bound to it."""

    model: BaseChatModel
    options: Mapping[str, Any]


class AroundChatModel(SeveralChatModel):
    """A chat model that asks another one. What it delivers is its own run's; the other's is heard by tracers alone.

    An answer of a served model is scored by the text, as if `scorer` had written it. `prompt_template` is therefore a
    name of its own, so that a calibration made for answers of `scorer` itself is refused. An answer that cannot be
    scored (no text, tool calls, too long for `scorer`, a prompt that is no text) is unscored, with the reason.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: Annotated[Any, SkipValidation]
    """A chat model, bound arguments included."""
    scorer: Annotated[LanguageModel | None, SkipValidation] = None
    """The local copy of the weights that `model` serves."""
    estimator: Annotated[Estimator | None, SkipValidation, BeforeValidator(lambda e: e and as_estimator(e))] = None
    """Of the scorer: an estimator; or a calibration or a policy, which stand for the one they were made for."""
    prompt_template: str | None = None
    """The scorer's name for the prompts' form, "served" by default."""

    _bound_tools: tuple[Sequence[AnyTool], Mapping[str, Any]] | None = PrivateAttr(default=None)

    @classmethod
    def around(cls, model: BaseChatModel, **fields: Any) -> Self:
        """Around a model that stays the same to users: its name, tags, metadata and listeners.

        LangChain's cache is left to it: what it holds are drafts, scored anew each time.
        """
        own = {name: getattr(model, name) for name in ("tags", "metadata", "callbacks", "output_version")}
        own["name"] = model.get_name()
        return cls(model=model, cache=False, **own, **fields)

    @property
    def _inner(self) -> Inner:
        return inner_of(self.model)

    # How it answers.

    def _drafted(self, call: Call) -> ChatResult:
        model, inner = self._inner.model, self._inner_call(call)
        if isinstance(model, EnforcingChatModel):
            if model.rules is None:
                return model._drafted(inner)
            return model._generate_with_cache(inner.messages, inner.stop, None, **inner.options)
        with _heard(model, inner) as heard:
            result = in_time(lambda: model._generate_with_cache(inner.messages, inner.stop, None, **inner.options))
            heard.append(result)
        return self._scored_result(call, result)

    async def _adrafted(self, call: Call) -> ChatResult:
        model, inner = self._inner.model, self._inner_call(call)
        if isinstance(model, EnforcingChatModel):
            if model.rules is None:
                return await model._adrafted(inner)
            return await model._agenerate_with_cache(inner.messages, inner.stop, None, **inner.options)
        with _heard(model, inner) as heard:
            result = await ain_time(model._agenerate_with_cache(inner.messages, inner.stop, None, **inner.options))
            heard.append(result)
        return result if self.scorer is None else await off_loop(lambda: self._scored_result(call, result))

    def _live(self, call: Call) -> LiveAnswer:
        model, inner = self._inner.model, self._inner_call(call)
        if isinstance(model, EnforcingChatModel) and model.rules is None:
            return Judged(self, call, model._live(inner))
        if isinstance(model, EnforcingChatModel) or not model._should_stream(async_api=False, stream=True):
            return ServedWriting(self, call, (as_piece(self._drafted(call)) for _ in range(1)), scored=True)
        _require_one(model, inner)
        return ServedWriting(self, call, model._stream(inner.messages, inner.stop, None, **inner.options))

    async def _alive(self, call: Call) -> AsyncLiveAnswer:
        model, inner = self._inner.model, self._inner_call(call)
        if isinstance(model, EnforcingChatModel) and model.rules is None:
            return AsyncJudged(self, call, await model._alive(inner))
        if isinstance(model, EnforcingChatModel) or not model._should_stream(async_api=True, stream=True):
            return AsyncServedWriting(self, call, awaited(self._adrafted, call), scored=True)
        _require_one(model, inner)
        return AsyncServedWriting(self, call, model._astream(inner.messages, inner.stop, None, **inner.options))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._drafted(self._call(messages, stop, run_manager, kwargs))

    def _inner_call(self, call: Call) -> Call:
        bound = dict(self._inner.options)
        stop = bound.pop("stop", None)
        return Call(
            call.messages, stop if call.stop is None else call.stop, {**bound, **call.options}, call.rules, call.heard
        )

    # How the answers of a served model are scored.

    def _scored_result(self, call: Call, result: ChatResult) -> ChatResult:
        if self.scorer is None:
            return result
        scored = [
            ChatGeneration(
                message=self.scored(call, cast("AIMessage", generation.message)),
                generation_info=generation.generation_info,
            )
            for generation in result.generations
        ]
        return ChatResult(generations=scored, llm_output=result.llm_output)

    def scored(self, call: Call, message: AIMessage) -> AIMessage:
        """A message with its record, where there is a scorer: what came with the message is somebody else's."""
        if self.scorer is None:
            return message
        return convert.decided(message, self._verdict(self._answerer(self.scorer), call, message))

    def _answerer(self, scorer: LanguageModel) -> Answerer:
        name = self.prompt_template
        return Answerer(scorer, self.estimator or HybridGrad(), prompt_template=name or "served", served=name is None)

    def _verdict(self, answerer: Answerer, call: Call, message: AIMessage) -> Verdict:
        text = convert.message_text(message)
        try:
            _require_plain_text(message)
            conversation, options = convert.to_conversation(call.messages), self._template_options(call)
        except InputError as error:
            return answerer.unscored(text, str(error))
        return answerer.scored(conversation, text, template_options=options, cut=convert.was_cut(message)).verdict

    def _template_options(self, call: Call) -> dict[str, Any]:
        """What the scorer's chat template is to be told: the tools.

        Raises:
            InputError: they are described in a form that is not known here.
        """
        told = self._told(self._inner_call(call).options)
        try:
            tools = openai_tools(cast("Sequence[Any]", told.get("tools") or ()))
        except Exception as error:
            raise InputError(f"the model's tools cannot be shown to the scorer ({error})") from error
        return AnswerForm.of(
            {"tools": tools, "tool_choice": "none" if told.get("tool_choice") == "none" else None}
        ).template_options

    def _form(self, call: Call) -> PromptForm | None:
        model, inner = self._inner.model, self._inner_call(call)
        if isinstance(model, EnforcingChatModel):
            return model._form(inner)
        if self.scorer is None:
            return None
        try:
            conversation, options = convert.to_conversation(call.messages), self._template_options(call)
            return self.scorer.render(conversation, **options).form
        except InputError:
            return None  # the answer is unscored, which says why

    def _told(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._bound_tools is None:
            return options
        tools, kwargs = self._bound_tools
        return {**options, **kwargs, "tools": tools}

    # What LangChain asks for.

    def bind_tools(self, tools: Sequence[AnyTool], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Show the model tools, in its own provider's form; the scorer and a target are shown the same tools.

        Raises:
            InputError: the model inside takes no tools.
        """
        try:
            bound = inner_of(self._inner.model.bind_tools(tools, **kwargs))
        except NotImplementedError as error:
            raise InputError(f"{self._inner.model.get_name()} takes no tools") from error
        options = {**self._inner.options, **bound.options}
        copy = self.model_copy(update={"model": bound.model})
        copy._bound_tools = (list(tools), kwargs)
        return copy.bind(**options)

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, method: Method | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Objects instead of text, in the way of the model inside. A withheld answer is a `LowConfidenceError`.

        Raises:
            InputError: the model inside builds its structured output in a way that cannot be guarded.
        """
        model = self._inner.model
        if isinstance(model, AnsweringChatModel):
            return structured(self, schema, method=method or "json_schema", include_raw=include_raw)
        chosen = kwargs if method is None else {**kwargs, "method": method}
        made = model.with_structured_output(schema, include_raw=include_raw, **chosen)
        return structured_by(made, model, self, include_raw=include_raw)

    def _ready(self) -> None:
        model = self._inner.model
        if isinstance(model, EnforcingChatModel):
            model._ready()
        if self.scorer is not None:
            _ = self.scorer.identity

    @property
    def _group_size(self) -> int | None:
        model = self._inner.model
        return model._group_size if isinstance(model, SeveralChatModel) else None

    @property
    def _limit(self) -> float | None:
        model = self._inner.model
        return model._limit if isinstance(model, EnforcingChatModel) else None

    def _together(self, calls: Sequence[Call]) -> Any:
        model = self._inner.model
        inner = [self._inner_call(call) for call in calls]
        return model._together(inner) if isinstance(model, EnforcingChatModel) else super()._together(inner)

    @property
    def model_name(self) -> str:
        """The name of the model inside, as agents ask for it."""
        model: Any = self._inner.model
        name = getattr(model, "model_name", None) or getattr(model, "model", None)
        return name if isinstance(name, str) and name else model.get_name()

    @property
    def _llm_type(self) -> str:
        return f"semgrad-guard-{self._inner.model._llm_type}"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self._inner.model._identifying_params, **self._inner.options}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._inner.model._get_ls_params(stop=stop, **kwargs)

    def _resolve_model_profile(self) -> ModelProfile | None:
        return self._inner.model.profile


def inner_of(model: Any) -> Inner:
    """A chat model, or one with bound arguments.

    Raises:
        InputError: it is something else.
    """
    options: dict[str, Any] = {}
    found: Any = model
    while isinstance(found, RunnableBinding):
        binding = cast("RunnableBinding[Any, Any]", found)
        options, found = {**binding.kwargs, **options}, binding.bound
    if isinstance(found, BaseChatModel):
        return Inner(found, options)
    raise InputError(
        f"a guard takes a chat model, not a {type(found).__name__}. Guard the model itself and build the rest around "
        "the guard, which is a chat model too: GuardedChatModel(model, policy).with_retry(), .with_fallbacks([...]), "
        ".configurable_fields(...)"
    )


@contextmanager
def _heard(model: BaseChatModel, call: Call) -> Generator[list[ChatResult]]:
    """The run of a served model, for tracers: what it was asked, its tokens, its time; its text only as a kept draft.

    It is opened here and not by LangChain, whose runs are heard by every handler of the context and end with the text.
    """
    made: list[ChatResult] = []
    if not call.heard.handlers:
        yield made
        return
    stop, options = call.stop, dict(call.options)
    manager = call.heard.copy()
    asked: Any = model  # what LangChain's own `generate` tells of a run has no public names
    manager.add_metadata(dict(asked._get_ls_params(stop=stop, **options)), inherit=False)
    (run,) = manager.on_chat_model_start(
        asked._serialized,
        [call.messages],
        invocation_params=asked._get_invocation_params(stop=stop, **options),
        options={"stop": stop},
        name=model.get_name(),
        batch_size=1,
    )
    try:
        yield made
    except BaseException as error:
        run.on_llm_error(error, response=LLMResult(generations=[]))
        raise
    hidden = call.withholds and not (call.rules and call.rules.terms.keep_draft)
    run.on_llm_end(LLMResult(generations=[[_traced(each, hidden=hidden) for each in made[0].generations]]))


def _traced(generation: ChatGeneration, *, hidden: bool) -> ChatGeneration:
    message = generation.message
    return (
        ChatGeneration(message=convert.textless(message)) if hidden and isinstance(message, AIMessage) else generation
    )


def _require_one(model: BaseChatModel, call: Call) -> None:
    """Raise an `InputError` for a stream of several answers, whose pieces nobody could tell apart."""
    count: Any = call.options.get("n", getattr(model, "n", None))
    if isinstance(count, int) and count > 1:
        raise InputError(convert.several_in_a_stream(count))


def _require_plain_text(message: AIMessage) -> None:
    """Raise an `InputError` for an answer whose tokens are not known from its text."""
    if message.tool_calls or message.invalid_tool_calls:
        raise InputError("the answer calls tools, and how its server wrote the calls is not known")
    blocks = [] if isinstance(message.content, str) else message.content
    if any(isinstance(block, dict) and block.get("type") in _REASONING for block in blocks):
        raise InputError("the answer follows on reasoning, which is no part of its text")

"""`GuardedChatModel`: any other chat model, scored by the log-probabilities that it reports, or by a local copy.

Only its public methods are called, each in an empty context: no handler, tracer, graph or config is inherited, so that
nobody hears a draft. Its request is never changed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, message_chunk_to_message
from langchain_core.runnables import Runnable, RunnableBinding
from langchain_core.tracers.context import _configure_hooks  # pyright: ignore[reportPrivateUsage] - of every run
from langsmith.run_helpers import tracing_context  # pyright: ignore[reportUnknownVariableType]
from pydantic import BaseModel, BeforeValidator, SkipValidation, field_validator

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.deciding import Call, Deciding
from langchain_semgrad_guard.messages import AnyTool, Method, structured_by
from langchain_semgrad_guard.router import layers
from semgrad_guard import Estimator, LanguageModel, Policy, estimator_of
from semgrad_guard.adapters.calls import UNREAD_CALLS, AnswerForm, served_options, tells_reasoning
from semgrad_guard.adapters.model_fields import naming_faults
from semgrad_guard.errors import AnswerFailedError, InputError
from semgrad_guard.guard import (
    Answerer,
    Draft,
    Iterated,
    JudgedBy,
    OnDoubt,
    ReportedScorer,
    ReportedSentences,
    StreamSteps,
    Structure,
    Work,
    as_estimator,
    awaited_all,
    judged_by,
    prompt_of,
)
from semgrad_guard.records import PromptForm


class GuardedChatModel(Deciding):
    """Any chat model but a `ChatSemGrad`, whose answers are scored and decided about before they leave this one.

        guard = GuardedChatModel(ChatOpenAI(model="...", logprobs=True, top_logprobs=5), router)

    An answer without log-probabilities is unscored, and `on_unscored` decides; so is one that holds what no score has
    seen: calls of tools, images, refusals. With a `scorer` an answer is scored as if that had written it.

    The model inside inherits nothing of the run: no handler hears its parts, LangSmith and OpenTelemetry do not see
    them, and no cache keeps them. LangChain's own switch for debugging, `set_debug(True)`, prints them.

    Args:
        model: the chat model, bound arguments included. Listeners belong on the guard.
        router: as in `ChatSemGrad`; False: a helper, whose texts need no guard.
        scorer: the local copy of the weights that `model` serves.
        estimator: by default that of the router's calibration; else HybridGrad, or "max_probability" for reported
            log-probabilities.
        by, on_doubt: as in `ChatSemGrad`.
        carry: the context variables that the model needs, by name ("my_app.auth:current_user").
        timeout: seconds for the answer and its score.

    Raises:
        InputError: no chat model, a scored one, one with listeners, or log-probabilities do not allow the estimator.
    """

    model: Annotated[Any, SkipValidation]
    scorer: Annotated[LanguageModel | None, SkipValidation] = None
    estimator: Annotated[
        Estimator | None, SkipValidation, BeforeValidator(lambda given: None if given is None else as_estimator(given))
    ] = None
    by: JudgedBy | None = None
    on_doubt: OnDoubt | None = None
    carry: tuple[str, ...] = ()

    def __init__(self, model: Any = None, router: Any = None, /, **fields: Any) -> None:
        with naming_faults():
            super().__init__(**{"model": model, "router": router, **fields})
        self._scoring(self.router.policy if self.router else None)
        _carried(self.carry)

    @field_validator("model", mode="before")
    @classmethod
    def _is_served(cls, model: Any) -> Any:
        unbound(model)
        return model

    # How it answers.

    def _live(self, call: Call) -> StreamSteps[Any, Draft[AIMessage]]:
        """Chunks as they are where nothing is withheld, or the sentences that are let through; and the scored draft."""
        inner, bound = unbound(self.model)
        inner = inner.model_copy(update={"cache": False})  # it would keep drafts, or answer another prompt by one
        messages, options = call.messages, {**bound, **call.options}
        early, unheard = self._early(call), _Unheard(self.carry, withholds=call.withholds)
        if early is None and (call.withholds or not call.is_live):
            work = Work(lambda: inner.invoke(messages, **options), lambda: inner.ainvoke(messages, **options))
            message: AIMessage = yield unheard.in_time(work)
        else:
            chunks = Iterated(lambda: inner.stream(messages, **options), lambda: inner.astream(messages, **options))
            message = yield from _flowing(chunks, early, unheard)
        message = message.model_copy(update={"id": None, "name": None})  # they belong to the run that delivers
        is_part = early is not None and early.is_over
        score, scorer = partial(self._scored, call, message, is_part=is_part), self.scorer
        if scorer is None:
            return (yield Work(score).in_time())
        waiting = partial(awaited_all, lambda: [scorer.worker.run(score)])  # in no thread
        return (yield Work(lambda: [score()], waiting).in_time())[0]

    def _scored(self, call: Call, message: AIMessage, *, is_part: bool) -> Draft[AIMessage]:
        """The draft of a served message. `is_part`: its text was ended behind a doubtful sentence."""
        text, reason, scorer = convert.message_text(message), _unseen(message), self._scoring(call.policy)
        cut, thought, options = convert.was_cut(message), convert.reasoning(message), self._options(call)
        if isinstance(scorer, ReportedScorer):
            form = self._form(call)
            facts: dict[str, Any] = {"options": options, "prompt": form, "cut": cut, "reasoning": thought}
            verdict = (
                scorer.unscored(text, reason, options=options)
                if reason
                else scorer.verdict(text, convert.logprobs_of(message), is_part=is_part, **facts)
            )
            parts = scorer.parts(convert.logprobs_of(message), convert.calls_of(message), _structure(call.options))
            return call.draft(verdict.revised(**parts), message, form)
        try:
            if reason:
                raise InputError(reason)
            shown = convert.to_conversation(call.messages), _template_options(call.options)
        except InputError as error:
            return call.draft(scorer.unscored(text, str(error)), message, None)
        draft = scorer.scored(shown[0], text, template_options=shown[1], cut=bool(cut), reasoning=thought)
        verdict = draft.verdict.revised(options=options)
        return call.draft(verdict, convert.with_answer(message, verdict), draft.prompt)

    def _scoring(self, policy: Policy | None) -> Answerer | ReportedScorer:
        """Who scores an answer for a policy: as its calibration did, where no estimator was chosen.

        Raises:
            InputError: the estimator needs the model itself.
            BindingMismatchError: the calibration is about the scores of a local model.
        """
        calibration = None if policy is None else policy.calibration
        by_sentence = judged_by(calibration, self.by, self.on_doubt)
        if self.scorer is None:
            chosen = None if self.estimator is None else self.estimator.name
            return ReportedScorer.of(self.model_name, calibration, chosen, by_sentence)
        estimator = self.estimator or estimator_of(calibration)
        return Answerer(self.scorer, estimator, prompt_template="served", served=True, by_sentence=by_sentence)

    def _early(self, call: Call) -> ReportedSentences | None:
        """The sentences that may leave before the answer ends; None where all depends on its end."""
        scorer = self._scoring(call.policy)
        if not call.is_live or call.owes_structure or call.options.get("tools") or isinstance(scorer, Answerer):
            return None
        return ReportedSentences.of(scorer, call.terms, options=self._options(call), prompt=self._form(call))

    def _form(self, call: Call) -> PromptForm | None:
        """The form of a prompt whose template its server alone knows; None where it holds something else than text."""
        try:
            tools = _template_options(call.options).get("tools", ())
            return prompt_of(convert.to_conversation(call.messages), tools)
        except InputError:
            return None

    def _options(self, call: Call) -> dict[str, Any]:
        """The options of a call to the model's server."""
        inner, bound = unbound(self.model)
        return served_options(inner, {**bound, **call.options})

    # LangChain's own methods.

    def bind_tools(self, tools: Sequence[AnyTool], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Show the model tools, in its own provider's form.

        Raises:
            NotImplementedError: it takes no tools.
        """
        inner, bound = unbound(self.model)
        model, options = unbound(inner.bind_tools(tools, **kwargs))
        return self.model_copy(update={"model": model}).bind(**bound, **options)

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, method: Method | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Objects instead of text, in the way of the model inside. A withheld answer is a `LowConfidenceError`.

        Raises:
            InputError: the model inside builds its structured output in a way that cannot be guarded.
        """
        chosen = kwargs if method is None else {**kwargs, "method": method}
        inner, _ = unbound(self.model)
        made = inner.with_structured_output(schema, include_raw=include_raw, **chosen)
        return structured_by(made, inner, self, include_raw=include_raw)

    @property
    def model_name(self) -> str:
        """The name of the model inside, or that of its class."""
        inner: Any = unbound(self.model)[0]
        name = getattr(inner, "model_name", None) or getattr(inner, "model", None)
        return name if isinstance(name, str) and name else inner.get_name()

    @property
    def _llm_type(self) -> str:
        return f"semgrad-guard-{unbound(self.model)[0]._llm_type}"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        inner, bound = unbound(self.model)
        return {**inner._identifying_params, **bound, **super()._identifying_params}

    def _resolve_model_profile(self) -> ModelProfile | None:
        return unbound(self.model)[0].profile


def unbound(model: Any) -> tuple[BaseChatModel, dict[str, Any]]:
    """A served chat model, and the options that are bound to it.

    Raises:
        InputError: it is something else, it scores its own answers, it has listeners, or more than options are bound.
    """
    *bindings, found = layers(model)
    options = dict[str, Any]()
    for binding in bindings:
        if not isinstance(binding, RunnableBinding):
            raise InputError(
                f"a {type(binding).__name__} inside a guard would do nothing; put it around the guard: "
                "GuardedChatModel(model, router).with_retry()"
            )
        _require_unheard(binding.config.get("callbacks") or binding.config_factories)
        options = {**binding.kwargs, **options}
    if isinstance(found, Deciding):
        raise InputError(f"{type(found).__name__} decides by itself: {type(found).__name__}(..., router=router)")
    if not isinstance(found, BaseChatModel):
        raise InputError(
            f"a guard takes a chat model, not a {type(found).__name__}. Guard the model itself and build the rest "
            "around the guard, which is a chat model too: GuardedChatModel(model, router).with_fallbacks([...]); a "
            "chain whose models are guarded is one question in guarded(chain, router)"
        )
    _require_unheard(found.callbacks)
    return found, options


def _require_unheard(listeners: Any) -> None:
    if listeners:
        raise InputError(
            "listeners on the model inside a guard would hear drafts. Put them on the guard: "
            "GuardedChatModel(model, router, callbacks=[...])"
        )


def _template_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the scorer's chat template: the tools.

    Raises:
        InputError: the tools are described in a form that is not known here.
    """
    if not options.get("tools") or options.get("tool_choice") == "none":
        return {}
    try:
        return {"tools": convert.openai_tools(options["tools"])}
    except Exception as error:
        raise InputError(f"the model's tools cannot be shown to the scorer ({error})") from error


def _structure(options: Mapping[str, Any]) -> Structure | None:
    """The JSON that an answer owes; None where its request says so in a form that is not known here."""
    names = ("tools", "tool_choice", "response_format")
    try:
        return AnswerForm.of({name: options[name] for name in names if options.get(name)}).structure
    except InputError:
        return None


def _unseen(message: AIMessage) -> str:
    """What of a served message no score has seen; empty where its text is all."""
    if message.tool_calls or message.invalid_tool_calls:
        return UNREAD_CALLS
    blocks = message.content if isinstance(message.content, list) else []
    kinds = {str(block.get("type")) for block in blocks if isinstance(block, dict)} - convert.READ_BLOCKS
    for name, held in message.additional_kwargs.items():
        is_read = tells_reasoning({name: held}) or name == "reasoning" or (name == "parsed" and _spells(message, held))
        if held and not is_read:
            kinds.add(name)
    return f"the answer holds what no score has seen ({', '.join(sorted(kinds))})" if kinds else ""


def _spells(message: AIMessage, parsed: Any) -> bool:
    """Whether an object is its message's text, parsed."""
    text = convert.message_text(message)
    try:
        return parsed == (type(parsed).model_validate_json(text) if isinstance(parsed, BaseModel) else json.loads(text))
    except ValueError:
        return False


def _flowing(
    chunks: Iterated[AIMessageChunk], early: ReportedSentences | None, unheard: _Unheard
) -> StreamSteps[Any, AIMessage]:
    """The chunks of a stream, or their sentences that may leave early; and the message that they make."""
    whole: AIMessageChunk | None = None
    try:
        while early is None or not early.is_over:
            if (chunk := (yield unheard.in_time(chunks.next()))) is None:
                break
            whole = chunk if whole is None else whole + chunk
            if early is None:
                yield chunk
            else:
                yield from early.add(convert.message_text(chunk), convert.logprobs_of(chunk))
    finally:
        if not unheard.is_busy:  # else it is late, and left behind
            yield unheard.inside(chunks.close())
    if whole is None:
        raise AnswerFailedError("the model ended its stream without saying anything")
    message = cast("AIMessage", message_chunk_to_message(whole))
    if early is None or not early.is_over:
        return message
    metadata = {**message.response_metadata, "finish_reason": "stop"}
    return message.model_copy(update={"content": early.text, "response_metadata": metadata})


class _Nobody(BaseCallbackHandler):
    """Hears nothing, in the place of a handler that the environment asks for."""

    run_inline = True


class _Unheard:
    """An empty context, but for the variables that are carried. What joins every run of its own accord (LangSmith,
    OpenTelemetry, handlers that the environment asks for) is switched off in it."""

    def __init__(self, carry: Sequence[str], *, withholds: bool) -> None:
        self.is_busy, self._context, self._withholds = False, Context(), withholds
        for variable in _carried(carry):
            if (value := variable.get(self)) is not self:
                self._context.run(variable.set, value)
        for variable, *_ in _configure_hooks:
            self._context.run(variable.set, _Nobody())

    def inside(self, work: Work) -> Work:
        """The work, in this context."""

        def call() -> Any:
            self.is_busy = True
            try:
                return self._context.run(silently)
            finally:
                self.is_busy = False

        def silently() -> Any:
            with _silence():
                return work.call()

        async def silently_awaited() -> Any:
            with _silence():
                return await work.begin()

        return Work(call, lambda: asyncio.get_running_loop().create_task(silently_awaited(), context=self._context))

    def in_time(self, work: Work) -> Work:
        """The same in time. Its errors may hold the draft: of those only their names go out."""

        def shown(error: Exception) -> Exception:
            return AnswerFailedError(f"the model failed ({type(error).__name__})") if self._withholds else error

        return self.inside(work).replacing(shown).in_time()


@contextmanager
def _silence() -> Generator[None]:
    with ExitStack() as silent:
        silent.enter_context(tracing_context(enabled=False))
        if find_spec("opentelemetry.instrumentation") is not None:
            from opentelemetry.instrumentation.utils import suppress_instrumentation

            silent.enter_context(suppress_instrumentation())
        yield


def _carried(names: Sequence[str]) -> list[ContextVar[Any]]:
    """The context variables of these names.

    Raises:
        InputError: a name is not that of a context variable.
    """
    found = list[ContextVar[Any]]()
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            variable: Any = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f'carry={name!r}: there is no such variable ({error}); write "module:variable"') from error
        if not isinstance(variable, ContextVar):
            raise InputError(f"carry={name!r} is a {type(variable).__name__}, and not a context variable")
        found.append(cast("ContextVar[Any]", variable))
    return found

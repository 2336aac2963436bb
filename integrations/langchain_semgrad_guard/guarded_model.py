"""`GuardedChatModel`: a chat model that is a guard around any other one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, Self, cast

from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, SkipValidation, model_validator

from langchain_semgrad_guard import served
from langchain_semgrad_guard.answers import Call, Inner, Rules, Writing, inner_of
from langchain_semgrad_guard.callback import deciding, rules_of
from langchain_semgrad_guard.chat_model import ChatSemGrad
from langchain_semgrad_guard.enforcement import EnforcingChatModel, Identified
from langchain_semgrad_guard.messages import AnyTool, whole_chunk
from langchain_semgrad_guard.runs import SyncRun, handlers_of, unheard
from langchain_semgrad_guard.streams import ReportedWriting, ServedWriting, StreamingChatModel
from langchain_semgrad_guard.structured_output import Method, structured, structured_by
from semgrad_guard import DriftMonitor, Estimator, HybridGrad, LanguageModel, Policy, estimator_of
from semgrad_guard.errors import InputError, UnenforcedPolicyError
from semgrad_guard.guard import (
    AbstainMessage,
    Answerer,
    DecisionSink,
    Draft,
    Iterated,
    JudgedBy,
    KeepDraft,
    Mode,
    OnDoubt,
    OnError,
    Promise,
    ReportedScorer,
    ReportedSentences,
    Steps,
    StreamSteps,
    Terms,
    Timeout,
    Work,
    arun_stream,
    as_estimator,
    awaited,
    drive,
    judged_by,
    observes,
    promise_along,
    run_stream,
    with_unit,
)
from semgrad_guard.records import PromptForm

_TERMS = ("mode", "abstain_message", "keep_draft", "on_error", "timeout", "monitor", "log")


class AroundChatModel(StreamingChatModel):
    """A chat model that calls another one. It delivers in its own run; only tracers hear the other's.

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
    """Of the scorer: an estimator; or a calibration or a policy, for the estimator that they were made with."""
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

    def _drafted(self, call: Call) -> Steps[ChatResult]:
        model, inner = self._inner.model, self._inner_call(call)
        if not isinstance(model, EnforcingChatModel):
            result = yield from served.answered(model, inner)
            if (scorer := self.scorer) is None:
                return self._scored_result(call, result)
            score = partial(self._scored_result, call, result)
            return (yield Work(score, lambda: awaited(lambda: scorer.worker.run(score))))
        if model.rules is None:
            return (yield from model._drafted(inner))
        given = (inner.messages, inner.stop, None)
        with unheard() if call.hides else nullcontext():
            return (
                yield Work(
                    lambda: model._generate_with_cache(*given, **inner.options),
                    lambda: model._agenerate_with_cache(*given, **inner.options),
                )
            )

    def _early(self, call: Call) -> ReportedSentences | None:
        """The sentences of a served model that may leave before its answer ends; None where all depends on its end."""
        model, rules, inner = self._inner.model, call.rules, self._inner_call(call)
        if rules is None or rules.irreplaceable or self._reported is None or self.scorer is not None:
            return None
        if served.ends_whole(model, inner.options):
            return None
        options, form = served.options_of(model, inner), self._form_for(rules, call)
        return ReportedSentences.of(self._reported, rules.terms, options=options, prompt=form)

    def _live(self, call: Call, *, is_async: bool) -> Writing | None:
        model, inner = self._inner.model, self._inner_call(call)
        if isinstance(model, EnforcingChatModel) and model.rules is None:
            return model._live(inner, is_async=is_async)
        streams = not isinstance(model, EnforcingChatModel) and model._should_stream(async_api=is_async, stream=True)

        def judge(message: AIMessage, is_part: bool) -> Draft[AIMessage]:
            return self.draft_of(self.scored(call, message, is_part=is_part), call)

        if call.withholds:
            early = self._early(call) if streams else None
            return None if early is None else ReportedWriting(served.ServedPieces(model, inner), judge, early)
        if streams:
            return ServedWriting(served.ServedPieces(model, inner), judge)
        steps = self._whole(call)  # of an answer that has its score
        whole = Iterated(lambda: run_stream(steps), lambda: arun_stream(steps))
        return ServedWriting(whole, lambda message, _: self.draft_of(message, call))

    def _whole(self, call: Call) -> StreamSteps[ChatGenerationChunk, None]:
        made = yield from self._drafted(call)
        yield from map(whole_chunk, made.generations[:1])

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> ChatResult:
        return drive(self._drafted(self._call(messages, stop, run_manager, kwargs)))

    def _inner_call(self, call: Call) -> Call:
        bound = dict(self._inner.options)
        stop = bound.pop("stop", None)
        return Call(
            call.messages, stop if call.stop is None else call.stop, {**bound, **call.options}, call.rules, call.inner
        )

    # How the answers of a served model are scored.

    def _scored_result(self, call: Call, result: ChatResult) -> ChatResult:
        scored = [
            ChatGeneration(
                message=self.scored(call, cast("AIMessage", generation.message)),
                generation_info=generation.generation_info,
            )
            for generation in result.generations
        ]
        return ChatResult(generations=scored, llm_output=result.llm_output)

    def scored(self, call: Call, message: AIMessage, *, is_part: bool = False) -> AIMessage:
        """A message with its record, where there is a scorer, or its server reports log-probabilities.

        `is_part`: it was ended behind a doubtful sentence.
        """
        inner = self._inner_call(call)
        options = served.options_of(self._inner.model, inner)
        if self.scorer is None:
            reported = self._reported
            if reported is None:
                return message
            return served.scored_as_reported(reported, self._form(call), message, options, is_part=is_part)
        return served.scored(
            self._answerer(self.scorer), call.messages, message, self._target_options(inner.options), options
        )

    @property
    def _reported(self) -> ReportedScorer | None:
        """The scorer by the log-probabilities that the model's server reports; None where there are none."""
        return None

    def _answerer(self, scorer: LanguageModel) -> Answerer:
        name = self.prompt_template
        return Answerer(
            scorer,
            self.estimator or HybridGrad(),
            prompt_template=name or "served",
            served=name is None,
            by_sentence=self._by_sentence,
        )

    @property
    def _by_sentence(self) -> OnDoubt | None:
        """What happens at a doubtful sentence of a served model's answer; None: whole answers are judged."""
        return None

    def _form(self, call: Call) -> PromptForm | None:
        model, inner = self._inner.model, self._inner_call(call)
        if isinstance(model, EnforcingChatModel):
            return model._form(inner)
        if self.scorer is None:
            shown = self._target_options(inner.options)
            return None if self._reported is None else served.reported_form(call.messages, shown)
        return served.form_of(self.scorer, call.messages, self._target_options(inner.options))

    def _target_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._bound_tools is None:
            return options
        tools, kwargs = self._bound_tools
        return {**options, **kwargs, "tools": tools}

    # LangChain's own methods.

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
        if isinstance(model, ChatSemGrad):
            return structured(self, schema, method=method or "json_schema", include_raw=include_raw)
        chosen = kwargs if method is None else {**kwargs, "method": method}
        made = model.with_structured_output(schema, include_raw=include_raw, **chosen)
        return structured_by(made, model, self, include_raw=include_raw)

    def _ready(self) -> Identified | None:
        model = self._inner.model
        if self.scorer is not None:
            _ = self.scorer.identity
        return model._ready() if isinstance(model, EnforcingChatModel) else None

    @property
    def _at_once(self) -> int | None:
        model = self._inner.model
        return model._at_once if isinstance(model, EnforcingChatModel) else None

    @property
    def _limit(self) -> float | None:
        model = self._inner.model
        return model._limit if isinstance(model, EnforcingChatModel) else None

    @property
    def model_name(self) -> str:
        """The name of the model inside, for agents."""
        return served.name_of(self._inner.model)

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


class GuardedChatModel(AroundChatModel):
    """A chat model whose answers a policy lets through, hands on or withholds, on every path of a chat model.

        guard = GuardedChatModel(ChatSemGrad(), Policy(threshold=0.004), escalate_to=larger)
        prompt | guard | StrOutputParser()

    It is a `BaseChatModel`: tools, structured output, retries, fallbacks and agents work as with any other. Runs end
    with the delivered answer; streams are buffered where an answer may be withheld.

    Args:
        model: a `ChatSemGrad`, bound arguments included (`chat.bind_tools(...)`), or any other chat model together with
            `scorer`. Without one, a chat model with a field or a bound option `logprobs` (`ChatOpenAI`, `ChatOllama`)
            is scored by the log-probabilities that its server reports. An observer takes any other chat model too:
            answers that carry no score are reported so.
        policy: which answers to let through.
        scorer: the local copy of the weights that `model` serves.
        estimator: of the scorer. By default, and for a `ChatSemGrad` that was made without one, it is the one that the
            policy was calibrated with, or else HybridGrad.
        prompt_template: the scorer's name for the prompts' form. A calibration made for the scorer's own answers
            ("chat") is refused by default. To name it here is to vouch that `model` serves these weights with this chat
            template and decodes as the calibrated model did, which cannot be checked from here.

        by: "sentence" gives every sentence a score of its own; a `ChatSemGrad` has this setting itself. By default as
            the policy's calibration, or "answer".
        on_doubt: by sentence, as in `ChatSemGrad`.

    The others (`escalate_to`, `mode`, `abstain_message`, `keep_draft`, `on_error`, `timeout`, `monitor`, `log`) are
    those of `UncertaintyRouterCallback`.

    Raises:
        InputError: a model that carries no score, a scorer as well as one that does, or no policy.
        UnenforcedPolicyError: a router is attached to the model already.
        BindingMismatchError: the target is a guarded model whose calibration does not follow this one's.
    """

    policy: Annotated[Policy, SkipValidation]
    by: JudgedBy | None = None
    on_doubt: OnDoubt | None = None
    escalate_to: Annotated[Any, SkipValidation] = None
    mode: Annotated[Mode, SkipValidation] = Terms.mode
    abstain_message: Annotated[AbstainMessage, SkipValidation] = Terms.abstain_message
    keep_draft: KeepDraft = Terms.keep_draft
    on_error: Annotated[OnError, SkipValidation] = Terms.on_error
    timeout: Annotated[Timeout, SkipValidation] = None
    monitor: Annotated[DriftMonitor | None, SkipValidation] = None
    log: Annotated[DecisionSink | None, SkipValidation] = None

    _guard: object = PrivateAttr(default_factory=object)
    _parts: tuple[tuple[Any, ...], Inner, Rules] | None = PrivateAttr(default=None)

    def __init__(self, model: Any = None, policy: Policy | None = None, /, **fields: Any) -> None:
        given = {"model": model, "policy": policy}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **fields)

    @model_validator(mode="before")
    @classmethod
    def _requires_a_policy(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and not {"model", "policy"} <= set(cast("Mapping[str, Any]", fields)):
            raise InputError("a guard needs a chat model and a policy: GuardedChatModel(model, Policy(threshold=...))")
        return cast("Any", fields)

    @model_validator(mode="after")
    def _is_one_guard(self) -> Self:
        inner, config = self._inner, self._inner.config
        handlers = [*handlers_of(inner.model.callbacks), *handlers_of(config.get("callbacks"))]
        if deciding(handlers):
            raise UnenforcedPolicyError(
                "2 routers: one is attached to the model already. Attach one, or give that here"
            )
        self.output_version = self.output_version or inner.model.output_version
        self.cache = False  # the model inside keeps the drafts
        self.tags = [*(self.tags or []), *(inner.model.tags or []), *(config.get("tags") or [])] or None
        self.metadata = {
            **(inner.model.metadata or {}),
            **(config.get("metadata") or {}),
            **(self.metadata or {}),
        } or None
        self.callbacks = [*handlers_of(self.callbacks), *handlers] or None
        return self

    @property
    def rules(self) -> Rules:
        """The rules that the fields make."""
        return self._built[2]

    @property
    def promise(self) -> Promise | None:
        """The promise about the answers of this guard and its targets, or about the promised ones of them (`covers`).

        None where a stage is uncalibrated or unscored, or has no threshold.
        """
        return promise_along(self, GuardedChatModel)

    @property
    def _inner(self) -> Inner:
        return self._built[1]

    @property
    def _built(self) -> tuple[tuple[Any, ...], Inner, Rules]:
        """Model and rules, made anew where a field has changed, here or in the model (by assignment, or in a copy)."""
        names = ("model", "policy", "escalate_to", "scorer", "estimator", "prompt_template", "by", "on_doubt", *_TERMS)
        inside = inner_of(self.model).model
        fields = (
            *(getattr(self, name) for name in names),
            *(getattr(inside, name) for name in type(inside).model_fields),
        )
        known = () if self._parts is None else self._parts[0]
        if self._parts is None or list(map(id, known)) != list(map(id, fields)):
            terms = {name: getattr(self, name) for name in _TERMS}
            rules = rules_of(self._guard, self.policy, self.escalate_to, **terms)
            self._parts = (fields, self._scoring(inner_of(self.model)), rules)
        return self._parts

    def _scoring(self, inner: Inner) -> Inner:
        """The model inside; without a chosen estimator, a copy that scores as the policy's calibration did.

        Raises:
            InputError: its answers carry no score; or they do, and a scorer is given.
        """
        model, calibration = inner.model, self.policy.calibration
        if isinstance(model, EnforcingChatModel):
            scoring = (self.scorer, self.estimator, self.prompt_template, self.by, self.on_doubt)
            if any(setting is not None for setting in scoring):
                raise InputError(
                    f"{type(model).__name__} scores its own answers: set scorer, estimator, template and unit there"
                )
            if (
                calibration is None
                or model.rules is not None
                or "estimator" in model.model_fields_set
                or "estimator" not in type(model).model_fields
            ):
                return inner
            unit = {name: getattr(model, name) for name in ("by", "on_doubt") if hasattr(model, name)}
            changes = with_unit({"estimator": calibration, **unit}) if unit else {}
            return inner._replace(model=model.model_copy(update={**changes, "estimator": estimator_of(calibration)}))
        if self.scorer is None and served.reports(model, inner.options):
            return inner._replace(model=served.reporting(model, self._reported_by(inner)))
        if self.scorer is None and not observes(self.mode):
            raise InputError(
                f"the answers of {type(model).__name__} carry no score. Use ChatSemGrad or a model that reports "
                "log-probabilities (model.bind(logprobs=True, top_logprobs=5)), or give the weights that it serves: "
                f"{type(self).__name__}(model, policy, scorer=LanguageModel.from_pretrained(...))"
            )
        return inner

    @property
    def _reported(self) -> ReportedScorer | None:
        inner = self._inner
        if isinstance(inner.model, EnforcingChatModel) or not served.reports(inner.model, inner.options):
            return None
        return self._reported_by(inner)

    def _reported_by(self, inner: Inner) -> ReportedScorer:
        """The scorer of the policy's calibration, or of the estimator that is set.

        Raises:
            InputError: the estimator needs the model itself.
            BindingMismatchError: the calibration is about the scores of a local model.
        """
        chosen = None if self.estimator is None else self.estimator.name
        return ReportedScorer.of(served.name_of(inner.model), self.policy.calibration, chosen, self._by_sentence)

    @property
    def _by_sentence(self) -> OnDoubt | None:
        return judged_by(self.policy.calibration, self.by, self.on_doubt)

    def _answerer(self, scorer: Any) -> Any:
        if self.estimator is None and self.policy.calibration is not None:
            return self.model_copy(update={"estimator": estimator_of(self.policy.calibration)})._answerer(scorer)
        return super()._answerer(scorer)


class UncertaintyRouter(GuardedChatModel):
    """`GuardedChatModel` under its old name, its first argument called `llm`."""

    def __init__(self, llm: Any = None, policy: Policy | None = None, /, **fields: Any) -> None:
        super().__init__(fields.pop("llm", llm), policy, **fields)

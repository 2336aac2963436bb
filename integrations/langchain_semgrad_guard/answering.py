"""`AnsweringChatModel`: how a local model answers what LangChain asks, every answer with its score."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Self

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, SecretStr, SkipValidation, model_validator

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answer_form import FORM_OPTIONS, AnswerForm
from langchain_semgrad_guard.batching import PendingBatch, Request
from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.calls import Call
from langchain_semgrad_guard.enforcement import EnforcingChatModel
from langchain_semgrad_guard.logprobs import openai_logprobs
from langchain_semgrad_guard.tool_calls import call_fields
from semgrad_guard import Estimator, Generation, GenerationOptions, HybridGrad, LanguageModel, Verdict
from semgrad_guard.adapters.settings import call_options, weights_of
from semgrad_guard.adapters.weights import Weights
from semgrad_guard.engine.generation.evidence import Evidence
from semgrad_guard.engine.prompts.tool_format import ToolAnswer
from semgrad_guard.errors import SemGradGuardError, require_known
from semgrad_guard.guard import assess, record_draft
from semgrad_guard.guard.calibrated_estimator import as_estimator

_CALL_OPTIONS = FORM_OPTIONS | {"logprobs", "stream"}
"""What a call may say besides how its answer is generated."""
_LANGCHAINS_OWN = frozenset({"ls_structured_output_format", "structured_output_format"})
"""Options that LangChain takes away before it asks for an answer."""


class AnsweringChatModel(EnforcingChatModel):
    """The fields of a chat model that runs here, and its answers: whole, streamed and in batches."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str = "pocket"
    """"pocket" (the embedded model), a folder, or a hub id."""
    revision: str | None = None
    dtype: Any = None
    """As in transformers ("bfloat16", torch.float32); default: the checkpoint's own, float32 for the pocket model."""
    device_map: Any = None
    attn_implementation: str | None = None
    template_options: Mapping[str, Any] | None = None
    """Given to the chat template with every prompt, e.g. {"enable_thinking": False}."""

    max_tokens: int | None = None
    """Longest answer in tokens; 256 by default."""
    temperature: float = 0.0
    """0 is greedy, and the default: scores are made for greedy answers."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    """Strings that end an answer; those of a call replace them."""

    estimator: Annotated[Estimator, SkipValidation, BeforeValidator(as_estimator)] = Field(default_factory=HybridGrad)
    """An estimator; or a calibration or a policy, which stand for the one they were made for."""
    prompt_template: str = "chat"
    """A name for the form of the prompts; a calibration for another form is refused."""
    max_batch_size: int = Field(default=16, ge=1)
    """How many answers are generated at once, where a call's config has no `max_concurrency`."""

    logprobs: bool = False
    """Put the tokens' log-probabilities into the metadata, in OpenAI's shape; a call may set it too."""
    streaming: bool = False
    timeout: float | None = None
    """Accepted as a standard parameter; a local model has no request that could time out."""
    max_retries: int | None = None
    """Accepted as a standard parameter; a local model has no request to retry."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted as a standard parameter; a local model asks for no key."""

    _weights: Weights | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        known = type(self).model_fields
        aliases = [field.alias for field in known.values() if field.alias is not None]
        require_known(type(self).__name__, fields, [*known, *aliases])
        super().__init__(**fields)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        self._options(None, {})
        return self

    @property
    def language_model(self) -> LanguageModel:
        """The model itself, loaded now if it was not."""
        weights = weights_of(self, self._weights)
        if weights is not self._weights:  # assigning a private attribute costs more than the comparison
            self._weights = weights
        return weights.get()

    # What LangChain asks for.

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        generation = PendingBatch.take(self, request) or self._generate_all([request])[0]
        answer, record = self._taken_apart(generation, request), self._record(generation, request, run_manager)
        message = AIMessage(content=answer.text, **call_fields(answer), **record)
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=_info(record))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = self._request(messages, stop, kwargs)
        written, shown = "", 0
        with self.language_model.stream(
            request.conversation,
            request.options,
            objective=self.estimator.objective,
            template_options=request.form.template_options,
        ) as pieces:
            for piece in pieces:
                written += piece
                end = self.language_model.tool_format.shown(written) if request.form.tools else len(written)
                if end > shown:
                    yield ChatGenerationChunk(message=AIMessageChunk(content=written[shown:end]))
                    shown = end
            answer = self._taken_apart(pieces.generation, request)
            record = self._record(pieces.generation, request, run_manager)
        if rest := answer.text[shown:]:
            yield ChatGenerationChunk(message=AIMessageChunk(content=rest))
        last = self._decided(AIMessageChunk(content="", chunk_position="last", **call_fields(answer), **record))
        yield ChatGenerationChunk(message=last, generation_info=_info(record))

    # What enforcement asks for.

    def _prepare(self) -> None:
        _ = self.language_model.identity

    @contextmanager
    def _together(self, calls: Sequence[Call], limit: int | None) -> Generator[None]:
        several = calls if len(calls) > 1 else ()
        requests = [request for request in map(self._announced_request, several) if request is not None]
        if len(requests) < 2:
            yield
            return
        with PendingBatch(self, requests, self._generate_all, limit or self.max_batch_size).opened():
            yield

    def _announced_request(self, call: Call) -> Request | None:
        """What a call will ask for; None for one that will fail in a run of its own."""
        kwargs = {key: value for key, value in call.kwargs.items() if key not in _LANGCHAINS_OWN}
        try:
            return self._request(call.messages, call.stop, kwargs)
        except SemGradGuardError:
            return None

    # How an answer is made.

    def _request(self, messages: list[BaseMessage], stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> Request:
        options, form = self._options(stop, kwargs), AnswerForm.of(kwargs)
        conversation = convert.to_conversation(messages)
        if any(message.tool_calls for message in conversation):
            _ = self.language_model.tool_format  # a template that knows no tools would leave the calls out
        grammar = form.grammar(self.language_model)
        logprobs = bool(kwargs.get("logprobs", self.logprobs))
        return Request(form.instructed(conversation), replace(options, grammar=grammar), form, logprobs)

    def _generate_all(self, requests: Sequence[Request]) -> list[Generation]:
        return self.language_model.generate_batch(
            [request.conversation for request in requests],
            requests[0].options,
            objective=self.estimator.objective,
            template_options=requests[0].form.template_options,
        )

    def _taken_apart(self, generation: Generation, request: Request) -> ToolAnswer:
        return self.language_model.tool_answer(generation) if request.form.tools else ToolAnswer(generation.text)

    def _record(
        self, generation: Generation, request: Request, run_manager: CallbackManagerForLLMRun | None
    ) -> dict[str, Any]:
        """Usage and metadata of an answer; scoring happens here."""
        answer, evidence = self._taken_apart(generation, request), generation.evidence
        verdict = self._verdict(evidence, answer.text, request)
        if not _routed(run_manager):  # else whoever decides takes the draft down
            record_draft(verdict, generation.prompt.form, source=str(run_manager.run_id) if run_manager else None)
        metadata = convert.response_metadata("tool_calls" if answer.calls else generation.finish_reason, verdict)
        if request.logprobs:
            metadata["logprobs"] = openai_logprobs(self.language_model, self.estimator, evidence)
        return {"usage_metadata": convert.usage(generation), "response_metadata": metadata}

    def _verdict(self, evidence: Evidence, text: str, request: Request) -> Verdict:
        return assess(
            self.language_model,
            self.estimator,
            evidence,
            text=text,
            options=request.options,
            prompt_template=self.prompt_template,
            template_options=request.form.template_options,
        )

    def _options(self, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> GenerationOptions:
        """The options of one call: the fields, and what the call says otherwise."""
        return call_options(self, kwargs if stop is None else {**kwargs, "stop": stop}, also=_CALL_OPTIONS)


def _routed(run_manager: CallbackManagerForLLMRun | None) -> bool:
    """Whether a router hears of this run."""
    return run_manager is not None and any(
        isinstance(handler, UncertaintyRouterCallback) for handler in run_manager.handlers
    )


def _info(record: Mapping[str, Any]) -> dict[str, Any]:
    """What tracers and scorers look for beside the message."""
    metadata: Mapping[str, Any] = record.get("response_metadata", {})
    return {key: metadata[key] for key in ("finish_reason", "logprobs") if key in metadata}

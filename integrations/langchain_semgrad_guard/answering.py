"""`AnsweringChatModel`: how a local model answers what LangChain asks, every answer with its score."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, SecretStr, SkipValidation, model_validator

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Call
from langchain_semgrad_guard.batching import PendingBatch, Request
from langchain_semgrad_guard.several import SeveralChatModel
from langchain_semgrad_guard.tool_calls import call_fields
from semgrad_guard import (
    Estimator,
    Generation,
    GenerationOptions,
    HybridGrad,
    LanguageModel,
    Verdict,
)
from semgrad_guard.adapters.answer_form import FORM_OPTIONS, AnswerForm
from semgrad_guard.adapters.limits import Limit
from semgrad_guard.adapters.logprobs import openai_logprobs
from semgrad_guard.adapters.settings import call_options, weights_of
from semgrad_guard.adapters.weights import Weights
from semgrad_guard.errors import SemGradGuardError, require_known
from semgrad_guard.guard import (
    Answerer,
    AsyncLiveAnswer,
    Draft,
    LiveAnswer,
    as_estimator,
    assess,
    off_loop,
)
from semgrad_guard.records import PromptForm

_CALL_OPTIONS = FORM_OPTIONS | {"logprobs", "stream"}
"""What a call may say besides how its answer is generated."""


class AnsweringChatModel(SeveralChatModel):
    """The fields of a chat model that runs here, and its answers: whole, streamed and in batches."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str = "pocket"
    """"pocket" (the embedded model), a folder, or a hub id."""
    revision: str | None = None
    dtype: Any = None
    """As in transformers ("bfloat16", torch.float32); default: the checkpoint's own, float32 for the pocket model."""
    device_map: Any = None
    quantization_config: Any = None
    """As in transformers: the weights are quantized while they are loaded."""
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
    """Seconds for generating and scoring; beneath a router that sets no limit, for its target as well."""
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
        Limit(self.timeout)  # refuses what is no time
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
        with Limit(self.timeout).counting():
            generation = PendingBatch.take(self._owner, request) or self._generate_all([request])[0]
            message = self.message_of(generation, request)
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info_of(message))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await off_loop(lambda: self._generate(messages, stop, **kwargs))

    # What enforcement asks for.

    def _ready(self) -> None:
        _ = self.language_model.identity

    @property
    def _group_size(self) -> int:
        return self.max_batch_size

    @property
    def _limit(self) -> float | None:
        return self.timeout

    def _form(self, call: Call) -> PromptForm:
        request = self._request(call.messages, call.stop, call.options)
        return self.language_model.render(request.conversation, **request.form.template_options).form

    def _live(self, call: Call) -> Writing:
        request = self._request(call.messages, call.stop, call.options)
        live = self._answerer(request).live(request.conversation, template_options=request.form.template_options)
        return Writing(self, call, request, live)

    async def _alive(self, call: Call) -> AsyncWriting:
        writing = await off_loop(lambda: self._live(call))
        return AsyncWriting(writing)

    @contextmanager
    def _together(self, calls: Sequence[Call]) -> Generator[None]:
        several = calls if len(calls) > 1 else ()
        requests = [request for request in map(self._announced_request, several) if request is not None]
        if len(requests) < 2:
            yield
            return
        with PendingBatch(self._owner, requests, self._generate_all, self.max_batch_size).opened():
            yield

    def _announced_request(self, call: Call) -> Request | None:
        """What a call will ask for; None for one that will fail in a run of its own."""
        try:
            return self._request(call.messages, call.stop, call.options)
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

    def _answerer(self, request: Request) -> Answerer:
        return Answerer(
            self.language_model, self.estimator, options=request.options, prompt_template=self.prompt_template
        )

    def message_of(self, generation: Generation, request: Request) -> AIMessage:
        """An answer with its record; scoring happens here."""
        answer, evidence = request.form.taken_apart(self.language_model, generation), generation.evidence
        verdict = self._verdict(evidence, answer.text, request)
        metadata = convert.response_metadata("tool_calls" if answer.calls else generation.finish_reason, verdict)
        if request.logprobs:
            metadata["logprobs"] = openai_logprobs(self.language_model, self.estimator, evidence)
        record: dict[str, Any] = {"usage_metadata": convert.usage(generation), "response_metadata": metadata}
        return AIMessage(content=answer.text, **call_fields(answer.calls, answer.broken), **record)

    def _verdict(self, evidence: Any, text: str, request: Request) -> Verdict:
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


class Writing:
    """An answer that the model is writing, as LangChain's chunks. Text that may turn out to be a call is held back."""

    def __init__(self, chat: AnsweringChatModel, call: Call, request: Request, live: LiveAnswer) -> None:
        self._chat, self._call, self._request, self.live = chat, call, request, live
        self._written, self._shown = "", 0

    def __iter__(self) -> Iterator[ChatGenerationChunk]:
        for piece in self.live:
            yield from self.shown(piece)

    def shown(self, piece: str) -> list[ChatGenerationChunk]:
        """What may be shown once a piece is written."""
        self._written += piece
        model, tools = self._chat.language_model, self._request.form.tools
        end = model.tool_format.shown(self._written) if tools else len(self._written)
        if end <= self._shown:
            return []
        text, self._shown = self._written[self._shown : end], end
        return [_chunk(text)]

    def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        generation = self.live.stream.generation
        return self._chat.draft_of(self._chat.message_of(generation, self._request), self._call)

    def last(self, message: AIMessage) -> list[ChatGenerationChunk]:
        """The rest of the text, and the chunk that says everything else."""
        rest = convert.message_text(message)[self._shown :]
        record = convert.as_chunk(message).model_copy(update={"content": ""})
        last = ChatGenerationChunk(message=record, generation_info=info_of(message))
        return [*([_chunk(rest)] if rest else []), last]

    def close(self) -> None:
        """Stop the model."""
        self.live.close()


class AsyncWriting:
    """Like `Writing`, on the event loop."""

    def __init__(self, writing: Writing) -> None:
        self._writing, self._live = writing, AsyncLiveAnswer(writing.live)
        self.last = writing.last

    async def __aiter__(self) -> AsyncIterator[ChatGenerationChunk]:
        async for piece in self._live:
            for chunk in self._writing.shown(piece):
                yield chunk

    async def draft(self) -> Draft[AIMessage]:
        """The whole answer with its score."""
        return await off_loop(self._writing.draft)

    async def aclose(self) -> None:
        """Stop the model."""
        await self._live.aclose()


def _chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def info_of(message: AIMessage) -> dict[str, Any]:
    """What tracers and scorers look for beside the message."""
    metadata = cast("Mapping[str, Any]", message.response_metadata)
    return {key: metadata[key] for key in ("finish_reason", "logprobs") if key in metadata}

"""`SemGradLLM`: a local language model as a LlamaIndex LLM, every answer with its score."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.llms import callbacks
from llama_index.core.llms.llm import LLM
from pydantic import Field, PrivateAttr, SkipValidation

from llama_index_semgrad_guard.calls import ModelCall, current_collector
from llama_index_semgrad_guard.events import report
from llama_index_semgrad_guard.records import chat_response, completion, raw_record, to_conversation
from semgrad_guard import METADATA_KEY, Estimator, Generation, GenerationOptions, HybridGrad, LanguageModel, Verdict
from semgrad_guard.engine.evidence import Evidence
from semgrad_guard.engine.stream import TextStream
from semgrad_guard.engine.weights import Weights, key_of
from semgrad_guard.errors import InputError
from semgrad_guard.guard import assess
from semgrad_guard.records import Conversation

_LOADING = ("revision", "dtype", "device_map", "attn_implementation", "template_options")
_PER_CALL = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"})
_IGNORED = frozenset({"formatted"})
_TAKEN_OVER = {
    "max_tokens": "max_new_tokens",
    "context_window": "context_window",
    "system_prompt": "system_prompt",
    "callback_manager": "callback_manager",
}
_SMALLEST_WINDOW = 1024
"""LlamaIndex's own prompts leave no room for a passage in less; a prompt that is really too long raises."""

F = TypeVar("F", bound=Callable[..., Any])

_Piece = tuple[str, str, dict[str, Any] | None]
"""A piece of an answer, the answer so far, and the record: None in all pieces but the last."""


def _traced_chat(method: F) -> F:
    """LlamaIndex's decorator, typed."""
    return cast("F", callbacks.llm_chat_callback()(method))  # pyright: ignore[reportUnknownMemberType]


def _traced_completion(method: F) -> F:
    """LlamaIndex's decorator, typed."""
    return cast("F", callbacks.llm_completion_callback()(method))  # pyright: ignore[reportUnknownMemberType]


class SemGradLLM(LLM):
    """A Hugging Face causal LM, run here, whose answers carry an uncertainty.

        llm = SemGradLLM(model="pocket")
        llm.complete("What is the capital of France?").raw["semgrad_guard"]["uncertainty"]

    The record stands in `raw` and in `additional_kwargs` of the response, never in its message, which may become part
    of the next prompt. Within a `GuardedQueryEngine` the engine scores and decides, and `raw` holds no score. Weights
    load at the first answer (or when LlamaIndex asks for the context window); equal instances share them. The async
    methods leave the event loop free, and a cancelled one stops generating at the next token.
    """

    model: str = "pocket"
    """"pocket" (the embedded model), a folder, or a hub id."""
    revision: str | None = None
    dtype: Any = None
    """As in transformers ("bfloat16", torch.float32); default: the checkpoint's own, float32 for the pocket model."""
    device_map: Any = None
    attn_implementation: str | None = None
    template_options: Mapping[str, Any] | None = None
    """Given to the chat template with every prompt, e.g. {"enable_thinking": False}."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest answer in tokens."""
    temperature: float = 0.0
    """0 is greedy, and the default: scores are made for greedy answers."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    """Strings that end an answer; those of a call replace them."""
    context_window: int | None = None
    """What LlamaIndex packs prompts for; default: the model's own, but at least 1024."""

    estimator: Annotated[Estimator, SkipValidation] = Field(default_factory=HybridGrad, exclude=True)
    prompt_template: str = "chat"
    """A name for the form of the prompts; a calibration for another form is refused."""

    _weights: Weights | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        unknown = sorted(fields.keys() - type(self).model_fields.keys())
        if unknown:
            raise InputError(f"SemGradLLM has no field {', '.join(unknown)}")
        super().__init__(**fields)
        self._options({})

    @classmethod
    def from_model(cls, language_model: LanguageModel, /, **fields: Any) -> Self:
        """An LLM for weights that are loaded already; `fields` are the constructor's, but those for loading.

        Raises:
            InputError: a field that only loading could honour.
        """
        loading = sorted({"model", *_LOADING} & fields.keys())
        if loading:
            raise InputError(f"the model is loaded already: set {', '.join(loading)} on the LanguageModel instead")
        llm = cls(model=language_model.name, revision=language_model.revision, **fields)
        llm._weights = Weights.of(language_model, key_of(llm._loading))
        return llm

    @classmethod
    def from_huggingface_llm(cls, huggingface_llm: Any, /, **fields: Any) -> Self:
        """An LLM on the model and tokenizer that LlamaIndex's `HuggingFaceLLM` has loaded; it stays as it is.

        Its context window, longest answer, system prompt and callbacks are taken over where `fields` say nothing else.
        Its prompt functions, stopping ids and sampling options are not: prompts go through the tokenizer's chat
        template, and answers are greedy.

        Raises:
            InputError: the object holds no loaded model and tokenizer.
        """
        model = getattr(huggingface_llm, "_model", None)
        tokenizer = getattr(huggingface_llm, "_tokenizer", None)
        if model is None or tokenizer is None:
            raise InputError(f"a {type(huggingface_llm).__name__} holds no loaded model; pass a HuggingFaceLLM")
        taken = {ours: getattr(huggingface_llm, theirs, None) for ours, theirs in _TAKEN_OVER.items()}
        known = {name: value for name, value in taken.items() if value}
        # Its `model_name` is a default where a model was handed to it; the model's own name never is.
        return cls.from_model(LanguageModel.from_transformers(model, tokenizer), **{**known, **fields})

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this class."""
        return "SemGradLLM"

    @property
    def language_model(self) -> LanguageModel:
        """The model itself, loaded now if it was not."""
        if self._weights is None or self._weights.key != key_of(self._loading):
            self._weights = Weights.shared(**self._loading)
        return self._weights.get()

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts with; loads the weights unless `context_window` is set."""
        window = self.context_window or max(_SMALLEST_WINDOW, self.language_model.context_window or 2**20)
        return LLMMetadata(context_window=window, num_output=self.max_tokens, is_chat_model=True, model_name=self.model)

    def to_payload(self) -> dict[str, Any]:
        """What traces say of this LLM. The default asks for `metadata`, which would load weights on the event loop."""
        return {"class_name": self.class_name(), "model_name": self.model, "num_output": self.max_tokens}

    def score(self, prompt: str | Sequence[ChatMessage], response: str) -> Verdict:
        """Score a text as this model's answer to a prompt, whoever wrote it; nothing is decided about it.

        Raises:
            EmptyResponseError: there is nothing to score.
            PromptTooLongError: prompt and text do not fit the context window.
        """
        conversation = prompt if isinstance(prompt, str) else to_conversation(prompt)
        evidence = self.language_model.evidence(conversation, response)
        return self._assessed(evidence, response, self._options({}))

    # The eight methods. None calls another, so that each makes one pair of events.

    @_traced_chat
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        generation, record = self._answer(to_conversation(messages), self._options(kwargs))
        return chat_response(generation.text, record)

    @_traced_completion
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text, shown to the model as one user turn."""
        generation, record = self._answer(prompt, self._options(kwargs))
        return completion(generation.text, record)

    @_traced_chat
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece; the last piece is empty and carries the record."""
        pieces = self._pieces(to_conversation(messages), self._options(kwargs))
        return (chat_response(text, record, delta=delta) for delta, text, record in pieces)

    @_traced_completion
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a text piece by piece; the last piece is empty and carries the record."""
        pieces = self._pieces(prompt, self._options(kwargs))
        return (completion(text, record, delta=delta) for delta, text, record in pieces)

    @_traced_chat
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, in a thread."""
        generation, record = await self._aanswer(to_conversation(messages), self._options(kwargs))
        return chat_response(generation.text, record)

    @_traced_completion
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, in a thread."""
        generation, record = await self._aanswer(prompt, self._options(kwargs))
        return completion(generation.text, record)

    @_traced_chat
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`, in a thread."""
        pieces = self._apieces(to_conversation(messages), self._options(kwargs))
        return (chat_response(text, record, delta=delta) async for delta, text, record in pieces)

    @_traced_completion
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, in a thread."""
        pieces = self._apieces(prompt, self._options(kwargs))
        return (completion(text, record, delta=delta) async for delta, text, record in pieces)

    # What they share.

    def _answer(self, conversation: Conversation, options: GenerationOptions) -> tuple[Generation, dict[str, Any]]:
        generation = self.language_model.generate(conversation, options, objective=self.estimator.objective)
        return generation, self._record(generation, options)

    async def _aanswer(
        self, conversation: Conversation, options: GenerationOptions
    ) -> tuple[Generation, dict[str, Any]]:
        """As a stream, because a stream can be stopped: a thread cannot."""
        stream = await asyncio.to_thread(self._open, conversation, options)
        try:
            generation = await asyncio.to_thread(lambda: stream.generation)
        finally:
            stream.close()
        return generation, await asyncio.to_thread(self._record, generation, options)

    def _pieces(self, conversation: Conversation, options: GenerationOptions) -> Generator[_Piece]:
        text = ""
        with self._open(conversation, options) as stream:
            for piece in stream:
                text += piece
                yield piece, text, None
            record = self._record(stream.generation, options)
        yield "", text, record

    async def _apieces(self, conversation: Conversation, options: GenerationOptions) -> AsyncGenerator[_Piece]:
        text = ""
        stream = await asyncio.to_thread(self._open, conversation, options)
        try:
            while piece := await asyncio.to_thread(next, stream, ""):
                text += piece
                yield piece, text, None
            record = await asyncio.to_thread(self._record, stream.generation, options)
        finally:
            stream.close()
        yield "", text, record

    def _open(self, conversation: Conversation, options: GenerationOptions) -> TextStream:
        return self.language_model.stream(conversation, options, objective=self.estimator.objective)

    def _record(self, generation: Generation, options: GenerationOptions) -> dict[str, Any]:
        """Model, usage and, unless a query engine collects its calls and scores what it needs, the score."""
        record, call = raw_record(generation, self.model), ModelCall(generation, lambda g: self._assess(g, options))
        collector = current_collector()
        if collector is None:
            report(call.verdict, "llm")
            return {**record, METADATA_KEY: call.verdict.metadata()}
        collector.add(call)
        return record

    def _assess(self, generation: Generation, options: GenerationOptions) -> Verdict:
        return self._assessed(generation.evidence, generation.text, options)

    def _assessed(self, evidence: Evidence, text: str, options: GenerationOptions) -> Verdict:
        return assess(
            self.language_model,
            self.estimator,
            evidence,
            text=text,
            options=options,
            prompt_template=self.prompt_template,
        )

    def _options(self, kwargs: Mapping[str, Any]) -> GenerationOptions:
        """The options of one call: the fields, and what the call says otherwise."""
        unknown = sorted(kwargs.keys() - _PER_CALL - _IGNORED)
        if unknown:
            known = ", ".join(sorted(_PER_CALL))
            raise InputError(f"SemGradLLM takes no {', '.join(unknown)}; a call may set {known}")
        chosen = {name: kwargs.get(name, getattr(self, name)) for name in _PER_CALL}
        longest, stop = chosen.pop("max_tokens"), chosen.pop("stop")
        return GenerationOptions(max_new_tokens=longest, **chosen, stop=tuple(stop or ()))

    @property
    def _loading(self) -> dict[str, Any]:
        """The arguments of `LanguageModel.from_pretrained`."""
        return {"name_or_path": self.model, **{name: getattr(self, name) for name in _LOADING}}

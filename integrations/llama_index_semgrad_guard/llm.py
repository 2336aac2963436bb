"""`SemGradLLM`: a local language model as a LlamaIndex LLM, every answer with its score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, cast

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

from llama_index_semgrad_guard.answering import AnsweringLLM
from llama_index_semgrad_guard.lazy_streams import aasked_here, asked_here
from llama_index_semgrad_guard.records import calls_tools, chat_response, completion, to_conversation, without_calls
from semgrad_guard import LanguageModel, Verdict
from semgrad_guard.adapters.settings import loaded_weights, require_loaded
from semgrad_guard.errors import InputError, UnsupportedToolsError
from semgrad_guard.guard import assess, off_loop
from semgrad_guard.named import reading_prompt
from semgrad_guard.records import Conversation

_TAKEN_OVER = {
    "max_tokens": "max_new_tokens",
    "context_window": "context_window",
    "system_prompt": "system_prompt",
    "callback_manager": "callback_manager",
}
_SMALLEST_WINDOW = 1024
"""LlamaIndex's own prompts leave no room for a passage in less; a prompt that is really too long raises."""

F = TypeVar("F", bound=Callable[..., Any])


def _traced_chat(method: F) -> F:
    """LlamaIndex's decorator, typed."""
    return cast("F", callbacks.llm_chat_callback()(method))  # pyright: ignore[reportUnknownMemberType]


def _traced_completion(method: F) -> F:
    """LlamaIndex's decorator, typed."""
    return cast("F", callbacks.llm_completion_callback()(method))  # pyright: ignore[reportUnknownMemberType]


class SemGradLLM(AnsweringLLM):
    """A Hugging Face causal LM, run here, whose answers carry an uncertainty.

        llm = SemGradLLM(model="pocket")
        llm.complete("What is the capital of France?").raw["semgrad_guard"]["uncertainty"]

    The record stands in `raw` and in `additional_kwargs` of the response, never in its message, which may become part
    of the next prompt. Within a `GuardedQueryEngine` the engine scores and decides, and `raw` holds no score. Weights
    load at the first answer (or when LlamaIndex asks for the context window); equal instances share them. The async
    methods leave the event loop free, and a cancelled one stops generating at the next token.
    """

    @classmethod
    def from_model(cls, language_model: LanguageModel, /, **fields: Any) -> Self:
        """An LLM for weights that are loaded already; `fields` are the constructor's, but those for loading.

        Raises:
            InputError: a field that only loading could honour.
        """
        require_loaded(fields)
        llm = cls(model=language_model.name, revision=language_model.revision, **fields)
        llm._weights = loaded_weights(llm, language_model)
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
    def reading_prompt(self) -> str:
        """A prompt for answering from a passage that this model reads well, with {context} and {question} in it."""
        return reading_prompt(self.model)

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
            UnsupportedToolsError: the prompt holds calls of tools, and the model's chat template knows none.
            PromptTooLongError: prompt and text do not fit the context window.
        """
        conversation = prompt if isinstance(prompt, str) else to_conversation(prompt)
        if not isinstance(conversation, str) and calls_tools(conversation):
            _ = self.language_model.tool_format  # a template that knows no tools would leave the calls out
        evidence = self.language_model.evidence(conversation, response)
        answerer = self._answerer(self._options({}))
        return assess(
            answerer.model,
            answerer.estimator,
            evidence,
            text=evidence.text,
            options=answerer.options,
            prompt_template=answerer.prompt_template,
        )

    def _shown(self, messages: Sequence[ChatMessage]) -> Conversation:
        """A conversation as this model is shown it.

        Where agents share a memory, it holds calls of tools that another model made. A chat template that knows no
        tools is not shown them; what the tools have said stays.
        """
        conversation = to_conversation(messages)
        if not calls_tools(conversation):
            return conversation
        try:
            _ = self.language_model.tool_format
        except UnsupportedToolsError:
            return without_calls(conversation)
        return conversation

    async def _ashown(self, messages: Sequence[ChatMessage]) -> Conversation:
        """As `_shown`: calls may be a reason to load the weights."""
        conversation = to_conversation(messages)
        return await off_loop(lambda: self._shown(messages)) if calls_tools(conversation) else conversation

    # The eight methods. None calls another, so that each makes one pair of events.

    @_traced_chat
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        generation, record = self._answer(self._shown(messages), self._options(kwargs))
        return chat_response(generation.text, record)

    @_traced_completion
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text, shown to the model as one user turn."""
        generation, record = self._answer(prompt, self._options(kwargs))
        return completion(generation.text, record)

    @_traced_chat
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece; the last piece is empty and carries the record."""
        pieces = asked_here(self._pieces(self._shown(messages), self._options(kwargs)))
        return (chat_response(text, record, delta=delta) for delta, text, record in pieces)

    @_traced_completion
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a text piece by piece; the last piece is empty and carries the record."""
        pieces = asked_here(self._pieces(prompt, self._options(kwargs)))
        return (completion(text, record, delta=delta) for delta, text, record in pieces)

    @_traced_chat
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, in a thread."""
        generation, record = await self._aanswer(await self._ashown(messages), self._options(kwargs))
        return chat_response(generation.text, record)

    @_traced_completion
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, in a thread."""
        generation, record = await self._aanswer(prompt, self._options(kwargs))
        return completion(generation.text, record)

    @_traced_chat
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`, in a thread."""
        pieces = aasked_here(self._apieces(await self._ashown(messages), self._options(kwargs)))
        return (chat_response(text, record, delta=delta) async for delta, text, record in pieces)

    @_traced_completion
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, in a thread."""
        pieces = aasked_here(self._apieces(prompt, self._options(kwargs)))
        return (completion(text, record, delta=delta) async for delta, text, record in pieces)

"""`SemGradLLM`: a local language model as a LlamaIndex LLM. What leaves it has its score, and was decided about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    LogProb,
)
from llama_index.core.llms import callbacks
from pydantic import Field, SkipValidation, field_serializer, field_validator

from llama_index_semgrad_guard.records import (
    REASONING,
    Chunk,
    Prompt,
    ToolCallingLLM,
    calls_tools,
    chat_response,
    completion,
    raw_record,
    report,
    reporting,
    to_conversation,
)
from llama_index_semgrad_guard.router import UncertaintyRouterCallback, work_of
from semgrad_guard import (
    METADATA_KEY,
    Estimator,
    Generation,
    GenerationOptions,
    LanguageModel,
    Message,
    Policy,
    Verdict,
)
from semgrad_guard.adapters.calls import FORM_OPTIONS, TURN, AnswerForm, openai_logprobs
from semgrad_guard.adapters.model_fields import LocalModelFields, plain, template_calls_tools
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    Draft,
    Outcome,
    Piece,
    SentencePiece,
    StreamSteps,
    Terms,
    ThoughtPiece,
    arun_stream,
    question_of,
    run_stream,
    streamed,
)

_TAKEN_OVER = {
    "max_tokens": "max_new_tokens",
    "context_window": "context_window",
    "system_prompt": "system_prompt",
    "callback_manager": "callback_manager",
}
_SMALLEST_WINDOW = 1024
"""LlamaIndex's own prompts leave no room for a passage in less; a prompt that is too long for the model raises."""

A_STRUCTURE = "Text cannot stand in for a structured answer."

F = TypeVar("F", bound=Callable[..., Any])


def _traced_chat(method: F) -> F:
    """LlamaIndex's decorator, typed."""
    return cast("F", callbacks.llm_chat_callback()(method))  # pyright: ignore[reportUnknownMemberType]


def _traced_completion(method: F) -> F:
    """LlamaIndex's decorator, typed."""
    return cast("F", callbacks.llm_completion_callback()(method))  # pyright: ignore[reportUnknownMemberType]


class SemGradLLM(LocalModelFields, ToolCallingLLM):
    """A Hugging Face causal LM, run here, whose answers carry an uncertainty.

        llm = SemGradLLM(model="pocket")
        llm.complete("What is the capital of France?").raw["semgrad_guard"]["uncertainty"]

    The record is in `raw` and in `additional_kwargs` of the response, never in its message, which may become part of
    the next prompt. With a `router` an answer is decided about before it leaves: engines, memories, handlers and traces
    get the text that is let through, or what stands in its place, and never a draft.

    Weights load at the first answer (or when LlamaIndex reads the context window); equal instances share them. Calls
    that are under way at the same time, in tasks or threads, share the model's steps. The async methods leave the event
    loop free, and a cancelled one stops generating at the next token. Where the model's chat template knows tools, it
    is a model that calls functions: a `FunctionAgent` and LlamaIndex's structured outputs use these.
    """

    router: Annotated[Any, SkipValidation] = None
    """An `UncertaintyRouterCallback`; None: answers are scored, and nothing is decided; False: a helper (it condenses,
    plans, writes titles), whose answers are neither scored nor counted in a question."""

    context_window: int | None = Field(default=None, gt=0)
    """The window that LlamaIndex packs prompts for; default: the model's own, but at least 1024."""

    logprobs: bool = False
    """Whether responses that are the model's own answer carry the log-probabilities of its tokens."""

    top_logprobs: int = Field(default=0, ge=0, le=20)
    """With `logprobs`: how many of the likeliest tokens at each place follow the one that was written."""

    def __init__(self, model: str | None = None, /, **fields: Any) -> None:
        super().__init__(**({} if model is None else {"model": model}), **fields)

    @classmethod
    def from_huggingface_llm(cls, huggingface_llm: Any, /, **fields: Any) -> Self:
        """An LLM on the model and tokenizer that LlamaIndex's `HuggingFaceLLM` has loaded; it stays as it is.

        Its context window, longest answer, system prompt and callbacks are taken over where `fields` have no others.
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

    @field_validator("router")
    @classmethod
    def _a_router(cls, value: Any) -> Any:
        return UncertaintyRouterCallback.read(value)

    @field_serializer("router")
    def _in_a_dictionary(self, router: Any) -> Any:
        """By its name, which `from_dict` refuses: nobody loses a router unawares."""
        return f"<{type(router).__name__}>" if router else router

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this class."""
        return "SemGradLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The limits for which LlamaIndex plans prompts; loads the weights unless `context_window` is set."""
        window = self.context_window or max(_SMALLEST_WINDOW, self.language_model.context_window or 2**20)
        knows_tools = None
        if self._weights is None:
            knows_tools = template_calls_tools(self.model, self.revision, self.template_options)
            if knows_tools is None and self.context_window is not None:
                knows_tools = False  # the weights know, and nothing else needs them yet
        return LLMMetadata(
            context_window=window,
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=self.language_model.knows_tools if knows_tools is None else knows_tools,
            model_name=self.model,
        )

    def to_payload(self) -> dict[str, Any]:
        """This LLM in traces. LlamaIndex's own reads `metadata`, which would load weights on the event loop."""
        return {"class_name": self.class_name(), "model_name": self.model, "num_output": self.max_tokens}

    def score(self, prompt: Prompt, response: str) -> Verdict:
        """Score a text of any author as this model's answer to a prompt, without a decision about it.

        Raises:
            EmptyResponseError: the response holds no token.
            UnsupportedToolsError: the prompt holds calls of tools, and the model's chat template has no tools.
            PromptTooLongError: prompt and text do not fit the context window.
        """
        conversation = prompt if isinstance(prompt, str) else to_conversation(prompt)
        response = plain("a response", response, str)
        if not isinstance(conversation, str) and calls_tools(conversation):
            _ = self.language_model.tool_format  # a template without tools would leave the calls out
        return self._assessed(self.language_model.evidence(conversation, response), self._policy)

    # One answer: drafted, scored and decided about before it leaves.

    def _pieces(self, prompt: Prompt, kwargs: Mapping[str, Any], *, is_live: bool) -> StreamSteps[Chunk, None]:
        """The pieces of what goes out, and at the end the whole with its record.

        A stream belongs to the question in which it was asked for, wherever it is read.
        """
        also = frozenset({"formatted"})
        if not isinstance(prompt, str):
            also |= FORM_OPTIONS
            to_conversation(prompt)  # what cannot be read is an error of the call, and not of the stream
        form, writing = AnswerForm.of(kwargs), self._writing(kwargs, also=also)
        question, turn, terms = question_of(self.router), TURN.get(), None
        if self.router:
            terms = reporting(self.router.terms if question is None else question.terms, "llm")
        text = thought = ""

        def show(step: Piece | SentencePiece | Outcome[Any]) -> Iterator[Chunk]:
            nonlocal text, thought
            if isinstance(step, Outcome):
                if self.router is None:
                    report(step.verdict, "llm")
                if turn is not None and self.router is not False:
                    turn.note(step.verdict)
                yield self._whole(step, sent=text)
            elif isinstance(step, ThoughtPiece):
                thought += step.text
                yield Chunk(text, "", thought, step.text)
            else:
                new = step.text if isinstance(step, SentencePiece) else step
                text += new
                yield Chunk(text, new, thought)

        return streamed(
            terms,
            self._live(prompt, form, writing, terms, is_live=is_live),
            lambda _: work_of(self.router.escalate_to, prompt),
            show=show,
            question=question,
            is_recorded=self.router is None,
        )

    def _live(
        self, prompt: Prompt, form: AnswerForm, writing: GenerationOptions, terms: Terms | None, *, is_live: bool
    ) -> StreamSteps[Piece, Draft[Chunk]]:
        """The steps of writing a draft."""
        return self._answering(
            lambda: prompt if isinstance(prompt, str) else form.instructed(self._shown(prompt)),
            form,
            writing,
            partial(self._drafted, form),
            terms=terms,
            policy=self._policy,
            is_live=is_live,
            is_scored=self.router is not False,
        )

    @property
    def _policy(self) -> Policy | None:
        return self.router.policy if self.router else None

    def _shown(self, messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
        """A conversation as this model reads it.

        Where agents share a memory, it holds calls of tools that another model made. For a chat template without tools
        they are left out; the tools' results stay.
        """
        conversation = to_conversation(messages)
        if not calls_tools(conversation) or self.language_model.knows_tools:
            return conversation
        kept = [message for message in conversation if message.content.strip() or not message.tool_calls]
        return tuple(replace(message, tool_calls=()) for message in kept)

    def _drafted(self, form: AnswerForm, draft: Draft[Generation], estimator: Estimator) -> Draft[Chunk]:
        """The draft as LlamaIndex gets it. A call that cannot be read is a part of the text, as the model wrote it."""
        model, verdict = self.language_model, draft.verdict
        found = form.taken_apart(model, draft.answer)
        text = "\n".join(filter(None, (found.text, *found.broken)))
        if text != verdict.text:
            verdict = verdict.revised(text=text, sentences=())
        verdict = verdict.revised(tool_calls=tuple(found.calls))
        wanted, top = self.logprobs and self.router is not False, self.top_logprobs
        logprobs = _logprobs(model, estimator, draft.answer, top=top) if wanted else None
        answer = Chunk(text, record=raw_record(draft.answer, self.model), logprobs=logprobs)
        trusted = bool(self.router) and not found.broken and self.router.trusts(found.calls)
        return Draft(verdict, answer, draft.prompt, trusted=trusted, irreplaceable=A_STRUCTURE if form.is_owed else "")

    def _whole(self, outcome: Outcome[Any], *, sent: str) -> Chunk:
        """The last piece: the delivered text with its record; `sent` is the text that has left before.

        Usage and the reason of the end would tell about a withheld draft: they come with a whole answer alone.
        """
        verdict, own = outcome.verdict, outcome.answer if isinstance(outcome.answer, Chunk) else None
        keep_draft = bool(self.router) and self.router.terms.keep_draft
        record: dict[str, Any] = {"model": verdict.delivered.details.model} if own is None else dict(own.record or {})
        if verdict.details.reasoning:
            record[REASONING] = verdict.details.reasoning
        if self.router is not False:
            record[METADATA_KEY] = verdict.metadata(keep_draft=keep_draft)
        logprobs = own.logprobs if own is not None and own.text == verdict.text else None
        delta, thought = verdict.text.removeprefix(sent), verdict.details.reasoning or ""
        return Chunk(verdict.text, delta, thought, record=record, calls=verdict.tool_calls, logprobs=logprobs)

    # LlamaIndex's eight methods. None calls another, so that each makes one pair of events.

    @_traced_chat
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        (whole,) = run_stream(self._pieces(messages, kwargs, is_live=False))
        return chat_response(whole._replace(delta=None))

    @_traced_completion
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text, shown to the model as one user turn."""
        (whole,) = run_stream(self._pieces(prompt, kwargs, is_live=False))
        return completion(whole._replace(delta=None))

    @_traced_chat
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece; the last piece carries the record.

        Live where nothing may be withheld; by sentence where sentences may; else in one piece.
        """
        pieces = run_stream(self._pieces(messages, kwargs, is_live=True))
        return (chat_response(piece) for piece in pieces)

    @_traced_completion
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a text piece by piece, as `stream_chat`."""
        pieces = run_stream(self._pieces(prompt, kwargs, is_live=True))
        return (completion(piece) for piece in pieces if piece.thought_delta is None)

    @_traced_chat
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, on the event loop."""
        pieces = arun_stream(self._pieces(messages, kwargs, is_live=False))
        (whole,) = [piece async for piece in pieces]
        return chat_response(whole._replace(delta=None))

    @_traced_completion
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, on the event loop."""
        pieces = arun_stream(self._pieces(prompt, kwargs, is_live=False))
        (whole,) = [piece async for piece in pieces]
        return completion(whole._replace(delta=None))

    @_traced_chat
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`, on the event loop."""
        pieces = arun_stream(self._pieces(messages, kwargs, is_live=True))
        return (chat_response(piece) async for piece in pieces)

    @_traced_completion
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, on the event loop."""
        pieces = arun_stream(self._pieces(prompt, kwargs, is_live=True))
        return (completion(piece) async for piece in pieces if piece.thought_delta is None)


def _logprobs(
    model: LanguageModel, estimator: Estimator, answer: Generation, *, top: int
) -> list[list[LogProb]] | None:
    found = openai_logprobs(model, estimator, answer.evidence, top=top)
    if found is None:
        return None
    return [[LogProb.model_validate(one) for one in (own, *own["top_logprobs"])] for own in found["content"]]

"""`SemGradLLM`: a local language model as a LlamaIndex LLM, every answer with its score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self, TypeVar, cast

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
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
from llama_index.core.llms.llm import default_completion_to_prompt
from pydantic import BeforeValidator, Field, SkipValidation

from llama_index_semgrad_guard.calls import ModelCall, abegun_here, begun_here
from llama_index_semgrad_guard.events import report
from llama_index_semgrad_guard.records import (
    REASONING,
    CallOptions,
    Chunk,
    ToolCallingLLM,
    calls_tools,
    chat_response,
    completion,
    raw_record,
    to_conversation,
    without_calls,
)
from llama_index_semgrad_guard.turn import Turn, current_turn, stray
from semgrad_guard import (
    METADATA_KEY,
    Estimator,
    Generation,
    GenerationOptions,
    HybridGrad,
    LanguageModel,
    Message,
    Verdict,
)
from semgrad_guard.adapters.calls import FORM_OPTIONS, AnswerForm
from semgrad_guard.adapters.settings import (
    LocalModelFields,
    template_calls_tools,
)
from semgrad_guard.errors import AnswerCancelledError, InputError
from semgrad_guard.guard import (
    DraftPiece,
    LiveAnswer,
    Piece,
    SentencePiece,
    Stop,
    StreamSteps,
    Ticket,
    arun_stream,
    as_estimator,
    awaited,
    read_off_loop,
    record_draft,
    run_stream,
    with_draft,
    written,
)

_PROMPT_FUNCTIONS: Mapping[str, Any] = {
    "messages_to_prompt": generic_messages_to_prompt,
    "completion_to_prompt": default_completion_to_prompt,
    "query_wrapper_prompt": None,
}
"""Fields by which LlamaIndex's LLMs without a chat template make prompts, and their defaults."""


Shown = str | tuple[Message, ...]
"""A prompt: a text, or a conversation."""


_TAKEN_OVER = {
    "max_tokens": "max_new_tokens",
    "context_window": "context_window",
    "system_prompt": "system_prompt",
    "callback_manager": "callback_manager",
}
_SMALLEST_WINDOW = 1024
"""LlamaIndex's own prompts leave no room for a passage in less; a prompt that is too long for the model raises."""

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
    the next prompt. Within a `GuardedQueryEngine` the engine scores and decides, and `raw` holds no score. Weights
    load at the first answer (or when LlamaIndex reads the context window); equal instances share them. Calls that are
    under way at the same time, in tasks or threads, share the model's steps. The async methods leave the event loop
    free, and a cancelled one stops generating at the next token. Where the model's chat template knows tools, it is a
    model that calls functions: a `FunctionAgent` and LlamaIndex's structured outputs use these.
    """

    context_window: int | None = None
    """The window that LlamaIndex packs prompts for; default: the model's own, but at least 1024."""

    estimator: Annotated[Estimator, SkipValidation, BeforeValidator(as_estimator)] = Field(
        default_factory=HybridGrad, exclude=True
    )
    """An estimator; or a calibration or a policy, for the one that it was made with."""

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

    def score(self, prompt: str | Sequence[ChatMessage], response: str) -> Verdict:
        """Score a text of any author as this model's answer to a prompt, without a decision about it.

        Raises:
            EmptyResponseError: the response holds no token.
            UnsupportedToolsError: the prompt holds calls of tools, and the model's chat template has no tools.
            PromptTooLongError: prompt and text do not fit the context window.
        """
        conversation = prompt if isinstance(prompt, str) else to_conversation(prompt)
        if not isinstance(conversation, str) and calls_tools(conversation):
            _ = self.language_model.tool_format  # a template without tools would leave the calls out
        evidence = self.language_model.evidence(conversation, response)
        return self._assessed(evidence)

    def _shown(self, messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
        """A conversation as this model reads it.

        Where agents share a memory, it holds calls of tools that another model made. For a chat template without tools
        they are left out; the tools' results stay.
        """
        conversation = to_conversation(messages)
        if not calls_tools(conversation) or self.language_model.knows_tools:
            return conversation
        return without_calls(conversation)

    async def _ashown(self, messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
        """As `_shown`: calls may be a reason to load the weights."""
        conversation = to_conversation(messages)
        return await read_off_loop(lambda: self._shown(messages)) if calls_tools(conversation) else conversation

    def _answer(self, conversation: Shown, options: CallOptions) -> tuple[Generation, dict[str, Any]]:
        return self._recorded(*self._submit(conversation, options).outcome(), options)

    async def _aanswer(self, conversation: Shown, options: CallOptions) -> tuple[Generation, dict[str, Any]]:
        return self._recorded(*await awaited(lambda: self._submit(conversation, options)), options)

    def _submit(
        self, conversation: Shown, options: CallOptions, on_piece: Callable[[Piece], None] | None = None
    ) -> Ticket[tuple[Generation, Verdict | None]]:
        """Have a conversation answered. The score is made with the answer, unless the text may be an engine's own.

        An engine's call that condenses the question, or plans, is never delivered: within a turn a call is scored once
        it is known to be an author, and at once where LlamaIndex writes answers only.
        """
        form, turn = options.form, current_turn()
        instructed = conversation if isinstance(conversation, str) else form.instructed(conversation)
        terms = None if turn is None or turn.leaving is None else turn.leaving.terms
        request = self._answerer(options.writing_by(self.language_model)).request(
            instructed, on_piece=on_piece, template_options=form.template_options, terms=terms
        )
        if on_piece is not None:
            request = with_draft(request, on_piece)
        if turn is None or turn.synthesizes or request.on_sentences is not None:
            return self.language_model.submit(request.then(lambda draft: (draft.answer, draft.verdict)))
        undelivered: Any = request
        return self.language_model.submit(replace(undelivered, finish=_unscored))

    def _recorded(
        self, generation: Generation, verdict: Verdict | None, options: CallOptions
    ) -> tuple[Generation, dict[str, Any]]:
        generation = options.readable(self.language_model, generation)
        return generation, self._record(generation, options, verdict=verdict)

    def _streamed(self, conversation: Shown, options: CallOptions) -> StreamSteps[Chunk, None]:
        """An answer piece by piece, and its record; within an engine's turn without the thought, as whole answers."""
        text, thought, pieces, turn = "", "", list[str](), current_turn()
        let_through = list[SentencePiece]()
        live = LiveAnswer(lambda on_piece: self._submit(conversation, options, on_piece))
        if turn is not None:
            turn.opened(live.stop)

        def show(piece: Piece | SentencePiece | DraftPiece) -> Iterator[Chunk]:
            nonlocal text, thought
            if isinstance(piece, SentencePiece):
                let_through.append(piece)
            elif isinstance(piece, str | DraftPiece):
                new = _noted(piece, pieces, turn, let_through)
                text += new
                if new:
                    yield Chunk(text, new, thought)
            elif turn is None:
                thought += piece.text
                yield Chunk(text, "", thought, piece.text)

        try:
            generation, verdict = yield from written(live, Stop(), show=show)
        except AnswerCancelledError:
            if turn is None or not turn.is_stopped:
                raise
            return  # the guard's reader has left: an error would only be noise of the engine's own thread
        held = options.readable(self.language_model, generation).text.removeprefix(text)  # it might have been a call
        if held:
            pieces.append(held)
            text += held
        record = self._record(generation, options, verdict=verdict, text=text, pieces=pieces)
        calls = options.calls(self.language_model, generation)
        yield Chunk(text, held, record.get(REASONING, ""), record=record, calls=calls)

    def _record(
        self,
        generation: Generation,
        options: CallOptions,
        *,
        verdict: Verdict | None = None,
        text: str | None = None,
        pieces: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Model, usage and, unless a guard records the calls and takes the scores that it needs, the score.

        `text` and `pieces` are the objects that go out, where they are not the generation's own.
        """
        record = raw_record(generation, self.model)

        def judged(made: Generation) -> Verdict:
            found, shown = verdict or self._assess(made, options), made.text if text is None else text
            # A call that cannot be read is text here.
            return found if found.text == shown else found.model_copy(update={"text": shown, "sentences": ()})

        calls = options.calls(self.language_model, generation)
        call = ModelCall(generation, judged, text=text, pieces=pieces, tool_calls=calls)
        turn = current_turn()
        if turn is not None:
            turn.add(call)
            return record
        stray(call.text, call)
        record_draft(call.verdict, call.prompt)
        report(call.verdict, "llm")
        thought = {REASONING: call.verdict.reasoning} if call.verdict.reasoning else {}
        return {**record, **thought, METADATA_KEY: call.verdict.metadata()}

    def _assess(self, generation: Generation, options: CallOptions) -> Verdict:
        answerer = self._answerer(options.writing_by(self.language_model))
        return answerer.draft(generation, template_options=options.form.template_options).verdict

    def _writing(self, call: Mapping[str, Any], *, also: frozenset[str] = frozenset()) -> GenerationOptions:
        """As for any local model; a prompt function, which would be left out in silence, is an `InputError`."""
        for name, default in _PROMPT_FUNCTIONS.items():
            if getattr(self, name) is not default:
                raise InputError(
                    f"{type(self).__name__} makes its prompts by the model's chat template and leaves {name} out; give "
                    'a template of your own as template_options={"chat_template": ...}'
                )
        return super()._writing(call, also=also)

    def _options(self, kwargs: Mapping[str, Any], *, also: frozenset[str] = frozenset()) -> CallOptions:
        return CallOptions(self._writing(kwargs, also=also | {"formatted"}), AnswerForm.of(kwargs))

    # LlamaIndex's eight methods. None calls another, so that each makes one pair of events.

    @_traced_chat
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        options = self._options(kwargs, also=FORM_OPTIONS)
        generation, record = self._answer(self._shown(messages), options)
        calls = options.calls(self.language_model, generation)
        return chat_response(Chunk(generation.text, record=record, calls=calls))

    @_traced_completion
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text, shown to the model as one user turn."""
        generation, record = self._answer(prompt, self._options(kwargs))
        return completion(Chunk(generation.text, record=record))

    @_traced_chat
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece; the last piece is empty and carries the record."""
        options = self._options(kwargs, also=FORM_OPTIONS)
        chunks = begun_here(run_stream(self._streamed(self._shown(messages), options)))
        return (chat_response(chunk) for chunk in chunks)

    @_traced_completion
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a text piece by piece; the last piece is empty and carries the record."""
        chunks = begun_here(run_stream(self._streamed(prompt, self._options(kwargs))))
        return (completion(chunk) for chunk in chunks if chunk.thought_delta is None)

    @_traced_chat
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, on the event loop."""
        options = self._options(kwargs, also=FORM_OPTIONS)
        generation, record = await self._aanswer(await self._ashown(messages), options)
        calls = options.calls(self.language_model, generation)
        return chat_response(Chunk(generation.text, record=record, calls=calls))

    @_traced_completion
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, on the event loop."""
        generation, record = await self._aanswer(prompt, self._options(kwargs))
        return completion(Chunk(generation.text, record=record))

    @_traced_chat
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As `stream_chat`, on the event loop."""
        options = self._options(kwargs, also=FORM_OPTIONS)
        steps = self._streamed(await self._ashown(messages), options)
        return (chat_response(chunk) async for chunk in abegun_here(arun_stream(steps)))

    @_traced_completion
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, on the event loop."""
        chunks = abegun_here(arun_stream(self._streamed(prompt, self._options(kwargs))))
        return (completion(chunk) async for chunk in chunks if chunk.thought_delta is None)


def _noted(piece: str | DraftPiece, pieces: list[str], turn: Turn | None, let_through: Sequence[SentencePiece]) -> str:
    new = piece if isinstance(piece, str) else piece.text
    if new:  # a line break is no piece
        pieces.append(new)
    if isinstance(piece, DraftPiece) and turn is not None:
        turn.let_through(piece.answer, pieces, let_through)
    return new


def _unscored(written: Sequence[Generation]) -> tuple[Generation, None]:
    return written[0], None

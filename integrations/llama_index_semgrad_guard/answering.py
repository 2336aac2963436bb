"""`AnsweringLLM`: how a local model answers what LlamaIndex asks, every answer with its score."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Annotated, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.llms.llm import LLM, default_completion_to_prompt
from pydantic import BeforeValidator, Field, PrivateAttr, SkipValidation

from llama_index_semgrad_guard.calls import ModelCall, current_turn, stray
from llama_index_semgrad_guard.events import report
from llama_index_semgrad_guard.records import REASONING, raw_record
from semgrad_guard import METADATA_KEY, Estimator, Generation, GenerationOptions, HybridGrad, LanguageModel, Verdict
from semgrad_guard.adapters.settings import call_options, weights_of
from semgrad_guard.adapters.weights import Weights
from semgrad_guard.errors import InputError, require_known
from semgrad_guard.guard import Answerer, LiveAnswer, as_estimator, off_loop, record_draft
from semgrad_guard.records import Conversation

_CALL_OPTIONS = frozenset({"formatted"})
"""What a call may say besides how its answer is generated."""

_PROMPT_FUNCTIONS: Mapping[str, Any] = {
    "messages_to_prompt": generic_messages_to_prompt,
    "completion_to_prompt": default_completion_to_prompt,
    "query_wrapper_prompt": None,
}
"""Fields by which LlamaIndex's LLMs without a chat template make prompts, and what stands there by default."""

Piece = tuple[str, str, dict[str, Any] | None]
"""A piece of an answer, the answer so far, and the record: None in all pieces but the last."""


class AnsweringLLM(LLM):
    """The fields of an LLM that runs here, and its answers: whole and streamed, on the caller's thread or off it."""

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

    estimator: Annotated[Estimator, SkipValidation, BeforeValidator(as_estimator)] = Field(
        default_factory=HybridGrad, exclude=True
    )
    """An estimator; or a calibration or a policy, which stand for the one they were made for."""
    prompt_template: str = "chat"
    """A name for the form of the prompts; a calibration for another form is refused."""

    _weights: Weights | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        require_known(type(self).__name__, fields, type(self).model_fields)
        super().__init__(**fields)
        self._options({})

    @property
    def language_model(self) -> LanguageModel:
        """The model itself, loaded now if it was not."""
        weights = weights_of(self, self._weights)
        if weights is not self._weights:  # assigning a private attribute costs more than the comparison
            self._weights = weights
        return weights.get()

    def _answerer(self, options: GenerationOptions) -> Answerer:
        return Answerer(self.language_model, self.estimator, options, self.prompt_template)

    def _answer(self, conversation: Conversation, options: GenerationOptions) -> tuple[Generation, dict[str, Any]]:
        generation = self.language_model.generate(conversation, options, objective=self.estimator.objective)
        return generation, self._record(generation, options)

    async def _aanswer(
        self, conversation: Conversation, options: GenerationOptions
    ) -> tuple[Generation, dict[str, Any]]:
        return await off_loop(lambda: self._answer(conversation, options))

    def _live(self, conversation: Conversation, options: GenerationOptions) -> LiveAnswer:
        live, turn = self._answerer(options).live(conversation), current_turn()
        if turn is not None:
            turn.opened(live.close)
        return live

    def _pieces(self, conversation: Conversation, options: GenerationOptions) -> Generator[Piece]:
        text, pieces, live = "", list[str](), self._live(conversation, options)
        try:
            for piece in live:
                pieces.append(piece)
                text += piece
                yield piece, text, None
            record = self._record(live.stream.generation, options, text=text, pieces=pieces)
        finally:
            live.close()
        yield "", text, record

    async def _apieces(self, conversation: Conversation, options: GenerationOptions) -> AsyncGenerator[Piece]:
        text, pieces, live = "", list[str](), await off_loop(lambda: self._live(conversation, options))
        try:
            while piece := await off_loop(lambda: next(live.stream, "")):
                pieces.append(piece)
                text += piece
                yield piece, text, None
            whole = text
            record = await off_loop(lambda: self._record(live.stream.generation, options, text=whole, pieces=pieces))
        finally:
            live.close()
        yield "", text, record

    def _record(
        self,
        generation: Generation,
        options: GenerationOptions,
        *,
        text: str | None = None,
        pieces: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Model, usage and, unless a guard takes the calls down and scores what it needs, the score.

        `text` and `pieces` are the objects that go out, where they are not the generation's own.
        """
        record = raw_record(generation, self.model)
        call = ModelCall(generation, lambda given: self._assess(given, options), text=text, pieces=pieces)
        turn = current_turn()
        if turn is not None:
            turn.add(call)
            return record
        stray(call.text, call)
        record_draft(call.verdict, call.prompt)
        report(call.verdict, "llm")
        thought = {REASONING: call.verdict.reasoning} if call.verdict.reasoning else {}
        return {**record, **thought, METADATA_KEY: call.verdict.metadata()}

    def _assess(self, generation: Generation, options: GenerationOptions) -> Verdict:
        return self._answerer(options).draft(generation).verdict

    def _options(self, kwargs: Mapping[str, Any]) -> GenerationOptions:
        """The options of one call: the fields, and what the call says otherwise.

        Raises:
            InputError: an option that there is none of, or a prompt function, which would be left out in silence.
        """
        for name, default in _PROMPT_FUNCTIONS.items():
            if getattr(self, name) is not default:
                raise InputError(
                    f"{type(self).__name__} makes its prompts by the model's chat template and leaves {name} out; give "
                    'a template of your own as template_options={"chat_template": ...}'
                )
        return call_options(self, kwargs, also=_CALL_OPTIONS)

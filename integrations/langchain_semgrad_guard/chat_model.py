"""`ChatSemGrad`: a local language model as a LangChain chat model, every answer with its score."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Self

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, SkipValidation, model_validator

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.batching import Conversation, PendingBatch
from langchain_semgrad_guard.calls import Call
from langchain_semgrad_guard.enforcement import EnforcingChatModel
from semgrad_guard import Estimator, Generation, GenerationOptions, HybridGrad, LanguageModel, Verdict
from semgrad_guard.engine.weights import Weights, key_of
from semgrad_guard.errors import InputError, SemGradGuardError
from semgrad_guard.guard import assess, template_name

_LOADING = ("revision", "dtype", "device_map", "attn_implementation", "template_options")
_PER_CALL = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"})
_IGNORED = frozenset({"stream"})


class ChatSemGrad(EnforcingChatModel):
    """A Hugging Face causal LM, run here, whose answers carry an uncertainty.

        chat = ChatSemGrad(model="pocket")
        chat.invoke("What is the capital of France?").response_metadata["semgrad_guard"]["uncertainty"]

    Alone it scores and delivers every answer. With an `UncertaintyRouterCallback` attached (in `callbacks=`, in a
    config, or by `with_config`) it delivers what the router lets through. Weights load at the first answer; copies and
    equal instances share them. Batches run as one generation and one backward pass.
    """

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

    estimator: Annotated[Estimator, SkipValidation] = Field(default_factory=HybridGrad)
    prompt_template: str = "chat"
    """A name for the form of the prompts; a calibration for another form is refused."""
    max_batch_size: int = Field(default=16, ge=1)
    """How many answers are generated at once, where a call's config has no `max_concurrency`."""

    streaming: bool = False
    timeout: float | None = None
    """Accepted as a standard parameter; a local model has no request that could time out."""
    max_retries: int | None = None
    """Accepted as a standard parameter; a local model has no request to retry."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted as a standard parameter; a local model asks for no key."""

    _weights: Weights | None = PrivateAttr(default=None)

    @classmethod
    def from_model(cls, language_model: LanguageModel, /, **fields: Any) -> Self:
        """A chat model for weights that are loaded already; `fields` are the constructor's, but those for loading.

        Raises:
            InputError: a field that only loading could honour.
        """
        loading = sorted({"model", *_LOADING} & fields.keys())
        if loading:
            raise InputError(f"the model is loaded already: set {', '.join(loading)} on the LanguageModel instead")
        chat = cls(model=language_model.name, revision=language_model.revision, **fields)
        chat._weights = Weights.of(language_model, key_of(chat._loading))
        return chat

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        self._options(None, {})
        return self

    @property
    def language_model(self) -> LanguageModel:
        """The model itself, loaded now if it was not."""
        if self._weights is None or self._weights.key != key_of(self._loading):
            self._weights = Weights.shared(**self._loading)
        return self._weights.get()

    # What LangChain asks for.

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        conversation, options = convert.to_conversation(messages), self._options(stop, kwargs)
        generation = PendingBatch.take(self, conversation, options)
        if generation is None:
            generation = self.language_model.generate(conversation, options, objective=self.estimator.objective)
        message = AIMessage(content=generation.text, **self._record(generation, options))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        conversation, options = convert.to_conversation(messages), self._options(stop, kwargs)
        with self.language_model.stream(conversation, options, objective=self.estimator.objective) as pieces:
            for piece in pieces:
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
            record = self._record(pieces.generation, options)
        yield ChatGenerationChunk(message=self._decided(AIMessageChunk(content="", chunk_position="last", **record)))

    @property
    def _llm_type(self) -> str:
        return "semgrad-guard"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that moves an answer or its score: LangChain's cache key. Loads the weights, to name them.

        Decisions are not part of it: the cache holds drafts, and whichever router is attached judges them anew.
        """
        identity = self.language_model.identity
        return {
            "model": self.model,
            "revision": identity.revision,
            "fingerprint": identity.fingerprint,
            "dtype": identity.dtype,
            "device_map": str(self.device_map),
            "attn_implementation": self.attn_implementation,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "default_stop": self.stop,
            "estimator": self.estimator.name,
            "estimator_settings": self.estimator.settings(),
            "prompt_template": template_name(self.language_model, self.prompt_template),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = convert.PROVIDER
        return params

    # What enforcement asks for.

    def _prepare(self) -> None:
        _ = self.language_model.identity

    @contextmanager
    def _together(self, calls: Sequence[Call], limit: int | None) -> Generator[None]:
        conversations = [c for c in map(_readable, calls) if c is not None]
        if len(conversations) < 2:
            yield
            return
        with PendingBatch(self, conversations, self._generate_all, limit or self.max_batch_size).opened():
            yield

    def _generate_all(self, conversations: Sequence[Conversation], options: GenerationOptions) -> list[Generation]:
        return self.language_model.generate_batch(conversations, options, objective=self.estimator.objective)

    def _record(self, generation: Generation, options: GenerationOptions) -> dict[str, Any]:
        """Usage and metadata of an answer; scoring happens here."""
        verdict = self._verdict(generation, options)
        return {
            "usage_metadata": convert.usage(generation),
            "response_metadata": convert.response_metadata(generation, verdict),
        }

    def _verdict(self, generation: Generation, options: GenerationOptions) -> Verdict:
        return assess(
            self.language_model,
            self.estimator,
            generation.evidence,
            text=generation.text,
            options=options,
            prompt_template=self.prompt_template,
        )

    def _options(self, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> GenerationOptions:
        """The options of one call: the fields, and what the call says otherwise."""
        unknown = sorted(kwargs.keys() - _PER_CALL - _IGNORED)
        if unknown:
            known = ", ".join(sorted(_PER_CALL))
            raise InputError(f"ChatSemGrad takes no {', '.join(unknown)}; a call may set {known}")
        chosen = {name: kwargs.get(name, getattr(self, name)) for name in _PER_CALL}
        longest, own_stop = chosen.pop("max_tokens"), chosen.pop("stop")
        limits: dict[str, Any] = {} if longest is None else {"max_new_tokens": longest}
        return GenerationOptions(**limits, **chosen, stop=tuple((own_stop if stop is None else stop) or ()))

    @property
    def _loading(self) -> dict[str, Any]:
        """The arguments of `LanguageModel.from_pretrained`."""
        return {"name_or_path": self.model, **{name: getattr(self, name) for name in _LOADING}}


def _readable(call: Call) -> Conversation | None:
    """A call's conversation; None for one that will fail in a run of its own."""
    try:
        return convert.to_conversation(call.messages)
    except SemGradGuardError:
        return None

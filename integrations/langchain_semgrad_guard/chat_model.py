"""`ChatSemGrad`: a local language model as a LangChain chat model, every answer with its score."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
)

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answers import Call
from langchain_semgrad_guard.enforcement import Identified, identity_of
from langchain_semgrad_guard.messages import AnyTool, call_fields, openai_tools
from langchain_semgrad_guard.runs import AsyncRun, SyncRun
from langchain_semgrad_guard.streams import LocalWriting, StreamingChatModel
from langchain_semgrad_guard.structured_output import Method, structured
from semgrad_guard import METADATA_KEY, Generation, GenerationOptions, LanguageModel, Message
from semgrad_guard.adapters.calls import FORM_OPTIONS, AnswerForm, openai_logprobs
from semgrad_guard.adapters.settings import (
    DECODING,
    LocalModelFields,
    Timeout,
    read_json,
    template_calls_tools,
)
from semgrad_guard.errors import InputError
from semgrad_guard.guard import (
    Draft,
    Stop,
    Ticket,
    awaited,
    stopping,
)
from semgrad_guard.records import PromptForm

_TEXT_ONLY: ModelProfile = {
    "text_inputs": True,
    "image_inputs": False,
    "image_url_inputs": False,
    "image_tool_message": False,
    "pdf_inputs": False,
    "pdf_tool_message": False,
    "audio_inputs": False,
    "video_inputs": False,
    "text_outputs": True,
    "image_outputs": False,
    "audio_outputs": False,
    "video_outputs": False,
    "structured_output": True,
    "temperature": True,
    "open_weights": True,
}
_CALL_OPTIONS = FORM_OPTIONS | {"logprobs", "stream"}
"""Options of a call other than those for generating its answer."""


@dataclass(frozen=True)
class Request:
    """Everything that an answer of a local model and its record depend on."""

    conversation: tuple[Message, ...]
    options: GenerationOptions
    form: AnswerForm
    logprobs: bool = False


class ChatSemGrad(LocalModelFields, StreamingChatModel):
    """A Hugging Face causal LM, run here, whose answers carry an uncertainty.

        chat = ChatSemGrad(model="pocket")
        chat.invoke("What is the capital of France?").response_metadata["semgrad_guard"]["uncertainty"]

    Alone it scores and delivers every answer. With an `UncertaintyRouterCallback` attached (in `callbacks=`, in a
    config, or by `with_config`) it delivers what the router lets through. Weights load at the first answer; copies and
    equal instances share them. Calls that are under way at the same time, in threads, tasks or a batch, share the
    model's steps.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    max_batch_size: int = Field(default=16, ge=1)
    """How many runs of a `batch` are under way at once, where its config has no `max_concurrency`."""

    logprobs: bool = False
    """Put the tokens' log-probabilities into the metadata, in OpenAI's shape; a call may set it too."""
    streaming: bool = False
    timeout: Timeout = None
    """Seconds for generating and scoring; beneath a router that sets no limit, for its target as well."""
    max_retries: int | None = None
    """Accepted as a standard parameter; a local model has no request to retry."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted as a standard parameter; a local model needs no key."""

    @classmethod
    def from_model(cls, language_model: LanguageModel, /, **fields: Any) -> Self:
        """A chat model for weights that are loaded already; `fields` are the constructor's, except those for loading.

        Raises:
            InputError: a field that only loading could honour.
        """
        chat = super().from_model(language_model, **fields)
        if "profile" not in fields:
            chat.profile = profile_of(language_model)
        return chat

    @classmethod
    def from_pipeline(cls, pipeline: Any, /, **fields: Any) -> Self:
        """A chat model for the model and tokenizer of a transformers text-generation pipeline.

        The pipeline's generation settings play no part: this class has its own, greedy by default.

        Raises:
            InputError: a pipeline for another task, or a field that only loading could honour.
        """
        if getattr(pipeline, "task", None) != "text-generation":
            raise InputError(
                f"from_pipeline takes a pipeline('text-generation', ...), not {getattr(pipeline, 'task', pipeline)!r}"
            )
        return cls.from_model(LanguageModel.from_transformers(pipeline.model, pipeline.tokenizer), **fields)

    # How it answers.

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: SyncRun = None, **kwargs: Any
    ) -> ChatResult:
        with stopping(Stop(self.timeout)):
            return self._submit(messages, stop, kwargs).outcome()

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> ChatResult:
        with stopping(Stop(self.timeout)):
            return await awaited(lambda: self._submit(messages, stop, kwargs))

    def _submit(
        self, messages: list[BaseMessage], stop: Sequence[str] | None, kwargs: Mapping[str, Any]
    ) -> Ticket[ChatResult]:
        request = self._request(messages, stop, kwargs)

        def result(draft: Draft[Generation]) -> ChatResult:
            message = self.message_of(draft, request)
            return ChatResult(generations=[ChatGeneration(message=message, generation_info=convert.info_of(message))])

        answerer = self._answerer(request.options)
        wanted = answerer.request(request.conversation, template_options=request.form.template_options)
        return self.language_model.submit(wanted.then(result))

    def _request(self, messages: list[BaseMessage], stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> Request:
        options = self._writing(kwargs if stop is None else {**kwargs, "stop": stop}, also=_CALL_OPTIONS)
        form = AnswerForm.of(kwargs)
        conversation = convert.to_conversation(messages)
        grammar = form.grammar(self.language_model)
        logprobs = bool(kwargs.get("logprobs", self.logprobs))
        return Request(form.instructed(conversation), replace(options, grammar=grammar), form, logprobs)

    def message_of(self, draft: Draft[Generation], request: Request) -> AIMessage:
        """A scored answer as a message with its record."""
        generation, verdict = draft.answer, draft.verdict
        answer = request.form.taken_apart(self.language_model, generation)
        metadata = convert.response_metadata("tool_calls" if answer.calls else generation.finish_reason, verdict)
        if request.logprobs:
            metadata["logprobs"] = openai_logprobs(self.language_model, self.estimator, generation.evidence)
        record: dict[str, Any] = {"usage_metadata": convert.usage(generation), "response_metadata": metadata}
        thought = convert.reasoning_fields(verdict)
        return AIMessage(content=answer.text, **thought, **call_fields(answer.calls, answer.broken), **record)

    # For runs, streams and batches.

    def _ready(self) -> Identified:
        model = self.language_model
        return model, model.identity

    @property
    def _at_once(self) -> int:
        return self.max_batch_size

    @property
    def _limit(self) -> float | None:
        return self.timeout

    def _form(self, call: Call) -> PromptForm:
        request = self._request(call.messages, call.stop, call.options)
        return self.language_model.render(request.conversation, **request.form.template_options).form

    def _live(self, call: Call, *, is_async: bool) -> LocalWriting | None:
        rules, read = call.rules, None
        if rules is not None and rules.terms.withholds:
            if self.by_sentence is None or rules.irreplaceable or not rules.terms.delivers_early:
                return None
            read = self._request(call.messages, call.stop, call.options)
            if not self._answerer(read.options).has_parts(read.form.template_options):
                return None

        def submit(on_piece: Callable[[Any], None]) -> Ticket[Draft[AIMessage]]:
            request = read or self._request(call.messages, call.stop, call.options)
            wanted = self._answerer(request.options).request(
                request.conversation,
                template_options=request.form.template_options,
                on_piece=on_piece,
                terms=None if rules is None else rules.terms,
                form=None if rules is None else self._form_for(rules, call),
            )
            made = wanted.then(lambda draft: self.draft_of(self.message_of(draft, request), call))
            return self.language_model.submit(made)

        return LocalWriting(submit)

    # Scores for other texts, tools, structures.

    def score(self, messages: LanguageModelInput, response: str | AIMessage) -> AIMessage:
        """An answer from anywhere (another server, a cache, an edit) with the verdict that this model gives it.

        Raises:
            EmptyResponseError: the answer holds no text.
            InputError: it holds tool calls, or is not a message.
        """
        if not isinstance(response, (str, AIMessage)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"score takes a string or an AIMessage, not a {type(response).__name__}")
        answer = convert.as_message(response)
        if answer.tool_calls:
            raise InputError("an answer with tool calls from elsewhere cannot be scored: their text is not known")
        conversation = convert.to_conversation(self._convert_input(messages).to_messages())
        reasoning = convert.reasoning(answer)
        evidence = self.language_model.evidence(conversation, convert.message_text(answer), reasoning=reasoning)
        verdict = self._assessed(evidence)
        answer = convert.with_answer(answer, verdict)
        metadata = {**answer.response_metadata, METADATA_KEY: verdict.metadata()}
        if self.logprobs:
            metadata["logprobs"] = openai_logprobs(self.language_model, self.estimator, evidence)
        return answer.model_copy(update={"response_metadata": metadata})

    def bind_tools(
        self,
        tools: Sequence[AnyTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Show the model tools, in its chat template's own form.

        Args:
            tools: functions, LangChain tools, pydantic classes, or OpenAI's or JSON schema's descriptions.
            tool_choice: "auto" (default), "any" (one must be called), a tool's name, or "none".
            strict: as in OpenAI's descriptions; forced calls follow their schema anyway.
            **kwargs: further options of every call.

        Raises:
            InputError: `tool_choice` names no tool at hand.
            UnsupportedToolsError: the model's chat template knows no tools, or writes calls in an unknown form; at the
                first answer, where its files are not on this disk yet.
        """
        options = {"tools": openai_tools(tools, strict=strict), "tool_choice": tool_choice}
        AnswerForm.of(options)
        if options["tools"]:  # an agent that owes a structure alone binds none
            declared = None if self._weights else template_calls_tools(self.model, self.revision, self.template_options)
            if self._weights or declared is False:
                _ = self.language_model.tool_format
        return self.bind(**{key: value for key, value in options.items() if value is not None}, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Method = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Objects instead of text, in the form of a pydantic class, a TypedDict or a JSON schema.

        Args:
            schema: the form.
            include_raw: return `{"raw", "parsed", "parsing_error"}`; the verdict is in `raw`.
            method: "json_schema" tells the model the schema and constrains its answer to it; "function_calling" makes
                the schema a tool that must be called; "json_mode" constrains to JSON of any form.
            strict: accepted as a standard parameter; answers always follow the schema.
            **kwargs: none are known.

        Raises:
            InputError: an unknown option or method. When called: LowConfidenceError for an answer that a router
                withheld, OutputParserException for one that `max_tokens` cut.
        """
        if kwargs:
            raise InputError(f"with_structured_output takes no {', '.join(sorted(kwargs))}")
        return structured(self, schema, method=method, include_raw=include_raw)

    # A model's description for LangChain.

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of a text, without any that its tokenizer adds of its own accord."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        encoding: Any = self.language_model.tokenizer(text, add_special_tokens=False)
        return list(encoding["input_ids"])

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[AnyTool] | None = None) -> int:
        """Tokens of the prompt that the model would read: its chat template around the messages, and the tools.

        Raises:
            InputError: a message that a text model cannot be shown.
        """
        conversation = convert.to_conversation(messages)
        return count_tokens(self.language_model, conversation, openai_tools(tools or ()))

    @property
    def _llm_type(self) -> str:
        return "semgrad-guard"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that moves an answer or its score: LangChain's cache key. Loads the weights, to name them.

        Decisions are not part of it: the cache holds drafts, and whichever router is attached judges them anew.
        """
        identity = identity_of(self.language_model)
        return {
            "model": self.model,
            "revision": identity.revision,
            "fingerprint": identity.fingerprint,
            "dtype": identity.dtype,
            "device_map": str(self.device_map),
            "quantization_config": str(self.quantization_config),
            "attn_implementation": self.attn_implementation,
            **{name: getattr(self, name) for name in DECODING - {"stop"}},
            "logprobs": self.logprobs,
            "default_stop": list(self.stop),
            "estimator": self.estimator.name,
            "estimator_settings": self.estimator.settings(),
            "by": self.by_sentence or "answer",
            "prompt_template": f"{self.prompt_template}@{identity.template}",
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or list(self.stop) or None, **kwargs)
        params["ls_provider"] = convert.PROVIDER
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        return profile_on_disk(self.model, self.revision, self.template_options)


# A model's profile, which LangChain and its agents read before they use it; and how many tokens messages take.


def profile_of(model: LanguageModel) -> ModelProfile:
    """The profile of a loaded model."""
    return _profile(model.context_window, calls_tools=model.knows_tools)


def profile_on_disk(name_or_path: str, revision: str | None, options: Mapping[str, Any] | None) -> ModelProfile | None:
    """The profile of a model that is not loaded; None where its files are not on this disk yet. Loads no weights."""
    config = read_json(name_or_path, "config.json", revision)
    if config is None:
        return None
    window = (config.get("text_config") or config).get("max_position_embeddings")
    return _profile(window, calls_tools=bool(template_calls_tools(name_or_path, revision, options)))


def _profile(window: int | None, *, calls_tools: bool) -> ModelProfile:
    found: ModelProfile = {**_TEXT_ONLY, "tool_calling": calls_tools, "tool_choice": calls_tools}
    return found if window is None else {**found, "max_input_tokens": window}


def count_tokens(model: LanguageModel, conversation: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
    """Tokens of the prompt for a conversation, the words of the chat template and the tools' descriptions included.

    LangChain trims a chat by counting parts of it, the last message first. Many chat templates refuse such parts (two
    turns of one role, an answer before any question) or leave their text out (a system prompt without a question).
    Then each message is counted by itself, with a template's words around each: never too few.
    """
    options = {"tools": list(tools)} if tools else {}
    whole = _rendered(model, conversation, options)
    if whole is not None:
        return whole
    described = model.count_tokens([Message("user", json.dumps(list(tools)))]) if tools else 0
    return described + sum(_alone(model, message) for message in conversation)


def _alone(model: LanguageModel, message: Message) -> int:
    """One message by itself; as a user's where the template does not show its role at the start of a conversation."""
    found = _rendered(model, [message], {})
    if found is not None:
        return found
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    text = "\n".join([message.content, *map(json.dumps, calls)])
    return model.count_tokens([Message("user", text)])


def _rendered(model: LanguageModel, conversation: Sequence[Message], options: dict[str, Any]) -> int | None:
    """Tokens of the prompt; None where the template refuses the conversation or leaves a message out."""
    try:
        found = model.count_tokens(conversation, **options)
    except InputError:
        return None
    texts: Any = [model.tokenizer(message.content, add_special_tokens=False) for message in conversation]
    return found if found >= sum(len(text["input_ids"]) for text in texts) else None

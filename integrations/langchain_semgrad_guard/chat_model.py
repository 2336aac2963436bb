"""`ChatSemGrad`: a local language model as a LangChain chat model, every answer with its score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable
from pydantic import BaseModel

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.answering import AnsweringChatModel
from langchain_semgrad_guard.batching import Request
from langchain_semgrad_guard.counting import count_tokens
from langchain_semgrad_guard.profile import profile_of, profile_on_disk
from langchain_semgrad_guard.structured_output import Method, structured
from langchain_semgrad_guard.tools import AnyTool, openai_tools
from semgrad_guard import (
    METADATA_KEY,
    LanguageModel,
)
from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.adapters.logprobs import openai_logprobs
from semgrad_guard.adapters.settings import loaded_weights, require_loaded
from semgrad_guard.errors import InputError
from semgrad_guard.guard import template_name
from semgrad_guard.named import reading_prompt


class ChatSemGrad(AnsweringChatModel):
    """A Hugging Face causal LM, run here, whose answers carry an uncertainty.

        chat = ChatSemGrad(model="pocket")
        chat.invoke("What is the capital of France?").response_metadata["semgrad_guard"]["uncertainty"]

    Alone it scores and delivers every answer. With an `UncertaintyRouterCallback` attached (in `callbacks=`, in a
    config, or by `with_config`) it delivers what the router lets through. Weights load at the first answer; copies and
    equal instances share them. Batches run as one generation and one backward pass.
    """

    @classmethod
    def from_model(cls, language_model: LanguageModel, /, **fields: Any) -> Self:
        """A chat model for weights that are loaded already; `fields` are the constructor's, but those for loading.

        Raises:
            InputError: a field that only loading could honour.
        """
        require_loaded(fields)
        chat = cls(model=language_model.name, revision=language_model.revision, **fields)
        chat._weights = loaded_weights(chat, language_model)
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

    @property
    def reading_prompt(self) -> str:
        """A prompt for answering from a passage that this model reads well, with {context} and {question} in it."""
        return reading_prompt(self.model)

    def score(self, messages: LanguageModelInput, response: str | AIMessage) -> AIMessage:
        """An answer from anywhere (another server, a cache, an edit) with the verdict that this model gives it.

        Raises:
            EmptyResponseError: the answer holds no text.
            InputError: it holds tool calls, or is no message.
        """
        if not isinstance(response, (str, AIMessage)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"score takes a string or an AIMessage, not a {type(response).__name__}")
        answer = convert.as_message(response)
        if answer.tool_calls:
            raise InputError("an answer with tool calls from elsewhere cannot be scored: their text is not known")
        conversation = convert.to_conversation(self._convert_input(messages).to_messages())
        evidence = self.language_model.evidence(conversation, convert.message_text(answer))
        request = Request(conversation, self._options(None, {}), AnswerForm())
        verdict = self._verdict(evidence, convert.message_text(answer), request)
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
            UnsupportedToolsError: at the first answer, where the model's chat template knows no tools.
        """
        options = {"tools": openai_tools(tools, strict=strict), "tool_choice": tool_choice}
        AnswerForm.of(options)
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
            include_raw: return `{"raw", "parsed", "parsing_error"}`; the verdict stands in `raw`.
            method: "json_schema" tells the model the schema and constrains its answer to it; "function_calling" makes
                the schema a tool that must be called; "json_mode" constrains to JSON of any form.
            strict: accepted as a standard parameter; answers always follow the schema.
            **kwargs: none are known.

        Raises:
            InputError: an unknown option or method. When asked: LowConfidenceError for an answer that a router
                withheld, OutputParserException for one that `max_tokens` cut.
        """
        if kwargs:
            raise InputError(f"with_structured_output takes no {', '.join(sorted(kwargs))}")
        return structured(self, schema, method=method, include_raw=include_raw)

    # What LangChain asks about a model.

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
        identity = self.language_model.identity
        return {
            "model": self.model,
            "revision": identity.revision,
            "fingerprint": identity.fingerprint,
            "dtype": identity.dtype,
            "device_map": str(self.device_map),
            "quantization_config": str(self.quantization_config),
            "attn_implementation": self.attn_implementation,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "logprobs": self.logprobs,
            "default_stop": self.stop,
            "estimator": self.estimator.name,
            "estimator_settings": self.estimator.settings(),
            "prompt_template": template_name(self.language_model, self.prompt_template),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = convert.PROVIDER
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        return profile_on_disk(self.model, self.revision, self.template_options)

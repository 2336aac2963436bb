"""`ChatSemGrad`: a local language model as a LangChain chat model, every answer with its score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable
from pydantic import BaseModel, Field, SecretStr

from langchain_semgrad_guard import messages as convert
from langchain_semgrad_guard.deciding import Call, Deciding
from langchain_semgrad_guard.messages import AnyTool, Method, openai_tools, structured
from semgrad_guard import METADATA_KEY, Estimator, Generation, LanguageModel, Message
from semgrad_guard.adapters.calls import FORM_OPTIONS, AnswerForm, openai_logprobs
from semgrad_guard.adapters.model_fields import DECODING, LocalModelFields, read_json, template_calls_tools
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Draft, Piece, StreamSteps

_CALL_OPTIONS = FORM_OPTIONS | {"logprobs", "top_logprobs"}
"""Options of a call other than those for generating its answer."""


class ChatSemGrad(LocalModelFields, Deciding):
    """A Hugging Face causal LM, run here, whose answers carry an uncertainty.

        chat = ChatSemGrad(model="pocket")
        chat.invoke("What is the capital of France?").response_metadata["semgrad_guard"]["uncertainty"]

    Alone it scores and delivers every answer. With a router (`ChatSemGrad(..., router=router)`, or one in a run's
    config) it delivers what that lets through; without an `estimator` of its own it scores as the router's calibration
    did. Weights load at the first answer; copies and equal instances share them. Calls that are under way at the same
    time, in threads, tasks or a batch, share the model's steps.
    """

    logprobs: bool = False
    """Put the tokens' log-probabilities into the metadata, in OpenAI's shape; a call may set it too."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """With `logprobs`: how many of the likeliest tokens at each place to add; a call may set it too."""
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
            chat.profile = _profile(language_model.context_window, calls_tools=language_model.knows_tools)
        return chat

    # How it answers.

    def _live(self, call: Call) -> StreamSteps[Piece, Draft[AIMessage]]:
        form, writing = AnswerForm.of(call.options), self._writing(call.options, also=_CALL_OPTIONS)
        conversation = form.instructed(convert.to_conversation(call.messages))

        def drafted(draft: Draft[Generation], estimator: Estimator) -> Draft[AIMessage]:
            generation, verdict = draft.answer, draft.verdict
            answer = form.taken_apart(self.language_model, generation)
            metadata = {
                "model_name": verdict.details.model,
                "model_provider": convert.PROVIDER,
                "finish_reason": "tool_calls" if answer.calls else generation.finish_reason,
                METADATA_KEY: verdict.metadata(),
                **self._logprobs(generation.evidence, estimator, call.options),
            }
            record: dict[str, Any] = {"usage_metadata": convert.usage(generation), "response_metadata": metadata}
            fields = {**convert.reasoning_fields(verdict), **convert.call_fields(answer.calls, answer.broken)}
            return call.draft(verdict, AIMessage(content=answer.text, **fields, **record), draft.prompt)

        how: dict[str, Any] = {"terms": call.terms, "policy": call.policy, "is_live": call.is_live}
        return self._answering(lambda: conversation, form, writing, drafted, **how)

    def _logprobs(self, evidence: Any, estimator: Estimator, options: Mapping[str, Any]) -> dict[str, Any]:
        if not options.get("logprobs", self.logprobs):
            return {}
        top = options.get("top_logprobs", self.top_logprobs) or 0
        return {"logprobs": openai_logprobs(self.language_model, estimator, evidence, top=top)}

    # Scores for other texts, tools, structures.

    def score(self, messages: LanguageModelInput, response: str | AIMessage) -> AIMessage:
        """An answer from anywhere (another server, a cache, an edit) with the verdict that this model gives it.

        Raises:
            EmptyResponseError: the answer holds no text.
            InputError: it holds tool calls, or is not a message.
        """
        answer = convert.as_message(response)
        if answer.tool_calls:
            raise InputError("an answer with tool calls from elsewhere cannot be scored: their text is not known")
        conversation = convert.to_conversation(self._convert_input(messages).to_messages())
        reasoning = convert.reasoning(answer)
        evidence = self.language_model.evidence(conversation, convert.message_text(answer), reasoning=reasoning)
        verdict = self._assessed(evidence, self.router.policy if self.router else None)
        answer = convert.with_answer(answer, verdict)
        changes = {METADATA_KEY: verdict.metadata(), **self._logprobs(evidence, self.estimator, {})}
        return answer.model_copy(update={"response_metadata": {**answer.response_metadata, **changes}})

    def bind_tools(
        self,
        tools: Sequence[AnyTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Show the model tools, in its chat template's own form; a template that knows none is an error of the call.

        Args:
            tools: functions, LangChain tools, pydantic classes, or OpenAI's or JSON schema's descriptions.
            tool_choice: "auto" (default), "any" (one must be called), a tool's name, or "none".
            strict: as in OpenAI's descriptions; forced calls follow their schema anyway.
            **kwargs: further options of every call.

        Raises:
            InputError: `tool_choice` names no tool at hand.
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
            include_raw: return `{"raw", "parsed", "parsing_error"}`; the verdict is in `raw`.
            method: "json_schema" tells the model the schema and constrains its answer to it; "function_calling" makes
                the schema a tool that must be called; "json_mode" constrains to JSON of any form.
            strict: accepted as a standard parameter; answers always follow the schema.
            **kwargs: none are known.

        Raises:
            InputError: an unknown option or method. When called: LowConfidenceError for an answer that a router
                withholds, OutputParserException for one that `max_tokens` cut.
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

        LangChain trims a chat by counting parts of it, the last message first. Many chat templates refuse such parts
        (two turns of one role, an answer before any question) or leave their text out (a system prompt without a
        question). Then each message is counted as a user's turn of its own: never too few.

        Raises:
            InputError: a message that a text model cannot be shown.
        """
        model, conversation, described = (
            self.language_model,
            convert.to_conversation(messages),
            openai_tools(tools or ()),
        )
        try:
            whole = model.count_tokens(conversation, **({"tools": described} if described else {}))
        except InputError:
            whole = -1
        if whole >= sum(len(self.get_token_ids(message.content)) for message in conversation):
            return whole
        texts = [json.dumps(tool) for tool in described]
        for message in conversation:
            calls = [json.dumps({"name": one.name, "arguments": dict(one.arguments)}) for one in message.tool_calls]
            texts.append("\n".join([message.content, *calls]))
        return sum(model.count_tokens([Message("user", text)]) for text in texts)

    @property
    def _llm_type(self) -> str:
        return "semgrad-guard"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """The model, its decoding and the estimator, by name: no weights are loaded for it."""
        return {
            "model": self.model,
            "revision": self.revision,
            **{name: getattr(self, name) for name in sorted(DECODING)},
            "estimator": self.estimator.name,
            "by": self.by_sentence or "answer",
            **super()._identifying_params,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or list(self.stop) or None, **kwargs)
        params["ls_provider"] = convert.PROVIDER
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        """That of a model that is not loaded; None where its files are not on this disk yet."""
        config = read_json(self.model, "config.json", self.revision)
        if config is None:
            return None
        window = (config.get("text_config") or config).get("max_position_embeddings")
        knows_tools = template_calls_tools(self.model, self.revision, self.template_options)
        return _profile(window, calls_tools=bool(knows_tools))


_ABILITIES = dict.fromkeys(["text_inputs", "text_outputs", "structured_output", "temperature", "open_weights"], True)


def _profile(window: int | None, *, calls_tools: bool) -> ModelProfile:
    found = {**_ABILITIES, "tool_calling": calls_tools, "tool_choice": calls_tools}
    return cast("ModelProfile", found if window is None else {**found, "max_input_tokens": window})

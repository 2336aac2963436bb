"""Tools in LlamaIndex's form: shown to a model, and its calls of them in the messages of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool

from semgrad_guard import Generation, GenerationOptions, LanguageModel, ToolCall
from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.errors import InputError


@dataclass(frozen=True)
class CallOptions:
    """How one answer is written, and its form."""

    writing: GenerationOptions
    form: AnswerForm = field(default_factory=AnswerForm)

    def writing_by(self, model: LanguageModel) -> GenerationOptions:
        """The options of writing, for this model's form of calls.

        Raises:
            UnsupportedToolsError: there are tools, and the model's chat template has none.
        """
        return replace(self.writing, grammar=self.form.grammar(model))

    def calls(self, model: LanguageModel, generation: Generation) -> tuple[ToolCall, ...]:
        """The calls in an answer."""
        return self.form.taken_apart(model, generation).calls

    def readable(self, model: LanguageModel, generation: Generation) -> Generation:
        """The answer without the calls in it as its text; a call that cannot be read stays as the model wrote it."""
        found = self.form.taken_apart(model, generation)
        if not found.calls and not found.broken:
            return generation
        return replace(generation, text="\n".join(filter(None, (found.text, *found.broken))))


class ToolCallingLLM(FunctionCallingLLM):
    """An LLM whose `chat` methods take tools as OpenAI describes them, and return calls as blocks of the message."""

    def _prepare_chat_with_tools(  # noqa: PLR0917 - LlamaIndex's signature
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required else "auto")
        question = ChatMessage(content=user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or []), *([] if question is None else [question])]
        described = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        return {"messages": messages, **({"tools": described, "tool_choice": choice} if tools else {}), **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """The response, with its first call alone where no other was to be made."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if len(calls) > 1 and not allow_parallel_tool_calls:
            others = calls[1:]
            response.message.blocks = [block for block in response.message.blocks if block not in others]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in a response.

        Raises:
            InputError: there are none, and one is due.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise InputError("the model's answer calls no tool; use tool_required=True, or error_on_no_tool_call=False")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, Mapping) else {},
            )
            for call in calls
        ]

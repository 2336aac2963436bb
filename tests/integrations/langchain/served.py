"""Chat models behind a server: they know nothing of scores, and send their text letter by letter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_semgrad_guard import ChatSemGrad


class ServedModel(BaseChatModel):
    """Answers with `message`, `n` times; subclasses make another one (`_answer`), or no stream (`streaming`)."""

    message: AIMessage = AIMessage("Vienna")
    streaming: bool = True

    @property
    def _llm_type(self) -> str:
        return "served"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _answer(self, messages: list[BaseMessage], **options: Any) -> AIMessage:
        return self.message

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        message = self._answer(messages, stop=stop, **kwargs)
        copies = [message.model_copy() for _ in range(kwargs.get("n", 1))]  # LangChain gives each an id
        return ChatResult(generations=[ChatGeneration(message=copy) for copy in copies])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        message = self._answer(messages, stop=stop, **kwargs)
        content = message.content
        pieces: list[Any] = list(content) if isinstance(content, str) else [content]
        others = message.model_dump(exclude={"type", "content"})  # with the first piece, as servers send reasoning
        for number, piece in enumerate(pieces or [""]):
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece, **({} if number else others)))
            if run_manager:
                run_manager.on_llm_new_token(str(piece), chunk=chunk)
            yield chunk


class Served(ServedModel):
    """The same weights behind a server."""

    weights: Any
    silent: bool = False

    def _answer(self, messages: list[BaseMessage], **options: Any) -> AIMessage:
        chat = ChatSemGrad.from_model(self.weights, max_tokens=12)
        text = "" if self.silent else chat.invoke(messages, {"callbacks": []}).text
        return AIMessage(text, response_metadata={"served_by": "a server"})

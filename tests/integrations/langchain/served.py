"""A chat model that knows nothing of scores, around the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_semgrad_guard import ChatSemGrad


class Served(BaseChatModel):
    """The same weights behind something that tells no scores, and sends tokens while it generates."""

    weights: Any
    streaming: bool = True
    silent: bool = False

    @property
    def _llm_type(self) -> str:
        return "served"

    def _text(self, messages: list[BaseMessage]) -> str:
        if self.silent:
            return ""
        return ChatSemGrad.from_model(self.weights, max_tokens=12).invoke(messages, {"callbacks": []}).text

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        message = AIMessage(content=self._text(messages), response_metadata={"served_by": "a server"})
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for letter in self._text(messages):
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=letter))
            if run_manager:
                run_manager.on_llm_new_token(letter, chunk=chunk)
            yield chunk

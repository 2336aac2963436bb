"""Agents for the tests: a scored model that calls tools, tools that tell when they ran, and every way to run them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool, tool
from pydantic import Field

from langchain_semgrad_guard import ChatSemGrad

from .support import QUESTION, collect


class ToolCaller(BaseChatModel):
    """Calls the tools it is given, then answers. Text and record are the scored model's own; the calls are added."""

    scored: ChatSemGrad
    requests: list[list[BaseMessage]] = Field(default_factory=list)
    ignores: tuple[str, ...] = ()

    @property
    def _llm_type(self) -> str:
        return "tool-caller"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=[tool.name if isinstance(tool, BaseTool) else tool["title"] for tool in tools])

    def _answer(self, messages: list[BaseMessage], tools: Sequence[str]) -> AIMessage:
        self.requests.append(messages)
        (question,) = [message.text for message in messages if isinstance(message, HumanMessage)][-1:]
        answer = self.scored.invoke([HumanMessage(question)], {"callbacks": []})
        done = isinstance(messages[-1], ToolMessage)
        tools = [name for name in tools if name not in self.ignores]
        calls = [] if done else [tool_call(name=name, args={"word": "x"}, id=f"call-{name}") for name in tools]
        return answer.model_copy(update={"tool_calls": calls, "id": None})

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._answer(messages, kwargs.get("tools", ())))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        answer = self._answer(messages, kwargs.get("tools", ()))
        for letter in answer.text:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=letter))
            if run_manager:
                run_manager.on_llm_new_token(letter, chunk=chunk)
            yield chunk
        record = {name: getattr(answer, name) for name in ("response_metadata", "usage_metadata", "tool_calls")}
        yield ChatGenerationChunk(message=AIMessageChunk(content="", chunk_position="last", **record))


def counting_tool(name: str, runs: list[str]) -> BaseTool:
    """A tool that writes down its name when it runs."""

    @tool(name)
    def run(word: str) -> str:
        """Say a word."""
        runs.append(name)
        return f"said {word}"

    return run


Run = Callable[[Any, Any, dict[str, Any] | None], dict[str, Any]]

RUNS: dict[str, Run] = {
    "invoke": lambda agent, given, config: agent.invoke(given, config),
    "ainvoke": lambda agent, given, config: asyncio.run(agent.ainvoke(given, config)),
}
"""The two ways to run an agent to its end."""

ASKED = {"messages": [("human", QUESTION)]}
"""An agent's input."""


STREAM_MODES = ["messages", "updates", "values", "custom", "debug", "tasks", "checkpoints"]
"""All modes of a graph's stream, to be read together."""


def streamed(
    agent: Any, given: Any, config: dict[str, Any] | None = None, *, sync: bool, mode: Any = "messages"
) -> Any:
    """All that an agent's stream shows."""
    if sync:
        return list(agent.stream(given, config, stream_mode=mode))
    return collect(agent.astream(given, config, stream_mode=mode))


def spoken(pieces: Any) -> str:
    """The text of a message stream, as a user sees it."""
    return "".join(message.text for message, _ in pieces if message.type.startswith("AI") or message.type == "ai")

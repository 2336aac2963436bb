"""A served chat model that reports log-probabilities: drafts without a model, whose doubtful words are known."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from langchain_semgrad_guard import UncertaintyRouterCallback
from semgrad_guard import Policy

CANARY = "Vienna"
"""The doubtful word: a draft that holds it is not let through."""
SURE, THRESHOLD = "Ulan Bator", 0.3
"""An answer without doubt, and a threshold between the two."""

WITHHELD = "WITHHELD"
"""The abstain message of these routers."""


def router(escalate_to: Any = None, **options: Any) -> UncertaintyRouterCallback:
    """Rules that let through what holds no doubtful word."""
    return UncertaintyRouterCallback(Policy(threshold=THRESHOLD), escalate_to, abstain_message=WITHHELD, **options)


Script = str | AIMessage | Callable[[list[BaseMessage]], str | AIMessage]


def entries(text: str) -> list[dict[str, Any]]:
    """The log-probabilities of a text's words, in OpenAI's form."""
    found = list[dict[str, Any]]()
    for token in re.findall(r"\s*\S+|\s+", text):
        one = {"token": token, "bytes": list(token.encode()), "logprob": -4.0 if CANARY in token else -0.01}
        others = [{"token": f"other{number}", "bytes": None, "logprob": -9.0} for number in range(4)]
        found.append({**one, "top_logprobs": [one, *others]})
    return found


class Scripted(BaseChatModel):
    """Answers as scripted, by what it is asked; with log-probabilities where `logprobs` is set."""

    model_name: str = "scripted"
    logprobs: bool | None = True
    script: Any = Field(default=f"It is {CANARY}", repr=False)
    fails: bool = False
    """Whether it dies behind its first words, with an error that holds them."""
    delay: float = 0.0
    """Seconds between two words of a stream."""
    requests: list[tuple[list[str], dict[str, Any]]] = Field(default_factory=list, repr=False)
    sent: list[str] = Field(default_factory=list, repr=False)
    """The words that left it, and "closed" where its stream ended."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _answer(self, messages: list[BaseMessage], options: dict[str, Any]) -> AIMessage:
        self.requests.append(([str(message.text) for message in messages], options))
        made = self.script(messages) if callable(self.script) else self.script
        message = AIMessage(made) if isinstance(made, str) else made.model_copy()
        if self.fails:
            raise ConnectionError(f"the server died after: {message.text}")
        record: dict[str, Any] = {"finish_reason": "stop", "model_name": self.model_name}
        if self.logprobs:
            record["logprobs"] = {"content": entries(str(message.text))}
        used = message.usage_metadata or {"input_tokens": 3, "output_tokens": 5, "total_tokens": 8}
        changes = {"response_metadata": {**record, **message.response_metadata}, "usage_metadata": used}
        return message.model_copy(update=changes)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        message = self._answer(messages, kwargs)
        return ChatResult(generations=[ChatGeneration(message=message)], llm_output={"model_name": self.model_name})

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        whole = self._answer(messages, kwargs)
        rest = whole.model_dump(include={"tool_calls", "usage_metadata"})
        info = {name: held for name, held in whole.response_metadata.items() if name != "logprobs"}
        try:
            if whole.additional_kwargs or not isinstance(whole.content, str):  # servers send reasoning first
                first = whole.content if isinstance(whole.content, list) else ""
                yield ChatGenerationChunk(
                    message=AIMessageChunk(content=first, additional_kwargs=whole.additional_kwargs)
                )
            for entry in [] if isinstance(whole.content, list) else entries(str(whole.text)):
                time.sleep(self.delay)
                reported = {"logprobs": {"content": [entry]}} if self.logprobs else {}
                self.sent.append(entry["token"])
                message = AIMessageChunk(content=entry["token"], response_metadata=reported)
                yield ChatGenerationChunk(message=message)
            yield ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=info, **rest))
        finally:
            self.sent.append("closed")

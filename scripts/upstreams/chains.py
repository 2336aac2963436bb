"""What guards around LangChain's own model deliver, as JSON: `python chains.py URL MODEL OUTPUT`."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_openai import ChatOpenAI

from langchain_semgrad_guard import GuardedChatModel, UncertaintyRouterCallback, get_verdict
from semgrad_guard import Policy

QUESTION = "What is the capital of France? Answer in one sentence."


def model_of(url: str, name: str) -> BaseChatModel:
    """LangChain's model for a server with OpenAI's protocol."""
    return ChatOpenAI(
        base_url=url, model=name, temperature=0, max_tokens=24, logprobs=True, top_logprobs=5, api_key="none"
    )  # type: ignore[call-arg]


async def found(model: BaseChatModel) -> dict[str, Any]:
    """The model's own answer, and on every path what a guard lets through and what it withholds."""
    routers = (UncertaintyRouterCallback(Policy(threshold=threshold)) for threshold in (1e9, -1.0))
    through, held = (GuardedChatModel(model, router) for router in routers)
    annotating = UncertaintyRouterCallback(Policy(threshold=1e9), mode="annotate")
    chunks = list(GuardedChatModel(model, annotating).stream(QUESTION))
    return {
        "own": model.invoke(QUESTION).text,
        "through": [record_of(message) for message in await every_path(through)],
        "held": [record_of(message) for message in await every_path(held)],
        "live": [record_of(reduce(add, chunks)), sum(bool(chunk.text) for chunk in chunks)],
    }


async def every_path(guard: GuardedChatModel) -> list[BaseMessage]:
    whole = [guard.invoke(QUESTION), await guard.ainvoke(QUESTION)]
    return [
        *whole,
        reduce(add, guard.stream(QUESTION)),
        reduce(add, [chunk async for chunk in guard.astream(QUESTION)]),
    ]


def record_of(message: BaseMessage) -> dict[str, Any]:
    """The text, the decision, and everything else that the message shows."""
    verdict = get_verdict(message)
    assert verdict is not None
    numbers = [verdict.uncertainty, verdict.gnll]
    facts = {"status": verdict.status, "action": verdict.action, "reason": verdict.reason, "numbers": numbers}
    return {"text": message.text, **facts, "shown": str(message.model_dump())}


if __name__ == "__main__":
    url, name, output = sys.argv[1:]
    Path(output).write_text(json.dumps(asyncio.run(found(model_of(url, name)))))

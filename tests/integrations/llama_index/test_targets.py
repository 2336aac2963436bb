"""Escalation targets: their own counts of tokens, as LlamaIndex's integrations keep them."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from pydantic import BaseModel

from semgrad_guard import LanguageModel

from .scripted import CANARY, scripted, verdict_of

OPENAI = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
ANTHROPIC = {"input_tokens": 7, "output_tokens": 3}


class Usage(BaseModel):
    """A provider's own class."""

    prompt_tokens: int = 7
    completion_tokens: int = 3


class Sent(BaseModel):
    """A provider's response, as its client parses it."""

    usage: Usage | None = None


@pytest.mark.parametrize("asks", ["complete", "chat"])
@pytest.mark.parametrize(
    ("kept", "counted"),
    [
        ({"raw": {"usage": OPENAI}}, True),
        ({"raw": {"usage": ANTHROPIC}}, True),
        ({"raw": Sent(usage=Usage())}, True),
        ({"raw": Sent(), "additional_kwargs": OPENAI}, True),
        ({"additional_kwargs": OPENAI}, True),
        ({"raw": {"usage": None}}, False),
        ({"raw": {"usage": {"prompt_tokens": None, "completion_tokens": "3"}}}, False),
        ({}, False),
    ],
)
def test_a_targets_own_count_of_tokens_is_kept(
    wide: LanguageModel, kept: dict[str, Any], counted: bool, asks: str
) -> None:
    answers = {
        "complete": CompletionResponse(text="larger", **kept),
        "chat": ChatResponse(message=ChatMessage(role="assistant", content="larger"), **kept),
    }
    llm = scripted(wide, lambda _: (CANARY, 0.9), escalate_to=lambda _: answers[asks])
    response = llm.complete("q") if asks == "complete" else llm.chat([ChatMessage("q")])
    verdict = verdict_of(response)
    assert verdict.text == "larger"
    details = verdict.details
    assert (details.prompt_tokens, details.answer_tokens) == ((7, 3) if counted else (None, None))

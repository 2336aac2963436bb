"""Sentences that a router leaves out: in no message, chunk, event, trace or cache; and the record of the rest."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.output_parsers import StrOutputParser

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.settings import CLOSING_LINE
from tests.fixed_model import TEXT, FixedModel

from .support import Ledger


@pytest.fixture(scope="module")
def fixed(language_model: LanguageModel) -> LanguageModel:
    return FixedModel.like(language_model)


def routed(fixed: LanguageModel, on_doubt: Any) -> tuple[ChatSemGrad, UncertaintyRouterCallback, list[str]]:
    """A router that lets the surest sentence through; with the pieces of the text."""
    chat = ChatSemGrad.from_model(fixed, by="sentence", on_doubt=on_doubt)
    verdict = get_verdict(chat.invoke("q"))
    assert verdict is not None
    pieces = [verdict.text[sentence.start : sentence.end] for sentence in verdict.sentences]
    assert "".join(pieces) == TEXT
    threshold = 1.001 * min(s.uncertainty for s in verdict.sentences if s.uncertainty is not None)
    return chat, UncertaintyRouterCallback(Policy(threshold=threshold)), pieces


def test_a_part_is_delivered_everywhere(fixed: LanguageModel) -> None:
    chat, router, pieces = routed(fixed, "drop")
    ledger = Ledger()
    message = chat.invoke("q", config={"callbacks": [router, ledger]})
    verdict = get_verdict(message)
    assert verdict is not None
    delivered = str(message.content)
    [kept] = [piece for piece in pieces if piece == delivered]
    assert [s.action for s in verdict.sentences] == ["deliver" if p == kept else "drop" for p in pieces]
    chunks = list(chat.stream("q", config={"callbacks": [router]}))
    assert "".join(str(chunk.content) for chunk in chunks) == delivered
    assert (chat | StrOutputParser()).invoke("q", config={"callbacks": [router]}) == delivered
    everywhere = repr([message, chunks, [run.outputs for run in ledger.runs]])
    assert not [piece for piece in pieces if piece != kept and piece.strip() in everywhere]


async def test_a_part_of_a_cached_draft(fixed: LanguageModel) -> None:
    _, router, pieces = routed(fixed, "stop")
    chat = ChatSemGrad.from_model(fixed, by="sentence", cache=InMemoryCache())
    for _ in range(2):
        message = await chat.ainvoke("q", config={"callbacks": [router]})
        verdict = get_verdict(message)
        assert verdict is not None
        first = verdict.sentences[0].action == "deliver"
        assert message.content == (f"{pieces[0]}{CLOSING_LINE}" if first else "I don't know.")

"""Every door writes each of its decisions to the same log, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback
from langchain_semgrad_guard import guarded as chain_of_questions
from llama_index_semgrad_guard import SemGradLLM
from llama_index_semgrad_guard import UncertaintyRouterCallback as LlamaIndexRouter
from llama_index_semgrad_guard import guarded as guarded_engine
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.decision_log.entries import DecisionSink

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog

NONE = Policy(threshold=-1.0, on_cut="score")


def chat(model: LanguageModel, log: DecisionSink) -> ChatSemGrad:
    return ChatSemGrad.from_model(model, max_tokens=4, router=UncertaintyRouterCallback(NONE, log=log))


def routed(model: LanguageModel, log: DecisionSink) -> Any:
    router = UncertaintyRouterCallback(NONE, log=log)
    return ChatSemGrad.from_model(model, max_tokens=4).invoke("question", {"callbacks": [router]}).response_metadata


def guarded_chain(model: LanguageModel, log: DecisionSink) -> Any:
    own = chat(model, log)
    return chain_of_questions(own | (lambda message: message.text) | own, own.router)


def llm(model: LanguageModel, log: DecisionSink) -> SemGradLLM:
    return SemGradLLM.from_model(model, max_tokens=4, router=LlamaIndexRouter(NONE, log=log))


def guarded(model: LanguageModel, log: DecisionSink, make: str) -> Any:
    own = llm(model, log)
    engine: Any = getattr(SummaryIndex.from_documents([Document(text="a")]), make)
    return guarded_engine(engine(llm=own, **({"chat_mode": "simple"} if "chat" in make else {})), own.router)


DOORS: dict[str, Callable[[LanguageModel, DecisionSink], Any]] = {
    "field": lambda model, log: chat(model, log).invoke("question").response_metadata,
    "stream": lambda model, log: list(chat(model, log).stream("question"))[-1].response_metadata,
    "config": routed,
    "guarded chain": lambda model, log: guarded_chain(model, log).invoke("question").response_metadata,
    "llm": lambda model, log: llm(model, log).complete("question").raw,
    "engine": lambda model, log: guarded(model, log, "as_query_engine").query("question").metadata,
    "chat engine": lambda model, log: guarded(model, log, "as_chat_engine").chat("question").metadata,
}
"""Ask a question, and return the metadata of the answer."""


@pytest.mark.parametrize("door", DOORS)
def test_a_door_writes_its_decisions_down(
    door: str, tmp_path: Path, make_language_model: Callable[..., LanguageModel]
) -> None:
    model = make_language_model(max_position_embeddings=2048)
    with DecisionLog(tmp_path / "log.db") as log:
        metadata = DOORS[door](model, log)
        assert log.flush()
        ((decision, _),) = log.database.decisions()
    assert decision.id == metadata["semgrad_guard"]["decision_id"]
    assert (decision.action, decision.model) == ("abstain", "random-llama")

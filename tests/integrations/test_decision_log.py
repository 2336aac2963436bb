"""Every door writes each of its decisions to the same log, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex

from langchain_semgrad_guard import (
    ChatSemGrad,
    UncertaintyRouterCallback,
    get_verdict,
)
from llama_index_semgrad_guard import SemGradLLM
from llama_index_semgrad_guard import UncertaintyRouterCallback as LlamaIndexRouter
from llama_index_semgrad_guard import guarded as guarded_engine
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.guard import DecisionSink

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog

NONE = Policy(threshold=-1.0, on_cut="score")
Ask = Callable[[LanguageModel, DecisionSink], Any]


def chat(model: LanguageModel) -> ChatSemGrad:
    return ChatSemGrad.from_model(model, max_tokens=4)


def with_field(model: LanguageModel, log: DecisionSink) -> ChatSemGrad:
    return chat(model).model_copy(update={"router": UncertaintyRouterCallback(NONE, log=log)})


def guarded(model: LanguageModel, log: DecisionSink) -> Any:
    return get_verdict(with_field(model, log).invoke("question")).decision_id


def streamed(model: LanguageModel, log: DecisionSink) -> Any:
    *_, last = with_field(model, log).stream("question")
    return last.response_metadata["semgrad_guard"]["decision_id"]


def routed(model: LanguageModel, log: DecisionSink) -> Any:
    router = UncertaintyRouterCallback(NONE, log=log)
    return get_verdict(chat(model).invoke("question", config={"callbacks": [router]})).decision_id


def answered(model: LanguageModel, log: DecisionSink) -> Any:
    llm = SemGradLLM.from_model(model, max_tokens=4, router=LlamaIndexRouter(NONE, log=log))
    response: Any = llm.complete("question")
    return response.raw["semgrad_guard"]["decision_id"]


def index(model: LanguageModel, log: DecisionSink) -> Any:
    router = LlamaIndexRouter(NONE, log=log)
    llm = SemGradLLM.from_model(model, max_tokens=4, router=router)
    return SummaryIndex.from_documents([Document(text="a")]), llm, router


def queried(model: LanguageModel, log: DecisionSink) -> Any:
    documents, llm, router = index(model, log)
    engine = guarded_engine(documents.as_query_engine(llm=llm), router)
    return engine.query("question").metadata["semgrad_guard"]["decision_id"]


def chatted(model: LanguageModel, log: DecisionSink) -> Any:
    documents, llm, router = index(model, log)
    engine = guarded_engine(documents.as_chat_engine(chat_mode="simple", llm=llm), router)
    return engine.chat("question").metadata["semgrad_guard"]["decision_id"]


@pytest.mark.parametrize("ask", [guarded, streamed, routed, answered, queried, chatted])
def test_a_door_writes_its_decisions_down(
    ask: Ask, tmp_path: Path, make_language_model: Callable[..., LanguageModel]
) -> None:
    model = make_language_model(max_position_embeddings=2048)
    with DecisionLog(tmp_path / "log.db") as log:
        decision_id = ask(model, log)
        assert log.flush()
        ((decision, _),) = log.database.decisions()
    assert decision.id == decision_id
    assert (decision.action, decision.model) == ("abstain", "random-llama")

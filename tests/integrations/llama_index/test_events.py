"""Verdicts in LlamaIndex's instrumentation: one event each, a log line each, and scoring as a span of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine, SemGradLLM, UncertaintyEventHandler
from semgrad_guard import Policy

from .conftest import Heard

PASS, STOP = Policy(threshold=1e308), Policy(threshold=-1e308)
QUERY = "Where is Paris?"
Maker = Callable[..., BaseQueryEngine]


def test_one_event_a_verdict(make_engine: Maker, llm: SemGradLLM, recorder: Heard) -> None:
    GuardedQueryEngine(make_engine(response_mode="refine"), STOP, escalate_to=lambda _: "elsewhere").query(QUERY)
    GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), STOP, keep_draft=True).chat(QUERY)
    answer = llm.complete(QUERY)
    found = [(event.source, event.record["action"]) for event in recorder.verdicts]
    assert found == [("query_engine", "escalate"), ("chat_engine", "abstain"), ("llm", "answer")]
    query, chat, alone = [event.record for event in recorder.verdicts]
    assert query["escalated"]["model"] == "external"
    assert query["draft"] is None
    assert chat["draft"]
    assert alone == answer.raw["semgrad_guard"]
    assert recorder.verdicts[0].model_dump()["class_name"] == "UncertaintyEvent"


def test_the_handler_logs_each_verdict(make_engine: Maker, llm: SemGradLLM, caplog: pytest.LogCaptureFixture) -> None:
    root, handler = get_dispatcher(), UncertaintyEventHandler()
    root.add_event_handler(handler)
    try:
        with caplog.at_level(logging.INFO, logger="semgrad_guard"):
            for mode in ("enforce", "annotate"):
                GuardedQueryEngine(make_engine(), STOP, mode=mode).query(QUERY)  # type: ignore[arg-type]
            GuardedQueryEngine(make_engine(), PASS).query(QUERY)
    finally:
        root.event_handlers.remove(handler)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    first, second, third = [record.getMessage() for record in caplog.records]
    assert first.startswith("query_engine: abstain; uncertainty ")
    assert "above the threshold" in first
    assert second.startswith("query_engine: abstain (not enforced); ")
    assert third.startswith("query_engine: answer; ")
    record: Any = caplog.records[0]
    assert record.semgrad_guard["action"] == "abstain"


def test_scoring_is_a_span_of_its_own_within_the_query(make_engine: Maker) -> None:
    root, spans = get_dispatcher(), SimpleSpanHandler()
    root.add_span_handler(spans)
    try:
        GuardedQueryEngine(make_engine(), PASS).query(QUERY)
    finally:
        root.span_handlers.remove(spans)
    scoring = [span for span in spans.completed_spans if span.id_.startswith("ModelCall.score")]
    assert len(scoring) == 1
    assert scoring[0].parent_id is not None
    assert scoring[0].parent_id.startswith("GuardedQueryEngine.")
    assert spans.open_spans == {}

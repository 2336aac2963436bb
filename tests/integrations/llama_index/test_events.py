"""Verdicts in LlamaIndex's instrumentation: one event each, and a log line each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher

from llama_index_semgrad_guard import SemGradLLM, UncertaintyEventHandler, UncertaintyRouterCallback, guarded
from semgrad_guard import Policy

from .conftest import Heard

PASS, STOP = Policy(threshold=1e308, on_cut="score"), Policy(threshold=-1e308, on_cut="score")
QUERY = "Where is Paris?"
Maker = Callable[..., BaseQueryEngine]


def test_one_event_a_verdict(make_engine: Maker, llm: SemGradLLM, recorder: Heard) -> None:
    llm.router = UncertaintyRouterCallback(STOP, escalate_to=lambda _: "elsewhere")
    guarded(make_engine(response_mode="refine"), llm.router).query(QUERY)
    llm.router = UncertaintyRouterCallback(STOP, keep_draft=True)
    guarded(SimpleChatEngine.from_defaults(llm=llm), llm.router).chat(QUERY)
    llm.router = None
    answer = llm.complete(QUERY)
    found = [(event.source, event.record["action"]) for event in recorder.verdicts]
    assert found == [
        ("llm", "escalate"),
        ("query_engine", "escalate"),
        ("llm", "abstain"),
        ("chat_engine", "abstain"),
        ("llm", "answer"),
    ]
    _, query, _, chat, alone = [event.record for event in recorder.verdicts]
    assert query["escalated"]["details"]["model"] == "external"
    assert query["draft"] is None
    assert chat["draft"]
    assert alone == answer.raw["semgrad_guard"]
    assert recorder.verdicts[0].model_dump()["class_name"] == "UncertaintyEvent"


def test_the_handler_logs_each_verdict(llm: SemGradLLM, caplog: pytest.LogCaptureFixture) -> None:
    root, handler = get_dispatcher(), UncertaintyEventHandler()
    root.add_event_handler(handler)
    try:
        with caplog.at_level(logging.INFO, logger="semgrad_guard"):
            for policy, mode in ((STOP, "enforce"), (STOP, "annotate"), (PASS, "enforce")):
                llm.router = UncertaintyRouterCallback(policy, mode=mode)  # type: ignore[arg-type]
                llm.complete(QUERY)
    finally:
        root.event_handlers.remove(handler)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    first, second, third = [record.getMessage() for record in caplog.records]
    assert first.startswith("llm: abstain; uncertainty ")
    assert "above the threshold" in first
    assert second.startswith("llm: abstain (not enforced); ")
    assert third.startswith("llm: answer; ")
    record: Any = caplog.records[0]
    assert record.semgrad_guard["action"] == "abstain"

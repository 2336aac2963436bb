"""Verdicts in LlamaIndex's events and log, and in OpenTelemetry's spans and events. Nothing leaves the machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.query_engine import RetrieverQueryEngine
from openinference.instrumentation.llama_index import LlamaIndexInstrumentor

from llama_index_semgrad_guard import (
    LowConfidenceError,
    SemGradLLM,
    UncertaintyEventHandler,
    UncertaintyRouterCallback,
    UncertaintyTracer,
    guarded,
)
from semgrad_guard import Policy
from tests.exported import Exported

from .conftest import Heard, Maker, Passages, under

PASS, STOP, QUERY = Policy(threshold=1e308, on_cut="score"), Policy(threshold=-1e308, on_cut="score"), "Where is Paris?"


def found(exported: Exported) -> list[tuple[str, Any]]:
    """Whose spans hold a verdict, and which."""
    return [(span.name.split(".")[0], (span.attributes or {})["semgrad_guard.action"]) for span in exported.judged()]


@pytest.fixture
def exported() -> Iterator[Exported]:
    """With an `UncertaintyTracer` among LlamaIndex's event handlers."""
    exported, root = Exported(), get_dispatcher()
    tracer = UncertaintyTracer(logger_provider=exported.logger_provider)
    root.add_event_handler(tracer)
    yield exported
    root.event_handlers.remove(tracer)


@pytest.fixture
def instrumented(exported: Exported) -> Iterator[Exported]:
    """With OpenInference's LlamaIndex instrumentor on as well."""
    LlamaIndexInstrumentor().instrument(tracer_provider=exported.tracer_provider)
    yield exported
    LlamaIndexInstrumentor().uninstrument()


@pytest.mark.parametrize("mode", ["enforce", "annotate"])
@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_the_spans_of_engine_and_llm_hold_the_decision(
    way: str, mode: Any, make_engine: Maker, llm: SemGradLLM, instrumented: Exported
) -> None:
    engine = under(make_engine, llm, STOP, mode=mode, keep_draft=True)
    response = engine.query(QUERY) if way == "query" else await engine.aquery(QUERY)
    record = response.metadata["semgrad_guard"]
    assert found(instrumented) == [("SemGradLLM", "abstain"), ("GuardedQueryEngine", "abstain")]
    span, event = instrumented.judged()[1], instrumented.events()[1]
    about = span.attributes or {}
    assert about["semgrad_guard.action"] == record["action"] == "abstain"
    assert about["semgrad_guard.uncertainty"] == record["uncertainty"]
    assert about["semgrad_guard.enforced"] is (mode == "enforce")
    assert "semgrad_guard.draft" not in about
    assert (event.event_name, event.span_id) == ("gen_ai.evaluation.result", span.context.span_id)
    assert dict(event.attributes) == {
        "gen_ai.evaluation.name": "hybridgrad",
        "gen_ai.evaluation.score.value": record["uncertainty"],
        "gen_ai.evaluation.score.label": "abstain",
        "gen_ai.evaluation.explanation": record["reason"],
    }


async def test_a_chat_engine_and_an_llm(llm: SemGradLLM, instrumented: Exported) -> None:
    llm.router = UncertaintyRouterCallback(PASS)
    await guarded(SimpleChatEngine.from_defaults(llm=llm), llm.router).achat(QUERY)
    await llm.acomplete(QUERY)
    assert found(instrumented) == [("SemGradLLM", "answer"), ("GuardedChatEngine", "answer"), ("SemGradLLM", "answer")]


def test_a_refused_answer_is_in_the_trace(make_engine: Maker, llm: SemGradLLM, instrumented: Exported) -> None:
    with pytest.raises(LowConfidenceError):
        under(make_engine, llm, STOP, mode="raise").query(QUERY)
    assert found(instrumented) == [("SemGradLLM", "abstain"), ("GuardedQueryEngine", "abstain")]


def test_unscored_answers_have_no_number(llm: SemGradLLM, instrumented: Exported) -> None:
    llm.router = UncertaintyRouterCallback(PASS)
    guarded(RetrieverQueryEngine.from_args(Passages(), llm=llm), llm.router).query(QUERY)
    (event,) = instrumented.events()
    assert "gen_ai.evaluation.score.value" not in event.attributes
    assert "semgrad_guard.uncertainty" not in (instrumented.judged()[0].attributes or {})


def test_the_current_span_where_nothing_is_instrumented(llm: SemGradLLM, exported: Exported) -> None:
    with exported.tracer_provider.get_tracer("mine").start_as_current_span("mine"):
        llm.complete(QUERY)
    llm.complete(QUERY)
    assert found(exported) == [("mine", "answer")]
    inside, outside = exported.events()
    assert (inside.span_id, outside.span_id) == (exported.judged()[0].context.span_id, 0)


# LlamaIndex's own events.


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

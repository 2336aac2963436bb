"""Verdicts in OpenTelemetry: attributes of OpenInference's spans, and evaluation events. Nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher
from openinference.instrumentation.llama_index import LlamaIndexInstrumentor
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from llama_index_semgrad_guard import (
    GuardedChatEngine,
    GuardedQueryEngine,
    GuardedReActAgent,
    LowConfidenceError,
    SemGradLLM,
    UncertaintyTracer,
)

from .test_agents import run
from .test_modes import WAYS
from .test_query_engine import PASS, QUERY, STOP, ask

Maker = Callable[..., BaseQueryEngine]


class Exported:
    """A tracer and a logger provider that keep what is exported."""

    def __init__(self) -> None:
        self.span_exporter, self.log_exporter = InMemorySpanExporter(), InMemoryLogRecordExporter()
        self.tracer_provider, self.logger_provider = TracerProvider(), LoggerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.span_exporter))
        self.logger_provider.add_log_record_processor(SimpleLogRecordProcessor(self.log_exporter))

    def judged(self) -> list[ReadableSpan]:
        """The exported spans that hold a verdict."""
        spans = self.span_exporter.get_finished_spans()
        return [span for span in spans if "semgrad_guard.action" in (span.attributes or {})]

    def found(self) -> list[tuple[str, Any]]:
        """Whose spans hold a verdict, and which."""
        return [(span.name.split(".")[0], (span.attributes or {})["semgrad_guard.action"]) for span in self.judged()]

    def events(self) -> list[Any]:
        return [exported.log_record for exported in self.log_exporter.get_finished_logs()]


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
@pytest.mark.parametrize("way", WAYS)
def test_the_engines_span_holds_the_decision(way: str, mode: Any, make_engine: Maker, instrumented: Exported) -> None:
    guarded = GuardedQueryEngine(make_engine(streaming="stream" in way), STOP, mode=mode, keep_draft=True)
    record = ask(guarded, way).metadata["semgrad_guard"]
    (span,), (event,) = instrumented.judged(), instrumented.events()
    assert span.name.startswith("GuardedQueryEngine.")
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


async def test_whoever_decides_has_the_verdict_in_a_span(
    make_engine: Maker, llm: SemGradLLM, instrumented: Exported
) -> None:
    target = GuardedQueryEngine(make_engine(), PASS)
    GuardedQueryEngine(make_engine(), STOP, escalate_to=target).query(QUERY)
    assert instrumented.found() == [("GuardedQueryEngine", "answer"), ("GuardedQueryEngine", "escalate")]
    instrumented.span_exporter.clear()
    await GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), PASS).achat(QUERY)
    await llm.acomplete(QUERY)
    assert instrumented.found() == [("GuardedChatEngine", "answer"), ("SemGradLLM", "answer")]
    instrumented.span_exporter.clear()
    await run(GuardedReActAgent(llm=llm, policy=STOP))
    assert instrumented.found() == [("BaseWorkflowAgent", "abstain")], "the span of the agent's step"


def test_a_refused_answer_is_in_the_trace(make_engine: Maker, instrumented: Exported) -> None:
    with pytest.raises(LowConfidenceError):
        GuardedQueryEngine(make_engine(), STOP, mode="raise").query(QUERY)
    assert instrumented.found() == [("GuardedQueryEngine", "abstain")]


def test_unscored_answers_have_no_number(make_engine: Maker, instrumented: Exported) -> None:
    GuardedQueryEngine(make_engine(passages=()), PASS).query(QUERY)
    (event,) = instrumented.events()
    assert "gen_ai.evaluation.score.value" not in event.attributes
    assert "semgrad_guard.uncertainty" not in (instrumented.judged()[0].attributes or {})


def test_the_current_span_where_nothing_is_instrumented(llm: SemGradLLM, exported: Exported) -> None:
    with exported.tracer_provider.get_tracer("mine").start_as_current_span("mine"):
        llm.complete(QUERY)
    llm.complete(QUERY)
    assert exported.found() == [("mine", "answer")]
    inside, outside = exported.events()
    assert (inside.span_id, outside.span_id) == (exported.judged()[0].context.span_id, 0)


def test_our_own_span_holds_no_text(make_engine: Maker, instrumented: Exported) -> None:
    guarded = GuardedQueryEngine(make_engine(), STOP, mode="annotate")
    text = str(guarded.query(QUERY)).strip()
    (span,) = [
        finished for finished in instrumented.span_exporter.get_finished_spans() if finished.name == "ModelCall.score"
    ]
    assert text not in repr(dict(span.attributes or {}))

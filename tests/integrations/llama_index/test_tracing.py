"""Verdicts in OpenTelemetry: attributes of OpenInference's spans, and evaluation events. Nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.query_engine import RetrieverQueryEngine
from openinference.instrumentation.llama_index import LlamaIndexInstrumentor

from llama_index_semgrad_guard import (
    LowConfidenceError,
    SemGradLLM,
    UncertaintyRouterCallback,
    UncertaintyTracer,
    guarded,
)
from semgrad_guard import Policy
from tests.integrations.exported import Exported

from .conftest import Passages

PASS, STOP, QUERY = Policy(threshold=1e308, on_cut="score"), Policy(threshold=-1e308, on_cut="score"), "Where is Paris?"
Maker = Callable[..., BaseQueryEngine]


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


def under(make_engine: Maker, llm: SemGradLLM, policy: Policy, **options: Any) -> Any:
    """An engine whose LLM decides by this policy."""
    llm.router = UncertaintyRouterCallback(policy, **options)
    return guarded(make_engine(), llm.router)


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

"""Verdicts in traces: OpenInference's spans, OpenTelemetry's events, LangSmith's runs. Nothing leaves the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langsmith import Client
from openinference.instrumentation.langchain import LangChainInstrumentor

from langchain_semgrad_guard import (
    ChatSemGrad,
    UncertaintyLangChainTracer,
    UncertaintyRouterCallback,
    UncertaintyTracer,
)
from semgrad_guard import LanguageModel
from semgrad_guard.errors import EmptyPromptError
from tests.exported import Exported

from .support import EVERYTHING, NOTHING, QUESTION, Route, verdict_of


class Traced(Exported):
    """With a tracer of ours that writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.tracer = UncertaintyTracer(logger_provider=self.logger_provider)


@pytest.fixture
def exported() -> Traced:
    return Traced()


@pytest.fixture
def instrumented(exported: Traced) -> Iterator[Traced]:
    """With OpenInference's LangChain instrumentor on."""
    LangChainInstrumentor().instrument(tracer_provider=exported.tracer_provider)
    yield exported
    LangChainInstrumentor().uninstrument()


@pytest.fixture(params=["answer", "abstain", "escalate"])
def router(request: pytest.FixtureRequest, larger: LanguageModel) -> UncertaintyRouterCallback:
    second = ChatSemGrad.from_model(larger, max_tokens=9)
    return {
        "answer": UncertaintyRouterCallback(EVERYTHING),
        "abstain": UncertaintyRouterCallback(NOTHING),
        "escalate": UncertaintyRouterCallback(NOTHING, escalate_to=second),
    }[request.param]


def decisions(router: UncertaintyRouterCallback) -> list[str]:
    """The actions that the runs of one call should show: the draft's, and the target's own."""
    if router.escalate_to is not None:
        return ["answer", "escalate"]  # the target's run lies inside and ends first
    return ["answer" if router.policy is EVERYTHING else "abstain"]


def test_openinference_spans_on_every_path(
    chat: ChatSemGrad, instrumented: Traced, router: UncertaintyRouterCallback, route: Route
) -> None:
    route(chat, QUESTION, {"callbacks": [router, instrumented.tracer]})
    spans = [span.attributes or {} for span in instrumented.judged()]
    assert [span["semgrad_guard.action"] for span in spans] == decisions(router)
    assert all(span["semgrad_guard.uncertainty"] > 0 for span in spans)
    assert spans[-1]["semgrad_guard.threshold"] == router.policy.threshold


def test_events_belong_to_their_spans(
    chat: ChatSemGrad, draft: str, instrumented: Traced, router: UncertaintyRouterCallback
) -> None:
    message = chat.invoke(QUESTION, {"callbacks": [router, instrumented.tracer]})
    events, spans = instrumented.events(), instrumented.judged()
    assert [event.event_name for event in events] == ["gen_ai.evaluation.result"] * len(decisions(router))
    assert [event.attributes["gen_ai.evaluation.score.label"] for event in events] == decisions(router)
    assert [event.span_id for event in events] == [span.context.span_id for span in spans]
    verdict = verdict_of(message)
    assert events[0].attributes["gen_ai.evaluation.name"] == "hybridgrad"
    assert events[-1].attributes["gen_ai.response.id"] == message.id
    assert events[0].attributes["gen_ai.evaluation.score.value"] == verdict.uncertainty
    assert ("gen_ai.evaluation.explanation" in events[-1].attributes) is (verdict.action != "answer")
    assert draft not in repr([event.attributes for event in events])


def test_every_span_is_exported_after_an_error_too(chat: ChatSemGrad, instrumented: Traced) -> None:
    def fail(_: Any) -> AIMessage:
        raise RuntimeError("no network")

    router = UncertaintyRouterCallback(NOTHING, escalate_to=RunnableLambda(fail))
    with pytest.raises(RuntimeError, match="no network"):
        chat.invoke(QUESTION, {"callbacks": [router, instrumented.tracer]})
    names = [span.name for span in instrumented.spans()]
    assert names == ["fail", "ChatSemGrad"]
    with pytest.raises(EmptyPromptError):
        chat.invoke([], {"callbacks": [instrumented.tracer]})
    assert len(instrumented.spans()) == 3


def test_the_current_span_where_nothing_is_instrumented(chat: ChatSemGrad, exported: Traced) -> None:
    with exported.tracer_provider.get_tracer("mine").start_as_current_span("mine"):
        chat.invoke(QUESTION, {"callbacks": [exported.tracer]})
    (span,) = exported.spans()
    assert (span.attributes or {})["semgrad_guard.status"] == "scored"
    (event,) = exported.events()
    assert event.span_id == span.context.span_id


def test_an_event_without_a_span(chat: ChatSemGrad, exported: Traced, caplog: pytest.LogCaptureFixture) -> None:
    chat.invoke(QUESTION, {"callbacks": [exported.tracer]})
    assert len(exported.events()) == 1
    assert not caplog.records


def test_answers_without_a_record_are_left_alone(exported: Traced) -> None:
    from langchain_core.language_models.fake_chat_models import FakeListChatModel

    FakeListChatModel(responses=["Bare."]).invoke(QUESTION, {"callbacks": [exported.tracer]})
    assert exported.events() == []


class Captured(Client):
    """A LangSmith client that keeps its requests."""

    def __init__(self) -> None:
        super().__init__(api_url="http://localhost:1", api_key="none", auto_batch_tracing=False)
        self.created: list[dict[str, Any]] = []
        self.updated: list[dict[str, Any]] = []

    def create_run(self, name: str, inputs: dict[str, Any], run_type: Any, **kwargs: Any) -> None:
        self.created.append({"name": name, "run_type": run_type, **kwargs})

    def update_run(self, run_id: Any, **kwargs: Any) -> None:
        self.updated.append({"id": run_id, **kwargs})

    def models(self) -> list[dict[str, Any]]:
        """The metadata of the chat models' runs, as they were when they ended."""
        ids = [run["id"] for run in self.created if run["run_type"] == "llm"]
        return [run["extra"]["metadata"] for run in self.updated if run["id"] in ids]


def test_langsmith_runs_on_every_path(chat: ChatSemGrad, router: UncertaintyRouterCallback, route: Route) -> None:
    client = Captured()
    route(chat, QUESTION, {"callbacks": [router, UncertaintyLangChainTracer(client=client)]})
    runs = client.models()
    assert [run["semgrad_guard.action"] for run in runs] == decisions(router)
    assert json.loads(json.dumps(runs, default=str))[-1]["semgrad_guard.uncertainty"] > 0
    assert sorted(str(run["id"]) for run in client.created) == sorted(str(run["id"]) for run in client.updated)


def test_langsmith_gets_one_tracer_only(chat: ChatSemGrad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "true")
    client = Captured()
    chat.invoke(QUESTION, {"callbacks": [UncertaintyLangChainTracer(client=client)]})
    assert len(client.created) == len(client.updated) == 1

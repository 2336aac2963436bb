"""Verdicts of the server in OpenTelemetry, exported to memory: as the doors emit them, and nothing of a draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import ALL, NONE, OPTIONS, Serve, asking

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from semgrad_guard import LanguageModel
from semgrad_guard.adapters.traces import EvaluationLog

CHAT = "/v1/chat/completions"


class Exported:
    """A tracer and a logger provider that keep what is exported."""

    def __init__(self) -> None:
        self.span_exporter, self.log_exporter = InMemorySpanExporter(), InMemoryLogRecordExporter()
        self.tracer_provider, self.logger_provider = TracerProvider(), LoggerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.span_exporter))
        self.logger_provider.add_log_record_processor(SimpleLogRecordProcessor(self.log_exporter))
        self.service = {"evaluations": EvaluationLog("semgrad_guard.server", logger_provider=self.logger_provider)}

    @property
    def events(self) -> list[Any]:
        return [log.log_record for log in self.log_exporter.get_finished_logs()]


@pytest.fixture
def exported() -> Iterator[Exported]:
    found = Exported()
    yield found
    found.logger_provider.shutdown()
    found.tracer_provider.shutdown()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("policy", "mode"), [(ALL, "enforce"), (NONE, "enforce"), (NONE, "annotate"), (NONE, "raise")])
async def test_every_verdict_is_an_event(
    serve: Serve, exported: Exported, language_model: LanguageModel, policy: Any, mode: str, stream: bool
) -> None:
    draft = language_model.generate("hello", OPTIONS).text
    async with serve(policy, mode=mode, service=exported.service) as client:
        with exported.tracer_provider.get_tracer("mine").start_as_current_span("request"):
            response = await client.post(CHAT, json=asking(stream=stream))
    (event,), (span,) = exported.events, exported.span_exporter.get_finished_spans()
    action = "answer" if policy is ALL else "abstain"
    assert (event.event_name, event.span_id) == ("gen_ai.evaluation.result", span.context.span_id)
    found = dict(event.attributes)
    assert (found["gen_ai.evaluation.name"], found["gen_ai.evaluation.score.label"]) == ("hybridgrad", action)
    assert (str(found["gen_ai.evaluation.score.value"])[:6] in response.text) is (policy is ALL or mode == "annotate")
    assert set(found) - {"gen_ai.evaluation.explanation", "gen_ai.response.id"} == {
        f"gen_ai.evaluation.{name}" for name in ("name", "score.value", "score.label")
    }
    about = dict(span.attributes)
    assert about["semgrad_guard.action"] == action
    assert draft not in str((event.attributes, event.body, about))
    withheld = policy is NONE and mode != "annotate"
    assert ("semgrad_guard.gnll" in about) is not withheld
    assert (about["semgrad_guard.scored_tokens"] == 0) is withheld


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, asking()),
        ("/v1/completions", {"model": "tiny", "prompt": "hello"}),
        ("/v1/responses", {"model": "tiny", "input": "hello"}),
    ],
)
async def test_an_event_names_its_response(serve: Serve, exported: Exported, path: str, body: dict[str, Any]) -> None:
    async with serve(ALL, service=exported.service) as client:
        body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
        response = await client.post(path, json=body)
    (event,) = exported.events
    assert event.attributes["gen_ai.response.id"] == response.json()["id"]

"""Verdicts of the server in OpenTelemetry, exported to memory: as the doors emit them, and nothing of a draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import ALL, NONE, OPTIONS, Serve, asking

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")

from semgrad_guard import LanguageModel
from semgrad_guard.adapters.traces import EvaluationLog
from tests.exported import Exported

CHAT = "/v1/chat/completions"


def service_of(exported: Exported) -> dict[str, Any]:
    """The options of a service whose events are exported there."""
    return {"evaluations": EvaluationLog("semgrad_guard.server", logger_provider=exported.logger_provider)}


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
    async with serve(policy, mode=mode, service=service_of(exported)) as client:
        with exported.tracer_provider.get_tracer("mine").start_as_current_span("request"):
            response = await client.post(CHAT, json=asking(stream=stream))
    (event,), (span,) = exported.events(), exported.spans()
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
    async with serve(ALL, service=service_of(exported)) as client:
        body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
        response = await client.post(path, json=body)
    (event,) = exported.events()
    assert event.attributes["gen_ai.response.id"] == response.json()["id"]

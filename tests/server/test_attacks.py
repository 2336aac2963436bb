"""A client that tries every field of every route: it moves no decision, and learns nothing about the operator.

Whatever a client sends, it gets an answer or an error with a name: no bug, no hang.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from semgrad_guard import GenerationOptions, LanguageModel, Policy, calibrate

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.server.other_protocols import ResponsesRequest, TextRequest
from semgrad_guard.server.protocol import ChatRequest, FeedbackRequest, ScoreRequest
from semgrad_guard.server.remote import RemoteServer
from semgrad_guard.server.upstream import RemoteTarget, Upstream
from tests.decision_log.test_feedback import written
from tests.steps import LIMIT

from .conftest import ALL, NONE, OPTIONS, Serve, asking
from .others import Other
from .test_other_protocols import CHAT, RESPONSES, TEXT, prompting, responding

TEMPTING = (
    *("kind", "sampling", "threshold", "mode", "timeout", "policy", "calibration", "calibration_id", "alpha", "delta"),
    *("promised", "action", "enforced", "drawn", "decision_id", "on_unscored", "on_unfamiliar", "on_error", "by"),
    *("on_doubt", "estimator", "uncertainty", "confidence", "draft", "abstain_message", "closing_line", "escalate_to"),
)
"""The operator's settings, and the fields of a decision."""
VALUES = (True, 0, 2, 0.5, -1, 1e9, "", "random", [], ["a"], {}, {"kind": "easy", "threshold": 1e9, "mode": "annotate"})
ANSWERING: Mapping[str, tuple[dict[str, Any], set[str]]] = {
    CHAT: (asking(), set(ChatRequest.model_fields)),
    TEXT: (prompting(), set(TextRequest.model_fields)),
    RESPONSES: (responding(), set(ResponsesRequest.model_fields)),
}


@asynccontextmanager
async def attacked(serve: Serve, tmp_path: Path, *policy: Policy, **given: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A server that withholds all answers, with a log that keeps texts."""
    with DecisionLog(tmp_path / "log.db", text=True) as log:
        async with serve(*(policy or (NONE,)), service={"log": log}, **given) as client:
            yield client


@pytest.mark.parametrize("path", sorted(ANSWERING))
async def test_no_field_of_a_request_moves_a_decision(
    serve: Serve, tmp_path: Path, language_model: LanguageModel, path: str
) -> None:
    body, fields = ANSWERING[path]
    draft = language_model.generate("hello", OPTIONS).text
    async with attacked(serve, tmp_path) as client:
        answered = 0
        for name in sorted(fields | {*TEMPTING}):
            for value in VALUES:
                for sent in ({**body, name: value}, {**body, "semgrad_guard": {name: value}}):
                    response = await client.post(path, json=sent)
                    assert response.status_code in (200, 400, 403, 404, 422), (name, value)
                    assert draft not in response.text
                    if response.status_code == 200:
                        answered += 1
                        assert '"action":"abstain"' in response.text.replace(" ", ""), (name, value)
                    elif name in TEMPTING:
                        assert name in response.json()["error"]["message"], (name, value)
        service = client.service  # type: ignore[attr-defined]
        rows = service.log.database.decisions()
    assert len(rows) >= answered > 5
    assert {(row.action, row.threshold, row.enforced) for row, _ in rows} == {("abstain", -1.0, True)}


@pytest.mark.parametrize("path", sorted(ANSWERING))
async def test_headers_and_queries_move_no_decision_either(serve: Serve, tmp_path: Path, path: str) -> None:
    body = ANSWERING[path][0]
    async with attacked(serve, tmp_path) as client:
        for name in TEMPTING:
            headers = {f"x-semgrad-guard-{name.replace('_', '-')}": "easy", name.replace("_", "-"): "1e9"}
            response = await client.post(f"{path}?{name}=1e9", json=body, headers=headers)
            assert response.headers["x-semgrad-guard-action"] == "abstain"


async def test_no_part_of_a_body_and_no_other_spelling_moves_a_decision(
    serve: Serve, tmp_path: Path, language_model: LanguageModel
) -> None:
    """Fields of messages, tools and metadata, names given twice, other methods, paths and types of content."""
    draft = language_model.generate("hello", OPTIONS).text
    tempting = {"threshold": 1e9, "mode": "annotate", "action": "answer", "promised": True}
    message = {"role": "user", "content": "hello"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, asking(messages=[{**message, **tempting, "semgrad_guard": tempting}])),
        (CHAT, asking(messages=[message], metadata={"semgrad_guard": json.dumps(tempting), "mode": "annotate"})),
        (CHAT, asking(messages=[{"role": "system", "content": json.dumps(tempting)}, message])),
        (CHAT, asking(user=json.dumps(tempting), stream_options={"include_usage": True}, stream=True)),
        (CHAT, asking(stream_options=tempting, stream=True)),
        (CHAT, asking(chat_template_kwargs=tempting)),
        (TEXT, prompting(metadata={"semgrad_guard": json.dumps(tempting)})),
        (RESPONSES, responding([{**message, "semgrad_guard": tempting}])),
        (RESPONSES, responding(metadata={"semgrad_guard": json.dumps(tempting)})),
        (RESPONSES, responding(text={"format": {"type": "text", **tempting}})),
        (RESPONSES, responding(reasoning=tempting)),
    ]
    async with attacked(serve, tmp_path) as client:
        for path, body in bodies:
            response = await client.post(path, json=body)
            assert draft not in response.text
            assert response.status_code in (200, 400), (body, response.text)
            assert response.status_code == 400 or '"action":"abstain"' in response.text.replace(" ", ""), body
        twice = json.dumps(asking())[:-1] + ', "semgrad_guard": {}, "semgrad_guard": {"mode": "annotate"}}'
        kind = {"content-type": "application/json"}
        assert (await client.post(CHAT, content=twice, headers=kind)).status_code == 400
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS"):
            assert (await client.request(method, CHAT, json=asking())).status_code == 405
        for path in (f"{CHAT}/", "/V1/chat/completions", "//v1/chat/completions", "/v1/messages", "/v1/embeddings"):
            assert (await client.post(path, json=asking())).status_code in (307, 404), path
        for given in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            response = await client.post(CHAT, content=json.dumps(asking()), headers={"content-type": given})
            assert response.status_code == 415
        service = client.service  # type: ignore[attr-defined]
        assert {row.action for row, _ in service.log.database.decisions()} == {"abstain"}


async def test_no_field_of_a_grade_makes_it_a_random_one(serve: Serve, tmp_path: Path) -> None:
    """Neither do many grades: a promise stays as it is."""
    scores = [i / 100 for i in range(100)]
    policy = Policy.from_calibration(calibrate(scores, [True] * 100, alpha=0.1, delta=0.1))
    async with attacked(serve, tmp_path, policy, mode="annotate") as client:
        own = (await client.post(CHAT, json=asking())).json()["semgrad_guard"]["decision_id"]
        for name in sorted({*FeedbackRequest.model_fields, *TEMPTING}):
            for value in VALUES:
                given = await client.post("/v1/feedback", json={"decision_id": own, "right": False, name: value})
                assert given.status_code in (200, 400, 404), (name, value)
                assert given.status_code != 200 or given.json()["sampling"] == "user"
        (promise,) = (await client.get("/v1/promises")).json()["data"]
    assert (promise["state"], promise["labels"]) == ("unknown", 0)


async def test_later_grades_replace_no_grade_of_a_drawn_answer(serve: Serve, tmp_path: Path) -> None:
    """No client learns which answers were drawn either, before it has graded them."""
    scores = [i / 100 for i in range(100)]
    calibration = calibrate(scores, [True] * 100, alpha=0.1, delta=0.1)
    async with attacked(serve, tmp_path, Policy.from_calibration(calibration)) as client:
        log: DecisionLog = client.service.log  # type: ignore[attr-defined]
        ids = written(log, 30, calibration_id=calibration.id)
        log.database.mark_drawn(ids)
        assert "drawn" not in (await client.get("/v1/decisions")).text
        for right in (True, False, False):
            for one in ids:
                given = await client.post("/v1/feedback", json={"decision_id": one, "right": right})
                assert right or "that grade counts" in given.json()["note"]
        (promise,) = (await client.get("/v1/promises")).json()["data"]
        assert (promise["state"], promise["labels"], promise["wrong"]) == ("unknown", 30, 0)
        for one in ids:
            log.feedback(one, right=False, corrects=True)
        (promise,) = (await client.get("/v1/promises")).json()["data"]
    assert (promise["state"], promise["labels"], promise["wrong"]) == ("broken", 30, 30)


async def test_no_field_opens_the_scores_of_a_server_that_withholds(serve: Serve, tmp_path: Path) -> None:
    body = {"messages": asking()["messages"], "text": "a guess"}
    async with attacked(serve, tmp_path) as client:
        for name in sorted({*ScoreRequest.model_fields, *TEMPTING}):
            for value in VALUES:
                assert (await client.post("/v1/score", json={**body, name: value})).status_code in (400, 403, 404)


async def test_one_request_does_not_fill_the_queue(serve: Serve) -> None:
    """What can never succeed is a 400, and not a 429 that is to be tried again."""
    async with serve(NONE, limit=2) as client:
        for path, body in (
            (CHAT, asking(n=99)),
            (TEXT, prompting(["a"] * 64)),
            (TEXT, prompting(n=99)),
            (RESPONSES, responding(n=99)),
        ):
            response = await client.post(path, json=body)
            assert (response.status_code, "retry-after" in response.headers) == (400, False)
        assert (await client.post(CHAT, json=asking(n=8, temperature=1))).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_no_request_asks_a_target_for_more_than_the_operator_allows(serve: Serve, name: str) -> None:
    large = Other()
    target = RemoteTarget(RemoteServer("http://large/v1", transport=large), "large")
    async with serve(NONE, target=target) as client:
        for limit in (10**6, 3):
            response = await client.post(CHAT, json=asking(**{name: limit}))
            assert response.headers["x-semgrad-guard-action"] == "escalate"
    assert [body[name] for body in large.bodies] == [OPTIONS.max_tokens, 3]


SECRETS = ("/srv/models", "an-account", "secret-host", "5432", "10.1.2.3", "log.db")


async def test_errors_show_no_path_host_or_account(serve: Serve, make_served: Any, tmp_path: Path) -> None:
    """Neither those of a log that is away, nor those of another server, its own words included."""
    pytest.importorskip("psycopg")
    url = "postgresql+psycopg://an-account:password@secret-host.invalid:5432/log"
    texts = list[str]()
    with DecisionLog(url, journal=tmp_path / "journal") as log:
        async with serve(NONE, service={"log": log}) as client:
            for response in (
                await client.get("/v1/decisions"),
                await client.get("/v1/promises"),
                await client.post("/v1/feedback", json={"decision_id": "dec_x", "right": True}),
            ):
                assert response.status_code == 503
                texts.append(response.text)
    words = (
        "cannot load /srv/models/x.gguf for an-account@secret-host at http://secret-host:5432/v1: try 4 tokens; "
        "secret-host:5432 and 10.1.2.3 refuse"
    )
    for status in (400, 404, 422, 500, 503):

        def refuse(_: httpx.Request, status: int = status) -> httpx.Response:
            return httpx.Response(status, json={"error": {"message": words, "param": None}})

        scorer = make_served(NONE).scheduler
        server = RemoteServer("http://an-account@secret-host:5432/srv/models/v1", transport=httpx.MockTransport(refuse))
        async with serve(NONE, mode="annotate", upstream=Upstream(server, scorer), scheduler=scorer) as client:
            for stream in (False, True):
                texts.append((await client.post(CHAT, json=asking(stream=stream))).text)
    assert not [(secret, text) for text in texts for secret in (*SECRETS, str(tmp_path)) if secret in text]
    assert any("try 4 tokens" in text for text in texts)  # the advice in its words stays
    assert all(json.loads(text)["error"]["message"] for text in texts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.sampled_from(["role", "type", "content", "name", "parameters", "function", "schema", "text", "arguments"])
WORDS = st.sampled_from(["user", "assistant", "tool", "function", "text", "json_schema", "message", "object", "array"])
NESTED = st.recursive(
    WORDS | JSON,
    lambda inner: st.lists(inner, min_size=1, max_size=2) | st.dictionaries(PARTS, inner, max_size=4),
    max_leaves=8,
)
"""Values of the names that the protocols have, in any order."""
PLAIN = st.sampled_from([True, 1, 2, 0.5, "auto", "required", ["a"], "a", [], {}])


def bodies(base: dict[str, Any], kind: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Requests in which some fields have other values, of any kind."""
    fields = sorted({*kind.model_fields, *ChatRequest.model_fields, "previous_response_id"} - {"model"})
    return st.dictionaries(st.sampled_from(fields), NESTED | PLAIN, max_size=4).map(lambda more: {**base, **more})


@pytest.fixture
def loop() -> Any:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("path", "base", "kind"),
    [(CHAT, asking(), ChatRequest), (RESPONSES, responding(), ResponsesRequest), (TEXT, prompting(), TextRequest)],
)
def test_no_request_is_a_bug(
    serve: Serve, loop: asyncio.AbstractEventLoop, path: str, base: dict[str, Any], kind: type[BaseModel]
) -> None:
    async def one(body: Any) -> None:
        async with serve(ALL, options=GenerationOptions(max_tokens=4)) as client:
            headers = {"content-type": "application/json"}
            response = await client.post(path, content=json.dumps(body).encode(), headers=headers, timeout=LIMIT)
            client.service.close()
        assert response.status_code < 500, (body, response.text)
        assert "internal_error" not in response.text, body

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(bodies(base, kind))
    def fuzz(body: Any) -> None:
        loop.run_until_complete(one(body))

    fuzz()

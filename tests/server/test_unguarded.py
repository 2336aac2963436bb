"""Routes that produce text without a verdict: refused with words, in whatever spelling, unless they are named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from semgrad_guard import HybridGrad, LanguageModel
from semgrad_guard.errors import InputError
from semgrad_guard.server.app import make_app
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.service import Service
from semgrad_guard.server.upstream import RemoteServer, Unguarded, Upstream

from .conftest import ALL, NONE, asking

SECRET = "what nobody judged"
CLIENT = {"authorization": "Bearer of-the-client", "cookie": "a=b", "x-forwarded-for": "1.2.3.4"}


class Other(httpx.AsyncBaseTransport, httpx.AsyncByteStream):
    """Another server: answers every request with a secret, and takes down who asked for what."""

    def __init__(self, *, status: int = 200, kind: str = "application/json", cut: bool = False) -> None:
        self.heard: list[tuple[str, bytes, dict[str, str]]] = []
        self._status, self._kind, self._cut = status, kind, cut

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.heard.append((str(request.url), await request.aread(), dict(request.headers)))
        return httpx.Response(self._status, headers={"content-type": self._kind, "x-secret": SECRET}, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield json.dumps({"error": {"message": "as it came"}, "said": SECRET}).encode()
        if self._cut:
            raise httpx.ReadError("gone")


@pytest.fixture
def front(make_served: Any, language_model: LanguageModel) -> Any:
    """`front("embeddings", ...)`: a client of a server before `Other`, and what reaches that."""

    def start(*routes: str, other: Other | None = None, **app: Any) -> tuple[httpx.AsyncClient, Other]:
        other = other or Other()
        server = RemoteServer("http://other/v1", api_key="of-the-operator", transport=other)
        scheduler = Scheduler(language_model, HybridGrad(), served=True)
        service = Service([make_served(NONE, upstream=Upstream(server, scheduler), scheduler=scheduler)])
        made = make_app(service, unguarded=Unguarded(server, frozenset(routes)), **app)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://127.0.0.1", headers=CLIENT)
        client.service = service  # type: ignore[attr-defined]
        return client, other

    return start


PRODUCE_TEXT = [
    "responses/compact", "completions/render", "embeddings", "messages", "edits", "audio/transcriptions",
    "audio/speech", "rerank", "images/generations", "assistants", "threads/t/runs", "chat/completions/c", "batches",
    "realtime", "moderations", "fine_tuning/jobs", "infill", "generate", "completion",
]  # fmt: skip


@pytest.mark.parametrize("route", PRODUCE_TEXT)
async def test_what_is_not_named_is_refused_with_words(front: Callable[..., Any], route: str) -> None:
    client, other = front()
    for method in ("POST", "GET", "PUT", "DELETE"):
        response = await client.request(method, f"/v1/{route}", json=asking())
        assert (response.status_code, response.json()["error"]["code"]) == (403, "route_not_guarded")
        assert "allow_unguarded" in response.json()["error"]["message"]
    assert other.heard == []


async def test_a_named_route_is_passed_on_as_it_is(front: Callable[..., Any]) -> None:
    client, other = front("embeddings", "audio/speech")
    for route in ("embeddings", "audio/speech"):
        response = await client.post(f"/v1/{route}?key=client", json={"input": "hello", "model": "any"})
        assert (response.status_code, response.json()["said"]) == (200, SECRET)
        assert response.headers["x-semgrad-guard-action"] == "unguarded"
        assert "x-secret" not in response.headers
        url, body, headers = other.heard.pop()
        assert (url, json.loads(body)) == (f"http://other/v1/{route}", {"input": "hello", "model": "any"})
        assert headers["authorization"] == "Bearer of-the-operator"
        assert not {"cookie", "x-forwarded-for"} & set(headers)
        assert f'semgrad_guard_unguarded_total{{route="{route}"}} 1.0' in client.service.metrics.text().decode()
    assert (await client.get("/v1/embeddings")).status_code == 405
    assert (await client.post("/v1/rerank", json=asking())).status_code == 403
    assert other.heard == []


SPELLINGS = [
    "/v1//rerank", "//v1/rerank", "/v1/./rerank", "/v1/embeddings/../rerank", "/V1/rerank",
    "/v1/Rerank", "/v1/RERANK", "/v1/%2e/rerank", "/v1/embeddings/%2e%2e/rerank",
    "/v1/%2frerank", "/v1%2frerank", "/v1/rerank;a=b", "/v1/rerank%00", "/v1/rerank%20",
    "/v1/rerank%0a", "/v1/rerank.json", "/v1/rerank//", "/v1/rerank/x", "/v1\\rerank",
    "/v1/embeddings%2f..%2frerank", "/v1/embeddings%3f/../rerank", "/v1/embeddings%23rerank",
    "/v1/%72erank%2f", "/v1/%2572erank", "/rerank", "/embeddings", "/api/v1/embeddings",
    "/v1/v1/embeddings", "/v1/embeddings/embeddings", "/v1/ｅmbeddings", "/v1/embeddings\u200b",
    "/v1/chat/../embeddings", "/v1/models/../embeddings/..",
]  # fmt: skip


@pytest.mark.parametrize("path", SPELLINGS)
async def test_no_other_spelling_leads_to_the_upstream(front: Callable[..., Any], path: str) -> None:
    """The paths are sent as they are here: a client library would tidy them up."""
    client, other = front("embeddings")
    status = (await raw(client, path))[0]["status"]
    assert status in (403, 404, 307, 405), status
    assert other.heard == []


async def test_spellings_that_mean_a_named_route_ask_for_its_own_name(front: Callable[..., Any]) -> None:
    client, other = front("embeddings")
    assert (await raw(client, "/v1/%65mbeddings"))[0]["status"] == 200
    assert [url for url, _, _ in other.heard] == ["http://other/v1/embeddings"]
    response = await client.post("/v1/embeddings/", json={}, follow_redirects=True)
    assert (response.status_code, response.url.path) == (200, "/v1/embeddings")


async def raw(client: httpx.AsyncClient, path: str) -> list[Any]:
    """What is sent for a POST to a path as uvicorn hands it on: decoded once, and otherwise untouched."""
    app: Any = client._transport.app  # type: ignore[attr-defined]
    found: list[Any] = []
    body = [{"type": "http.request", "body": json.dumps(asking()).encode(), "more_body": False}]

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        found.append(message)

    await app(
        {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        },
        receive,
        send,
    )
    return found


async def test_a_named_route_keeps_the_servers_own_rules(front: Callable[..., Any]) -> None:
    client, other = front("embeddings")
    response = await client.post("/v1/embeddings", content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert (await client.post("/v1/embeddings", content=b"[1")).status_code == 415
    response = await client.post("/v1/embeddings", content=b"[1", headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert other.heard == []
    client, other = front("embeddings", other=Other(status=401))
    response = await client.post("/v1/embeddings", json={})
    assert (response.status_code, SECRET in response.text) == (502, False)
    client, other = front("embeddings", other=Other(kind="text/html; charset=utf-8"))
    response = await client.post("/v1/embeddings", json={})
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_an_upstream_that_breaks_off_is_no_whole_answer(front: Callable[..., Any]) -> None:
    client, _ = front("embeddings", other=Other(cut=True))
    start, *bodies = await raw(client, "/v1/embeddings")
    assert (start["status"], bodies[-1]["more_body"]) == (200, True)  # uvicorn cuts the connection
    assert 'code="upstream_failed"} 1.0' in client.service.metrics.text().decode()


NO_ROUTES = ["", "/a", "a/", "a//b", "../x", "a/../b", "Embeddings", "a?b", "a b", "é", "http://x", "a\n"]


@pytest.mark.parametrize("route", NO_ROUTES)
def test_names_that_are_no_route(route: str) -> None:
    with pytest.raises(InputError, match="is not a route"):
        Unguarded(RemoteServer("http://other/v1"), frozenset({route}))


@pytest.mark.parametrize(
    "route", ["chat/completions", "completions", "responses", "score", "models", "feedback", "decisions"]
)
def test_what_is_guarded_cannot_be_let_through(front: Callable[..., Any], route: str) -> None:
    with pytest.raises(InputError, match="answers that itself"):
        front(route)


async def test_without_an_upstream_there_is_no_such_route(serve: Any) -> None:
    async with serve(ALL) as client:
        response = await client.post("/v1/embeddings", json={})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")

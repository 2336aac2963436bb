"""Who may come in, how much one may take, and that no text of a request is repeated anywhere.

Connections to a listening server: half-sent requests take nobody's place, and probes come by address.
"""

from __future__ import annotations

import ast
import asyncio
import hmac
import inspect
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.scores.tape import Memory
from semgrad_guard.errors import InputError
from semgrad_guard.server.app import PATHS, Limits, make_app
from semgrad_guard.server.assembly import allowed_hosts, bound_to, is_loopback
from semgrad_guard.server.gate import Keys
from semgrad_guard.server.protocol import parse_json
from semgrad_guard.server.scheduler import Assignment
from semgrad_guard.server.service import ServedModel, Service
from tests.pairwise import in_turn
from tests.steps import LIMIT

from .conftest import ALL, NONE, Serve, asking, held, listening, raw_request, watched

CHAT = "/v1/chat/completions"
KEY = "a-key-of-sixteen-letters"
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"enum": ["yes", "no"]}}}
JSON = {"content-type": "application/json"}


async def test_a_key_opens_every_route_but_two(serve: Serve) -> None:
    async with serve(ALL, app={"keys": Keys([KEY, "another-key-for-somebody"])}) as client:
        paths = [route.path for route in client._transport.app.routes if route.path not in PATHS]
        for path in paths:
            for method in ("GET", "POST"):
                response = await client.request(method, path.replace("{name:path}", "tiny"))
                assert (response.status_code == 401) == (path not in ("/healthz", "/readyz")), path
        assert response.headers["www-authenticate"] == "Bearer"
        for bad in (KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ", f"Bearer {KEY[:-1]}", "Bearer \xff"):
            given = {"authorization": bad.encode("latin-1")}
            assert (await client.get("/v1/models", headers=given)).status_code == 401, bad
        for good in (f"Bearer {KEY}", f"bearer {KEY} "):
            assert (await client.get("/v1/models", headers={"authorization": good})).status_code == 200


def test_a_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every key there is, by digests of one length, whichever of them fits, if any; and in no other way."""
    compared, compare = list[tuple[bytes, bytes]](), hmac.compare_digest

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    keys = Keys([KEY, "another-key-for-somebody", "and-one-for-a-third-person"])
    tokens = (KEY, "and-one-for-a-third-person", KEY[:-1], "", "x" * 100_000)
    assert [keys.open_to(f"Bearer {token}") for token in tokens] == [True, True, False, False, False]
    assert [keys.open_to(header) for header in (None, f"Basic {KEY}", KEY)] == [False] * 3
    assert len(compared) == 3 * (len(tokens) + 3)
    assert {len(value) for pair in compared for value in pair} == {32}
    tree = ast.parse(inspect.getsource(Keys))
    others = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)}
    assert others == {"len(key) < _SHORTEST_KEY", "scheme.lower() == 'bearer'"}


async def test_a_prompt_may_not_have_more_tokens_than_the_operator_allows(
    serve: Serve, language_model: LanguageModel
) -> None:
    own = len(language_model.render("hello").ids)
    async with serve(ALL, prompt_limit=own) as client:
        assert (await client.post(CHAT, json=asking("hello"))).is_success
        for stream in (False, True):
            for body in (asking("hello!", stream=stream), asking("hello", stream=stream, response_format=FORMAT)):
                refused = await client.post(CHAT, json=body)
                error = refused.json()["error"]
                assert (error["code"], refused.status_code) == ("context_length_exceeded", 400), refused.text
                assert f"this server takes {own}" in error["message"]
                assert "hello" not in error["message"]


def test_keys_are_not_kept(tmp_path: Path) -> None:
    keys = Keys([KEY])
    assert KEY not in repr(vars(keys))
    with pytest.raises(InputError, match="at least 16"):
        Keys(["short"])
    with pytest.raises(InputError, match="ASCII"):  # clients send it in UTF-8, and headers are read as Latin-1
        Keys(["schlüssel" * 3])
    (tmp_path / "keys").write_text(f"# mine\n{KEY}\n\n")
    assert Keys.from_file(tmp_path / "keys") == [KEY]
    (tmp_path / "keys").write_text(f"{KEY}\n", encoding="utf-8-sig")  # as editors on Windows write it
    assert Keys.from_file(tmp_path / "keys") == [KEY]
    for content in ("", "# none\n"):
        (tmp_path / "none").write_text(content)
        with pytest.raises(InputError, match="no API key"):
            Keys.from_file(tmp_path / "none")
    with pytest.raises(InputError, match="cannot be read"):
        Keys.from_file(tmp_path / "missing")


def test_a_server_without_keys_stays_at_home() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):  # noqa: S104
        assert not is_loopback(host)
        with pytest.raises(InputError, match="API key"):
            allowed_hosts(host, has_keys=False)
        assert allowed_hosts(host, has_keys=True) is None
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]")))
    assert allowed_hosts("127.0.0.1", has_keys=False, named=["Box"]) == {"localhost", "127.0.0.1", "::1", "box"}


async def test_browsers_cannot_reach_it_under_a_foreign_name(serve: Serve) -> None:
    async with serve(ALL, app={"hosts": allowed_hosts("127.0.0.1", has_keys=False)}) as client:
        for name, status in (("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:80", 200), ("evil.example", 421)):
            assert (await client.get("/v1/models", headers={"host": name})).status_code == status
        response = await client.post(CHAT, content=json.dumps(asking()), headers={"content-type": "text/plain"})
        assert response.status_code == 415  # what a page may send without asking
        response = await client.options(CHAT, headers={"origin": "http://evil.example"})
        assert response.status_code == 405
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_body_may_not_be_too_long_or_too_slow(serve: Serve) -> None:
    async with serve(ALL, app={"limits": Limits(body_bytes=500)}) as client:
        response = await client.post(CHAT, json=asking("x" * 500))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

        async def chunked() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b" " * 100

        assert (await client.post(CHAT, content=chunked(), headers=JSON)).status_code == 413

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    async with serve(ALL, app={"limits": Limits(body_seconds=0.1)}) as client:
        assert (await client.post(CHAT, content=slow(), headers=JSON)).status_code == 408


BROKEN = [
    b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}', b'{"model": 1e999}',
    b'{"model": "\\ud800"}',
    b'{"a": ' * 100_000, b'{"a": ' * 70 + b"1" + b"}" * 70, b'{"n": ' + b"9" * 5000 + b"}",
]  # fmt: skip


async def test_broken_bodies(serve: Serve) -> None:
    async with serve(ALL) as client:
        for body in BROKEN:
            for path in (CHAT, "/v1/score", "/v1/feedback"):
                response = await client.post(path, content=body, headers=JSON)
                assert response.status_code == 400, (path, body[:40])
                assert response.json()["error"]["type"] == "invalid_request_error"
    assert parse_json(b'{"a": [1, {"b": "\\u00e9"}]}') == {"a": [1, {"b": "é"}]}


async def test_unknown_routes_have_openais_form(serve: Serve) -> None:
    async with serve(ALL) as client:
        missing = ("/nowhere", "/v1/messages", "/v1/responses/resp_1/cancel", "/chat/completions")
        for method, path, status in (("GET", CHAT, 405), *(("POST", path, 404) for path in missing)):
            response = await client.request(method, path)
            assert response.status_code == status
            assert status == 405 or "POST /v1/chat/completions" in response.json()["error"]["message"]
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_bug_says_nothing_of_what_was_asked(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(ALL) as client:

        def broken(request: Any, _: Any) -> Any:
            raise ValueError(f"cannot read {request.conversation}")

        monkeypatch.setattr(Assignment, "of", broken)
        with caplog.at_level(logging.DEBUG):
            for stream in (False, True):
                response = await client.post(CHAT, json=asking("the secret", stream=stream))
                assert response.status_code == 500
                assert "secret" not in response.text
        assert "ValueError at" in caplog.text
        assert "secret" not in caplog.text
        assert 'semgrad_guard_errors_total{code="internal_error"} 2.0' in (await client.get("/metrics")).text


async def test_too_many_requests_are_told_to_come_back(serve: Serve) -> None:
    options = GenerationOptions(max_tokens=40)
    async with serve(ALL, limit=2, options=options) as client:
        found = await asyncio.gather(*(client.post(CHAT, json=asking(f"q {i}")) for i in range(12)))
        codes = sorted(response.status_code for response in found)
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 2
        refused = next(response for response in found if response.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert (await client.post(CHAT, json=asking())).status_code == 200
    async with serve(ALL, app={"limits": Limits(connections=1)}, options=options) as client:
        found = await asyncio.gather(*(client.post(CHAT, json=asking()) for _ in range(3)))
        assert sorted(response.status_code for response in found) == [200, 503, 503]


async def test_a_deadline_counts_for_those_that_wait_too(serve: Serve) -> None:
    options = GenerationOptions(max_tokens=150)
    async with serve(ALL, options=options, timeout=0.05) as client:
        for stream in (False, True):
            found = await asyncio.gather(*(client.post(CHAT, json=asking(stream=stream)) for _ in range(3)))
            assert {response.status_code for response in found} == {504}
            assert {response.json()["error"]["code"] for response in found} == {"deadline_exceeded"}
            assert found[0].headers["x-should-retry"] == "false"
    async with serve(ALL, options=options, timeout=0.05, on_error="abstain") as client:
        assert (await client.post(CHAT, json=asking())).json()["semgrad_guard"]["action"] == "abstain"


async def leaves(app: Any, body: dict[str, Any], *, once: Callable[[], bool]) -> None:
    """A client that sends a request and goes away as soon as something is so."""
    gone, sent = asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    call = asyncio.ensure_future(app(raw_request(), receive, send))
    while not once():
        await asyncio.sleep(0.002)
    gone.set()
    await asyncio.wait_for(call, LIMIT)


@in_turn(mode=["enforce", "annotate"], stream=[False, True])
async def test_a_client_that_goes_away_stops_the_model(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, mode: str, stream: bool
) -> None:
    options = GenerationOptions(max_tokens=200)
    async with serve(NONE, mode=mode, options=options) as client:
        transport: httpx.ASGITransport = client._transport
        scheduler: Any = client.service.models["tiny"].scheduler
        monkeypatch.setattr(scheduler.model, "memory", Memory(running=1))  # one at a time
        begun, ended = watched(scheduler)
        steps = held(scheduler, begun, at=3)
        left: list[bool] = []
        one = asyncio.ensure_future(leaves(transport.app, asking("one", stream=stream), once=lambda: bool(left)))
        while not steps.reached.is_set():
            await asyncio.sleep(0.002)
        # The second waits, and never gets its turn.
        await leaves(transport.app, asking("two", stream=stream), once=lambda: scheduler.depth == 1)
        async with asyncio.timeout(LIMIT):
            while scheduler.depth:
                await asyncio.sleep(0.002)
        left.append(True)
        await one
        assert steps.in_all() == 3
        response = await client.post(CHAT, json=asking(max_tokens=2))
        assert response.status_code == 200
        while "NoneType" not in ended:
            await asyncio.sleep(0.002)
        # Who ends the second, its client or the model's thread that looks for the late, is a matter of moments.
        assert ended in (["AnswerCancelledError", "NoneType"], ["AnswerCancelledError"] * 2 + ["NoneType"])


async def test_small_packets_leave_at_once() -> None:
    """With Nagle's algorithm a stream's first piece waits 40 ms for the client to acknowledge the head."""
    known = asyncio.get_running_loop().create_future()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    bound = bound_to("127.0.0.1", 0)
    async with await asyncio.start_server(connected, sock=bound):
        _, writer = await asyncio.open_connection(*bound.getsockname())
        assert await known
        writer.close()


BODY = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("form", [b"Content-Length: 999\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_half_sent_bodies_take_no_place(make_served: Callable[..., ServedModel], form: bytes) -> None:
    app = make_app(Service([make_served(ALL)]), limits=Limits(connections=2))
    with listening(app) as address, ExitStack() as opened:
        url = f"http://{address[0]}:{address[1]}"
        for _ in range(10):
            opened.enter_context(socket.create_connection(address, timeout=LIMIT)).sendall(BODY + form)
        for path in ("/healthz", "/v1/models"):
            assert httpx.get(url + path, timeout=LIMIT).status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json=asking(), timeout=LIMIT).status_code == 200


@pytest.mark.parametrize("keys", [(), ("k" * 16,)])
def test_probes_by_address(make_served: Callable[..., ServedModel], keys: tuple[str, ...]) -> None:
    """Under --allow-host, kubelet and Prometheus ask by the pod's address, HAProxy in HTTP/1.0 without a Host."""
    hosts = allowed_hosts("127.0.0.1", has_keys=bool(keys), named=["guard.example.org"])
    app = make_app(Service([make_served(ALL)]), keys=Keys(keys), hosts=hosts)
    authorization = "".join(f"Authorization: Bearer {key}\r\n" for key in keys)
    with listening(app) as address:

        def status(path: str, host: str, more: str = "") -> int:
            with socket.create_connection(address, timeout=LIMIT) as connection:
                connection.sendall(f"GET {path} HTTP/1.0\r\n{host}{more}\r\n".encode())
                return int(connection.recv(100).split()[1])

        for path in ("/healthz", "/readyz", "/metrics"):
            for host in ("", "Host: 192.0.2.2:8151\r\n", "Host: [2001:db8::1]:8151\r\n"):
                assert status(path, host, authorization) == 200
                assert status(path, host) == (401 if keys and path == "/metrics" else 200)
            assert status(path, "Host: evil.example\r\n", authorization) == (200 if keys else 421)
        assert status("/v1/models", "Host: 192.0.2.2\r\n", authorization) == 421
        assert status("/v1/models", "Host: guard.example.org\r\n", authorization) == 200
        for origin, expected in (("http://evil.example", 403), ("null", 403), ("https://guard.example.org", 200)):
            more = f"Origin: {origin}\r\n{authorization}"
            assert status("/v1/models", "Host: guard.example.org\r\n", more) == expected

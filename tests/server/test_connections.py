"""Clients that are slow, or send half a request: they are hung up on, and shut no other client out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

import httpx
import pytest
from fastapi import FastAPI
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from semgrad_guard.server.app import Limits, make_app
from semgrad_guard.server.gate import Keys
from semgrad_guard.server.hosting import allowed_hosts
from semgrad_guard.server.service import ServedModel, Service
from tests.steps import LIMIT, until

from .conftest import ALL, asking, listening

Address = tuple[str, int]
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "
LONG = 3600


def ends(connection: socket.socket) -> bool:
    """Whether the server hangs up."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def is_healthy(url: str) -> bool:
    """Whether the server tells its health; on a busy machine a client may itself be too slow, and hung up on."""
    try:
        return httpx.get(url, timeout=LIMIT).status_code == 200
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return False


@pytest.mark.parametrize("sent", [b"", HALF, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /he"])
def test_a_head_must_come_in_time(make_served: Callable[..., ServedModel], sent: bytes) -> None:
    """Nothing, half a head, or half of a second one. The health of the server is reported meanwhile."""
    app = make_app(Service([make_served(ALL)]))
    with listening(app, head_seconds=0.2, idle_seconds=1) as address, ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection(address, timeout=LIMIT)) for _ in range(20)]
        for connection in slow:
            connection.sendall(sent)
        until(lambda: is_healthy(f"http://{address[0]}:{address[1]}/healthz"))
        assert all(map(ends, slow))


@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999\r\n\r\n"])
def test_bytes_that_drip_in_gain_no_time(make_served: Callable[..., ServedModel], before: bytes) -> None:
    """Of a head, or of a body that is not read behind an answer that was sent long ago."""
    app = make_app(Service([make_served(ALL)]))
    with (
        listening(app, head_seconds=0.3, idle_seconds=LONG) as address,
        socket.create_connection(address, timeout=0.05) as slow,
    ):
        slow.sendall(before or HALF)
        for _ in range(2000):
            try:
                slow.send(b"a")
                if not slow.recv(65536):
                    break
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                break
        else:
            pytest.fail("the connection lives on")


def test_half_sent_requests_give_way(make_served: Callable[..., ServedModel]) -> None:
    """However long they may wait: the oldest one goes for a new connection, and who is being answered stays."""
    app = make_app(Service([make_served(ALL)]))
    with listening(app, most=10, head_seconds=LONG, idle_seconds=LONG) as address, ExitStack() as opened:
        url = f"http://{address[0]}:{address[1]}"
        slow = list[socket.socket]()
        for _ in range(30):
            slow.append(opened.enter_context(socket.create_connection(address, timeout=LIMIT)))
            slow[-1].sendall(HALF)
            if len(slow) % 10 == 0:
                for path in ("/healthz", "/readyz", "/v1/models"):
                    assert httpx.get(url + path, timeout=LIMIT).status_code == 200
        assert all(map(ends, slow[:20]))


BODY = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("form", [b"Content-Length: 999\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_half_sent_bodies_give_way(make_served: Callable[..., ServedModel], form: bytes) -> None:
    """They neither fill the server's places for requests, nor hold all of its connections."""
    app = make_app(Service([make_served(ALL)]), limits=Limits(connections=2, body_seconds=LONG))
    with listening(app, most=10, head_seconds=LONG, idle_seconds=LONG) as address, ExitStack() as opened:
        url = f"http://{address[0]}:{address[1]}"
        slow = list[socket.socket]()
        for _ in range(30):
            slow.append(opened.enter_context(socket.create_connection(address, timeout=LIMIT)))
            slow[-1].sendall(BODY + form)
            if len(slow) % 10 == 5:
                for path in ("/healthz", "/v1/models"):
                    assert httpx.get(url + path, timeout=LIMIT).status_code == 200
                answer = httpx.post(f"{url}/v1/chat/completions", json=asking(), timeout=LIMIT)
                assert answer.status_code == 200
        assert all(map(ends, slow[:15]))


def test_a_client_that_takes_nothing_is_hung_up_on() -> None:
    app, ended = FastAPI(), threading.Event()
    much = StreamingResponse((bytes(100_000) for _ in range(10**6)), background=BackgroundTask(ended.set))
    app.add_route("/much", lambda _: much)
    with listening(app, taking_seconds=0.2) as address, socket.create_connection(address, timeout=LIMIT) as slow:
        slow.sendall(b"GET /much HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert ended.wait(LIMIT)
        assert ends(slow)


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

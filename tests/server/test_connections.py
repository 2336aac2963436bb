"""Connections to a listening server: half-sent requests take nobody's place, and probes come by address."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import httpx
import pytest

from semgrad_guard.server.app import Limits, make_app
from semgrad_guard.server.hosting import Keys, allowed_hosts
from semgrad_guard.server.service import ServedModel, Service
from tests.steps import LIMIT

from .conftest import ALL, asking, listening

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

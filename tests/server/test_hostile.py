"""A real server on loopback, and clients that mean it ill."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from semgrad_guard import LanguageModel
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.server import assembly
from semgrad_guard.server.app import make_app
from semgrad_guard.server.scheduler import Assignment
from semgrad_guard.server.service import ServedModel, Service

from .conftest import ALL, NONE, OPTIONS, asking, events, listening

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog
from tests.steps import LIMIT

CHAT = "/v1/chat/completions"
Make = Callable[..., ServedModel]


def app_of(served: ServedModel, **given: Any) -> Starlette:
    return make_app(Service([served], **given))


VARIANTS: list[dict[str, Any]] = [
    {}, {"n": 2, "temperature": 0.0}, {"logprobs": True, "top_logprobs": 5}, {"stop": ["zzzzzz"]}, {"seed": 3},
    {"logprobs": True, "n": 2, "user": "x"},
]  # fmt: skip


@pytest.mark.parametrize("mode", ["enforce", "raise"])
def test_a_withheld_draft_is_nowhere(
    make_served: Make, language_model: LanguageModel, tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    draft = language_model.generate("hello", OPTIONS).text
    spellings = {draft, json.dumps(draft)[1:-1], json.dumps(draft, ensure_ascii=False)[1:-1], draft[:5]}
    log = DecisionLog(tmp_path / "log.db", text=True)
    seen: list[str] = []
    with (
        caplog.at_level(logging.DEBUG, "semgrad_guard"),
        listening(app_of(make_served(NONE, mode=mode), log=log)) as address,
        httpx.Client(base_url="http://{}:{}".format(*address), timeout=LIMIT) as client,
    ):
        for variant, stream in itertools.product(VARIANTS, (False, True)):
            response = client.post(CHAT, json=asking(stream=stream, **variant))
            assert response.status_code == (200 if mode == "enforce" else 422), response.text
            seen += [response.text, str(response.headers)]
            for name in ("semgrad", "paragrad", "scoring_ms", "gnll"):
                assert f'"{name}":null' in response.text.replace(" ", "")
        seen += [client.get("/metrics").text, client.get("/v1/decisions").text]
        assert '"action":"abstain"' in seen[-1]
    seen += [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    seen += [caplog.text]
    for text, spelling in itertools.product(seen, spellings):
        assert spelling not in text


def test_a_client_that_hangs_up_in_mid_body_is_no_bug(make_served: Make, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with listening(app_of(make_served(NONE))) as address:
        with socket.create_connection(address, timeout=LIMIT) as connection:
            connection.sendall(head + b"content-length: 100\r\n\r\n{")
            time.sleep(0.2)  # until the server reads the body
        assert "internal_error" not in httpx.get("http://{}:{}/metrics".format(*address), timeout=LIMIT).text
    assert "internal_error" not in caplog.text


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Every path that this process opens from now on."""
    found, ends = list[str](), threading.Event()

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and not ends.is_set():
            found.append(str(given[0]))

    sys.addaudithook(audit)  # for as long as the process lives; after the test it notes nothing
    yield found
    ends.set()


def with_paths(path: str) -> list[dict[str, Any]]:
    """What a request may hold to have a template run, or a file read."""
    template = "{{ cycler.__init__.__globals__.os.popen('id').read() }}{% include '" + path + "' %}{{ 7919 * 7919 }}"
    url = f"file://{path}"
    contents: list[Any] = [
        template, path, url, [{"type": "image_url", "image_url": {"url": url}}],
        [{"type": "file", "file": {"file_id": path}}], [{"type": "input_audio", "input_audio": {"data": path}}],
    ]  # fmt: skip
    messages = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    unknown = ("chat_template", "template", "documents", "guided_grammar", "lora_path", "cache_dir", "images", "files")
    fields = [{name: given} for name in unknown for given in (template, path)]
    fields += [{"chat_template_kwargs": {"chat_template": template, "path": path}}]
    schemas: list[Any] = [{"$ref": url}, {"$ref": path}, {"$id": url, "$ref": "#/x"}]
    forms = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        for schema in schemas
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": template, "parameters": {"$ref": url}}}]
    return [*messages, *fields, *forms, {"tools": tools}, {"model": path}, {"model": f"../../..{path}"}]


def test_no_request_leads_to_a_file_or_a_template(make_served: Make, tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "secret.jinja").write_text("a secret of the operator's")
    path = str(tmp_path / "secret.jinja")
    del opened[:]
    with (
        listening(app_of(make_served(ALL, scores_texts=True))) as address,
        httpx.Client(base_url="http://{}:{}".format(*address), timeout=LIMIT) as client,
    ):
        for given in with_paths(path):
            for stream in (False, True):
                response = client.post(CHAT, json=asking(max_tokens=2, stream=stream) | given, timeout=LIMIT)
                assert response.status_code in (200, 400, 404), (given, response.text)
                if refused := [name for name in given if name.startswith("chat_template")]:
                    assert response.status_code == 400
                    assert refused[0] in response.json()["error"]["message"]
                for found in ("a secret", "uid=", str(7919 * 7919)):
                    assert found not in response.text
        for route in (f"/static{path}", "/static/..%2f..%2fapp.py", "/static/%2e%2e/app.py", f"/v1/models/{path}"):
            response = client.get(route)
            assert response.status_code in (400, 404)
            assert "import" not in response.text
        assert client.post(
            "/v1/score", json={"model": "tiny", "text": path, "messages": asking()["messages"]}
        ).is_success
    assert not [path for path in opened if "secret.jinja" in path]
    (tmp_path / "secret.jinja").read_text()
    assert [path for path in opened if "secret.jinja" in path], "what is opened is seen"


def test_who_still_waits_when_the_server_ends_is_told_so(
    make_served: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = make_served(NONE, mode="annotate")
    scheduler: Any = served.scheduler
    begun, ends = threading.Event(), threading.Event()

    def never(request: Any, _: Any) -> Any:
        if request.on_piece is not None:
            request.on_piece("a piece")
        begun.set()
        while True:
            current_stop().check()
            time.sleep(0.005)

    monkeypatch.setattr(Assignment, "of", never)
    monkeypatch.setattr(assembly, "DRAIN_SECONDS", 0)
    with (
        listening(app_of(served), ends=ends) as address,
        ThreadPoolExecutor(3) as pool,
        httpx.Client(base_url="http://{}:{}".format(*address), timeout=LIMIT) as client,
    ):
        live = pool.submit(client.post, CHAT, json=asking(stream=True))
        assert begun.wait(LIMIT)
        waiting = [pool.submit(client.post, CHAT, json=asking(stream=stream)) for stream in (False, True)]
        while scheduler.depth < 3:
            time.sleep(0.005)
        ends.set()
        assert events(live.result().text)[-1]["error"]["code"] == "shutting_down"
        for task in waiting:
            response = task.result()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in response.headers
    assert "Traceback" not in caplog.text
    assert "Exception in ASGI" not in caplog.text

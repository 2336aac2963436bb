"""Models by their hub id: a hub that is slow is waited for, one that does not answer is not asked again and again."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest
from huggingface_hub import constants

from semgrad_guard import LanguageModel
from semgrad_guard.errors import ModelNotFoundError
from tests.cli.helpers import saved

from .gguf_files import tiny, write

COMMIT = "0123456789abcdef0123456789abcdef01234567"
At = Callable[[str], None]


@pytest.fixture
def hub_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> At:
    """Sets where the hub is, as HF_ENDPOINT does, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def set_endpoint(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # knows the endpoint it began with
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")

    return set_endpoint


@contextmanager
def serving(folder: Path, *, delay: float = 0.0) -> Iterator[str]:
    """A hub with one repository, org/tiny, that takes `delay` seconds for every answer."""

    class Repository(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            time.sleep(delay)
            ours = self.path.startswith(("/org/tiny/resolve/", "/api/models/org/tiny"))
            content = self._content() if ours else b""
            self.send_response(200 if content else 404)
            if not content:
                self.send_header("X-Error-Code", "EntryNotFound" if ours else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')  # noqa: S324 - as the hub does
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def _content(self) -> bytes:
            path = folder / self.path.rpartition("/")[2]
            if not self.path.startswith("/api/"):
                return path.read_bytes() if path.is_file() else b""
            return b"" if "/tree/" in self.path else json.dumps({"id": "org/tiny", "sha": COMMIT}).encode()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Repository)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def hanging_up() -> Iterator[tuple[str, list[object]]]:
    """A hub that ends every connection at once, and who has asked."""
    requests: list[object] = []

    class HangsUp(BaseRequestHandler):
        def handle(self) -> None:
            requests.append(self.client_address)

    with ThreadingTCPServer(("127.0.0.1", 0), HangsUp) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()


def silent_port() -> str:
    """An address without a listener."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_without_a_network_it_fails_and_says_what_to_do(hub_at: At) -> None:
    hub_at(silent_port())
    with pytest.raises(ModelNotFoundError, match=r"nobody/nothing.*127\.0\.0\.1.* does not answer.*give a folder"):
        LanguageModel.from_pretrained("nobody/nothing")


def test_a_hub_that_hangs_up_is_asked_once(hub_at: At) -> None:
    """huggingface_hub itself asks again and again, for every file."""
    with hanging_up() as (endpoint, requests):
        hub_at(endpoint)
        with pytest.raises(ModelNotFoundError, match="does not answer"):
            LanguageModel.from_pretrained("nobody/nothing")
    assert len(requests) == 1


def test_offline_mode_is_named(hub_at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_at(silent_port())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
        LanguageModel.from_pretrained("nobody/nothing")


def test_a_slow_hub_is_waited_for_and_what_is_cached_needs_none(
    hub_at: At, tmp_path: Path, language_model: LanguageModel
) -> None:
    folder = saved(tmp_path / "tiny", language_model)
    with serving(folder, delay=0.05) as endpoint:
        hub_at(endpoint)
        fetched = LanguageModel.from_pretrained("org/tiny")
        with pytest.raises(ModelNotFoundError, match="Check the name or path"):
            LanguageModel.from_pretrained("org/other")
    with hanging_up() as (endpoint, requests):
        hub_at(endpoint)
        cached = LanguageModel.from_pretrained("org/tiny")
    assert len(requests) <= 1
    assert fetched.identity == cached.identity
    assert cached.identity.fingerprint == language_model.identity.fingerprint


def test_a_gguf_file_on_the_hub_is_named_with_its_repository(hub_at: At, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / "tiny-F32.gguf", tiny())
    with serving(folder) as endpoint:
        hub_at(endpoint)
        fetched = LanguageModel.from_pretrained("org/tiny:tiny-F32.gguf")
        with pytest.raises(ModelNotFoundError, match=r"cannot load 'org/tiny:tiny-Q8_0\.gguf'"):
            LanguageModel.from_pretrained("org/tiny:tiny-Q8_0.gguf")
        with pytest.raises(ModelNotFoundError, match=r"cannot load 'org/other:tiny\.gguf'.*Check the name"):
            LanguageModel.from_pretrained("org/other:tiny.gguf")
    cached = LanguageModel.from_pretrained("org/tiny:tiny-F32.gguf")
    assert fetched.identity == cached.identity
    assert (cached.name, cached.revision) == ("org/tiny:tiny-F32.gguf", COMMIT)
    with pytest.raises(ModelNotFoundError, match=r"Only the local cache.*does not answer"):
        LanguageModel.from_pretrained("org/tiny:tiny-Q8_0.gguf")

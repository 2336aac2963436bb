"""Models by their hub id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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
def serving(folder: Path) -> Iterator[str]:
    """A hub with one repository, org/tiny."""

    class Repository(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
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


def test_a_model_and_a_gguf_file_are_named_by_their_repository(
    hub_at: At, tmp_path: Path, language_model: LanguageModel
) -> None:
    """Fetched once, and found in the cache where the hub is gone."""
    folder = saved(tmp_path / "tiny", language_model)
    write(folder / "tiny-F32.gguf", tiny())
    names = ("org/tiny", "org/tiny:tiny-F32.gguf")
    with serving(folder) as endpoint:
        hub_at(endpoint)
        fetched = [LanguageModel.from_pretrained(name).identity for name in names]
        for name in ("org/other", "org/other:tiny.gguf", "org/tiny:tiny-Q8_0.gguf"):
            with pytest.raises(ModelNotFoundError, match=f"cannot load '{name}'.*Check the name"):
                LanguageModel.from_pretrained(name)
    assert [LanguageModel.from_pretrained(name).identity for name in names] == fetched
    assert fetched[0].fingerprint == language_model.identity.fingerprint
    assert (fetched[1].name, fetched[1].revision) == (names[1], COMMIT)


def test_a_hub_that_is_not_there(hub_at: At) -> None:
    hub_at("http://127.0.0.1:9")  # the port of discard
    with pytest.raises(ModelNotFoundError, match=r"cannot load 'nobody/nothing'.*Check the name"):
        LanguageModel.from_pretrained("nobody/nothing")

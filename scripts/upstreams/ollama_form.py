"""Ollama's `/api/chat`, in the form that its documentation gives, in front of a server with OpenAI's protocol.

Ollama itself is no Python package. Its own client and LangChain's `ChatOllama` talk to this in its place.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx

_OPTIONS = {"num_predict": "max_tokens", "temperature": "temperature", "seed": "seed", "stop": "stop", "top_p": "top_p"}
_ENTRY = ("token", "logprob", "bytes")


@contextmanager
def ollama_before(url: str) -> Generator[str]:
    """Its address, while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-ndjson")
            self.end_headers()
            for part in _parts(url, request):
                self.wfile.write(json.dumps(part).encode() + b"\n")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _parts(url: str, request: dict[str, Any]) -> Generator[dict[str, Any]]:
    options = request.get("options") or {}
    body = {name: options[own] for own, name in _OPTIONS.items() if options.get(own) is not None}
    body |= {"model": request["model"], "messages": request["messages"], "stream": False}
    if request.get("logprobs"):
        body |= {"logprobs": True, "top_logprobs": request.get("top_logprobs") or 0}
    found = httpx.post(f"{url}/chat/completions", json=body, timeout=300).raise_for_status().json()
    choice, usage = found["choices"][0], found["usage"]
    common = {"model": request["model"], "created_at": "2026-11-26T12:00:00Z"}
    entries = (choice.get("logprobs") or {}).get("content") or []
    text, written = choice["message"]["content"], ""
    for piece in map(_entry, entries):
        shown = piece["token"] if text.startswith(written + piece["token"]) else ""  # none of an end token
        written += shown
        yield {**common, "message": {"role": "assistant", "content": shown}, "done": False, "logprobs": [piece]}
    counts = {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
    end = {"done": True, "done_reason": choice["finish_reason"], **counts}
    yield {**common, "message": {"role": "assistant", "content": text[len(written) :]}, **end}


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    top = [{name: other.get(name) for name in _ENTRY} for other in entry.get("top_logprobs") or ()]
    return {**{name: entry.get(name) for name in _ENTRY}, "top_logprobs": top}

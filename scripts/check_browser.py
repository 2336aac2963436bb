"""Starts `semgrad-guard serve` (calibrated, letting nothing through, with a key), and drives its pages in Chromium.

python scripts/check_browser.py --browser .venv-browser/bin/python [--require] [--pictures output/browser]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from serving import serving

PAGES = Path(__file__).parent / "browser_pages"
SERVERS = {"OPEN": (False, ()), "STRICT": (False, ("--threshold", "0")), "KEYED": (True, ())}
"""Whether a key is needed, and the options."""
SETTINGS: dict[str, dict[str, object]] = {
    "OPEN": {"log_text": True},
    "SENTENCES": {"allow_score": True},
}
BY_SENTENCE = ("--threshold", "0.1", "--by", "sentence", "--on-doubt")
"""By the embedded model's scores the first sentence is let through, and the last one is not."""
SENTENCES = "The capital of Japan is Tokyo. It lies on a bay! Nobody knows how many rivers it has."


THOUGHT = "Japan's capital is a city on a bay."


class Writer(BaseHTTPRequestHandler):
    """Another server, whose every answer is those sentences: the embedded model writes no answer as long.

    To a question with the word "think" it writes its reasoning first.
    """

    def do_POST(self) -> None:
        """Answer a chat completion, streamed or not."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][-1]["content"]
        message = {"role": "assistant", "content": SENTENCES}
        if "think" in question:
            message["reasoning_content"] = THOUGHT
        part = {"delta" if body.get("stream") else "message": message, "index": 0, "finish_reason": "stop"}
        text = json.dumps({"choices": [part], "usage": None})
        kind, text = (
            ("text/event-stream", f"data: {text}\n\ndata: [DONE]\n\n")
            if body.get("stream")
            else ("application/json", text)
        )
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def another_server() -> Generator[str]:
    """The URL of a server that writes sentences, as long as this lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Writer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", required=True, help="the Python of the browser's environment")
    parser.add_argument("--require", action="store_true", help="a skipped test is a failure")
    parser.add_argument("--pictures", type=Path, default=Path("output/browser"), help="where screenshots are put")
    options, rest = parser.parse_known_args()
    key = secrets.token_hex(16)
    with ExitStack() as stack:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        before = ("--upstream", stack.enter_context(another_server()), "--scorer", "pocket", "--model", "writer")
        servers = SERVERS | {
            "SENTENCES": (False, (*before, "--threshold", "1e9")),
            "LIVE": (False, (*before, "--mode", "annotate")),
            "DROPPING": (False, (*before, *BY_SENTENCE, "drop")),
        }
        for name, (has_key, given) in servers.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            served = stack.enter_context(serving(folder, *given, key=key if has_key else "", **SETTINGS.get(name, {})))
            environment[f"SEMGRAD_GUARD_TEST_{name}"] = served.url
        environment["SEMGRAD_GUARD_TEST_KEY"] = key
        environment["SEMGRAD_GUARD_TEST_PICTURES"] = str(options.pictures.resolve())
        command = [options.browser, "-m", "pytest", "-c", str(PAGES / "pytest.ini"), str(PAGES), *rest]
        more = ["--require"] if options.require else []
        found = subprocess.run([*command, *more], env=environment, check=False)
    raise SystemExit(found.returncode)


if __name__ == "__main__":
    main()

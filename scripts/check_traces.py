"""`make check-traces`: the blocks of docs/traces.md, with real clients and servers, and the labels back into a log.

Langfuse has no server here: a recorder takes its client's scores and gives them back in the documented format.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Generator, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

ROOT = Path(__file__).parents[1]
START = 300
PERSON = {
    "Phoenix": """
import time
while not len(phoenix.spans.get_spans_dataframe(project_identifier="guard")):
    time.sleep(1)
label = {"annotation_name": "correct", "annotator_kind": "HUMAN", "label": "yes"}
phoenix.spans.add_span_annotation(span_id=span_id, sync=True, **label)
while len(phoenix.spans.get_span_annotations(span_ids=[span_id], project_identifier="guard")) < 2:
    time.sleep(1)
""",
    "MLflow": """
from mlflow.entities import AssessmentSource
mlflow.log_feedback(trace_id=span.trace_id, name="correct", value=True, source=AssessmentSource("HUMAN", "a person"))
unscored = {**record, "uncertainty": None, "status": "unscored", "reason": "the answer carries no score"}
assert mlflow.log_feedback(trace_id=span.trace_id, **mlflow_feedback(unscored)).error is not None
""",
    "Langfuse": """
langfuse.create_score(trace_id=span.trace_id, name="correct", value=1, data_type="BOOLEAN")
langfuse.flush()
""",
}
"""The labels of a person, which the pages do not show, between sending a score and reading labels."""


def blocks(heading: str, language: str) -> list[str]:
    """The code of a section of the page."""
    page = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
    section = page.partition(f"{heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


class Recorder(BaseHTTPRequestHandler):
    """Langfuse's HTTP format, for scores: POST /api/public/scores, GET /api/public/v3/scores."""

    scores: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        """Take in scores; anything else (spans) is accepted."""
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/api/public/scores":
            return self._send({}, 200)
        self.scores.extend(json.loads(body))
        return self._send({"message": "Accepted"}, 202)

    def do_GET(self) -> None:
        """The scores of a name."""
        (name,) = parse_qs(urlsplit(self.path).query)["name"]
        now = datetime.now(UTC).isoformat()
        dates = dict.fromkeys(("timestamp", "createdAt", "updatedAt"), now)
        about = {"projectId": "guard", "source": "API", "environment": "default", **dates}
        found = [
            {
                **{key: score[key] for key in ("id", "name", "dataType", "comment", "metadata") if key in score},
                "value": bool(score["value"]) if score["dataType"] == "BOOLEAN" else score["value"],
                "subject": {"kind": "trace", "id": score["traceId"]},
                **about,
            }
            for score in self.scores
            if score["name"] == name
        ]
        self._send({"data": found, "meta": {"limit": 50}}, 200)

    def _send(self, body: dict[str, Any], status: int) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def served(command: list[str], url: str, folder: Path, settings: Mapping[str, str]) -> Generator[None]:
    """A server that answers, for as long as this lasts."""
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log)
        try:
            until = time.monotonic() + START
            while time.monotonic() < until and process.poll() is None:
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own
                    break
                time.sleep(1)
            yield
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def place(tool: str, python: Path, folder: Path) -> Generator[dict[str, str]]:
    """The environment variables by which the tool's client finds its server."""
    port, programs = free_port(), python.parent
    url = f"http://127.0.0.1:{port}"
    if tool == "Phoenix":
        own = {"PHOENIX_WORKING_DIR": str(folder), "PHOENIX_PORT": str(port), "PHOENIX_GRPC_PORT": str(free_port())}
        own |= {"PHOENIX_TELEMETRY_ENABLED": "false", "PHOENIX_HOST": "127.0.0.1"}
        with served([str(programs / "phoenix"), "serve"], url, folder, own):
            yield {"PHOENIX_COLLECTOR_ENDPOINT": url}
    elif tool == "MLflow":
        own = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        store = ["--backend-store-uri", f"sqlite:///{folder}/store.db", "--artifacts-destination", str(folder)]
        with served(
            [str(programs / "mlflow"), "server", "--port", str(port), "--workers", "1", *store], url, folder, own
        ):
            yield {"MLFLOW_TRACKING_URI": url}
    else:
        recorder = ThreadingHTTPServer(("127.0.0.1", port), Recorder)
        threading.Thread(target=recorder.serve_forever, daemon=True).start()
        yield {"LANGFUSE_BASE_URL": url, "LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk"}
        recorder.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="the Python of the clients' environment")
    parser.add_argument("--only", choices=PERSON, help="one of the tools")
    given = parser.parse_args()
    python = given.traces.absolute()
    for tool in [given.only] if given.only else PERSON:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            own = "\n".join(
                [*blocks("# In Phoenix, MLflow, Langfuse", "python"), "import json; print(json.dumps(record))"]
            )
            run = subprocess.run([sys.executable, "-c", own], cwd=folder, capture_output=True, text=True, check=True)
            record = run.stdout.splitlines()[-1]
            send, read = blocks(f"\n## {tool}", "py")
            program = "\n".join([f"ask = lambda _: __import__('json').loads({record!r})", send, PERSON[tool], read])
            with place(tool, python, folder) as settings:
                paths = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
                subprocess.run([python, "-c", program], cwd=folder, env=paths, check=True, timeout=START)
            feedback = [sys.executable, "-m", "semgrad_guard.cli", "feedback", "labels.csv", "--log", "decisions.db"]
            shown = subprocess.run(feedback, cwd=folder, capture_output=True, text=True, check=True).stdout
            if "1 grades are in the log" not in shown:
                sys.exit(f"{tool}: {shown}")
            print(f"{tool}: a score was sent, and a label came back as feedback")


if __name__ == "__main__":
    main()

"""Servers side by side: tokens a second, waiting times, and the time to the first token.

    python benchmarks/serving.py [--model smollm2] [--servers hybridgrad max_probability transformers continuous]
        [--clients 1 8 32] [--others PYTHON] [--rounds 3] [--output serving.json]

Each server is a process of its own with one thread; this process is its clients. A client sends a question, waits for
the whole answer, and sends the next one; all servers get the same questions and take turns, round by round. A score's
name is our server with that score. `transformers` is `transformers serve` and `continuous` the same with
`--continuous-batching`, from the environment whose Python is --others (`make check-upstreams` makes one).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
from measuring import about, keep, parsed, parser, table

from semgrad_guard.named import folder_of
from semgrad_guard.questions.data import read_questions

OURS = ("hybridgrad", "max_probability")
THEIRS = ("transformers", "continuous")
START = 300  # seconds in which a server has to answer
FIRST_TOKENS = 8  # streamed requests of which the time to the first token is the median
Figures = dict[str, float]


def measured(name: str, given: argparse.Namespace) -> Iterator[Figures]:
    """One server's figures, by the number of clients."""
    with server(name, given) as (url, model):
        asyncio.run(load(url, model, 2, 1, given.tokens))  # the first look at the model, and warm caches
        first = first_token(url, model, given.tokens)
        for clients in given.clients:
            each = given.each * (8 if clients == 1 else 1)
            yield asyncio.run(load(url, model, clients, each, given.tokens)) | {"first_token": first}


async def load(url: str, model: str, clients: int, answers: int, tokens: int) -> Figures:
    """So many clients, one answer after the other."""
    asked, waits, written = iter(questions(clients * answers)), list[float](), list[int]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:

        async def client() -> None:
            for _ in range(answers):
                began = time.perf_counter()
                response = await http.post("/chat/completions", json=request(model, next(asked), tokens))
                response.raise_for_status()
                waits.append(time.perf_counter() - began)
                written.append(response.json()["usage"]["completion_tokens"])

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = time.perf_counter() - began
    waits.sort()
    p99 = waits[min(len(waits) - 1, int(0.99 * len(waits)))]
    return {"clients": clients, "tokens_a_second": sum(written) / seconds, "p50": statistics.median(waits), "p99": p99}


def first_token(url: str, model: str, tokens: int) -> float:
    """Median seconds to the first piece of text: one client, which keeps its connection and reads each answer out."""
    found: list[float] = []
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        for question in questions(FIRST_TOKENS):
            began = time.perf_counter()
            body = request(model, question, tokens) | {"stream": True}
            with http.stream("POST", "/chat/completions", json=body) as response:
                response.raise_for_status()
                pieces = [time.perf_counter() - began for line in response.iter_lines() if text(line)]
            found.append(pieces[0])
    return statistics.median(found)


def text(line: str) -> str | None:
    """The text of a stream's line."""
    if not line.startswith("data: {"):
        return None
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content")


def request(model: str, question: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0.0}


def questions(count: int) -> list[str]:
    rows = read_questions("pocket").rows
    return [rows[number % len(rows)].question for number in range(count)]


@contextmanager
def server(name: str, given: argparse.Namespace) -> Generator[tuple[str, str]]:
    """A server's address, and its name of the model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command, model = command_of(name, given)
    environment = {"HF_HUB_OFFLINE": "1", **os.environ, "OMP_NUM_THREADS": "1"}
    with (
        TemporaryFile() as out,
        subprocess.Popen(
            [*command, "--port", port], stdout=out, stderr=out, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            if not ready(f"http://127.0.0.1:{port}", process):
                out.seek(0)
                raise SystemExit(f"{name} does not answer:\n{out.read().decode(errors='replace')[-2000:]}")
            yield f"http://127.0.0.1:{port}/v1", model
        finally:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, how)
                    process.wait(30)


def command_of(name: str, given: argparse.Namespace) -> tuple[list[str], str]:
    """The command of a server, and the server's name of the model."""
    if name in OURS:
        options = ["--model", given.model, "--estimator", name, "--mode", "annotate", "--no-log"]
        return [sys.executable, "-m", "semgrad_guard.cli", "serve", *options], given.model
    if given.others is None:
        raise SystemExit(f"{name} takes --others, the Python of an environment that has it")
    weights = str(folder_of(given.model) if given.model in ("pocket", "smollm2") else given.model)
    options = ["serve", weights, "--dtype", "bfloat16", "--device", "cpu", "--host", "127.0.0.1"]
    batching = ["--continuous-batching"] if name == "continuous" else []
    return [str(given.others.parent / "transformers"), *options, *batching], weights


def ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the server answers in time."""
    for _ in range(START):
        for path in ("/readyz", "/health"):
            with suppress(httpx.HTTPError):
                if httpx.get(url + path, timeout=10).status_code == 200:
                    return True
        if process.poll() is not None:
            return False
        time.sleep(1)
    return False


def medians(points: list[dict[str, Any]]) -> str:
    """The table of the medians over the rounds: tokens a second, seconds."""
    keys = ("tokens_a_second", "p50", "p99", "first_token")
    lines: list[list[object]] = []
    for clients, name in dict.fromkeys((point["clients"], point["server"]) for point in points):
        same = [point for point in points if (point["clients"], point["server"]) == (clients, name)]
        lines.append([clients, name, *(f"{statistics.median(point[key] for point in same):.2f}" for key in keys)])
    return table(("clients", "server", "tokens a second", "p50, s", "p99, s", "first token, s"), lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--servers", nargs="*", choices=[*OURS, *THEIRS], default=list(OURS))
    options.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32])
    options.add_argument("--tokens", type=int, default=32, help="of an answer, at most (32)")
    options.add_argument(
        "--each", type=int, default=3, help="answers that each client waits for (3); one client: 8 times"
    )
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--others", type=Path, help="the Python of an environment with transformers[serving]")
    given = parsed(options)
    report: dict[str, Any] = {"machine": about(), "model": given.model, "tokens": given.tokens, "points": []}
    for number in range(given.rounds):
        for name in given.servers:
            for point in measured(name, given):
                report["points"].append({"server": name, "round": number, **point})
                print(json.dumps(report["points"][-1]), flush=True)
                keep(report, given.output)
    print(medians(report["points"]))


if __name__ == "__main__":
    main()

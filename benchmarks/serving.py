"""Servers side by side: answers a second, tokens a second, time to the first token, and waiting times.

    python benchmarks/serving.py --model smollm2 [--servers unguarded hybridgrad max_probability transformers]
        [--clients 1 8 32] [--threads 1 2] [--others PYTHON] [--rounds 3] [--output serving.json]

Each server is a process of its own; this process is its clients. A client sends a question, waits for the whole answer,
and sends the next one; all servers get the same questions. `unguarded` is our server with an estimator that looks at
nothing. `generate` is not a server: one padded batch of as many prompts after the other, in one process.

Other people's servers come from the environment whose Python is --others. `transformers` is `transformers serve` (`make
check-upstreams` makes such an environment), and `continuous` the same with `--continuous-batching`. `vllm` is the
program of `vllm serve`, and `vllm-hybridgrad` the same with our plugin (`make check-vllm`).

The servers take turns, round by round. Time to the first token is a streamed request's, one client at a time, next to
`model.stream` in a process of its own ("stream").
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from command import keep
from machine import about

from research.smollm2.questions import closed_book
from semgrad_guard.named import folder_of
from semgrad_guard.questions.data_files import require_writable

OURS = ("unguarded", "hybridgrad", "max_probability")
INSIDE = ("generate",)
WRITERS = ("transformers", "continuous", "vllm")
GUARDED = ("vllm-hybridgrad", "vllm-max_probability")
"""Our scores in `vllm serve` with the plugin."""
THEIRS = (*WRITERS, *GUARDED)
_START = 300  # seconds in which a server has to answer
_FIRST_TOKENS = 8  # streamed requests of which the time to the first token is the median
Figures = dict[str, float]


def main() -> None:
    given = _parser().parse_args()
    if given.serve:
        return _serve_unguarded(given.model, given.tokens, given.port)
    if given.inside:
        return _inside(given)
    if given.output:
        require_writable(given.output)
    report: dict[str, Any] = {"machine": about(), "model": given.model, "tokens": given.tokens, "points": []}
    for threads in given.threads:
        for number in range(given.rounds):
            for name in given.servers:
                for point in _measured(name, given, threads):
                    found = {"server": name, "threads": threads, "round": number, **point}
                    report["points"].append(found)
                    print(json.dumps(found), flush=True)
                    keep(report, given.output)
    print(table(report["points"]))
    return None


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2")
    made.add_argument("--servers", nargs="*", choices=[*OURS, *INSIDE, *THEIRS], default=[*OURS, *INSIDE])
    made.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32])
    made.add_argument("--threads", type=int, nargs="*", default=[1])
    made.add_argument("--tokens", type=int, default=32, help="of an answer, at most (32)")
    made.add_argument("--each", type=int, default=3, help="answers that each client waits for (3); one client: 8 times")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--others", type=Path, help="the Python of an environment with transformers[serving], or vllm")
    made.add_argument("--output", type=Path, help="where the figures go (JSON)")
    made.add_argument("--port", type=int, help=argparse.SUPPRESS)
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return made


# One server's measurements.


def _measured(name: str, given: argparse.Namespace, threads: int) -> Iterator[Figures]:
    if name in INSIDE:
        yield from _inside_of_a_process(given, threads)
        return
    with TemporaryDirectory() as folder, _server(name, given, threads, Path(folder)) as (url, model, process):
        asyncio.run(_load(url, model, 2, 1, given.tokens))  # the first look at the model, and warm caches
        yield {"first_token": _first_token(url, model, given.tokens)}
        for clients in given.clients:
            began = _cpu_seconds(process)
            found = asyncio.run(_load(url, model, clients, _each(given, clients), given.tokens))
            tokens = found["tokens_a_second"] * found["seconds"]
            yield found | {"cpu_ms_a_token": 1000 * (_cpu_seconds(process) - began) / tokens}


def _each(given: argparse.Namespace, clients: int) -> int:
    return given.each * (8 if clients == 1 else 1)


async def _load(url: str, model: str, clients: int, answers: int, tokens: int) -> Figures:
    """So many clients, one answer after the other."""
    questions, waits, written = iter(_questions(clients * answers)), list[float](), list[int]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:

        async def client() -> None:
            for _ in range(answers):
                began = time.perf_counter()
                response = await http.post("/chat/completions", json=_asking(model, next(questions), tokens))
                response.raise_for_status()
                waits.append(time.perf_counter() - began)
                written.append(response.json()["usage"]["completion_tokens"])

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return _figures(clients, time.perf_counter() - began, waits, written)


def _figures(clients: int, seconds: float, waits: Sequence[float], written: Sequence[int]) -> Figures:
    ordered = sorted(waits)
    return {
        "clients": clients,
        "seconds": seconds,
        "answers_a_second": len(waits) / seconds,
        "tokens_a_second": sum(written) / seconds,
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def _cpu_seconds(process: int) -> float:
    """Of a process and its children: independent of other work on the machine."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {process}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def _first_token(url: str, model: str, tokens: int) -> float:
    """Median seconds to the first piece of text: one client, which keeps its connection and hears each answer out."""
    found: list[float] = []
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        for question in _questions(_FIRST_TOKENS):
            began = time.perf_counter()
            body = _asking(model, question, tokens) | {"stream": True}
            with http.stream("POST", "/chat/completions", json=body) as response:
                response.raise_for_status()
                pieces = [time.perf_counter() - began for line in response.iter_lines() if _text(line)]
            found.append(pieces[0])
    return statistics.median(found)


def _text(line: str) -> str | None:
    if not line.startswith("data: {"):
        return None
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content")


def _asking(model: str, question: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0.0,
    }


def _questions(count: int) -> list[str]:
    rows = closed_book(Random(7))
    return [rows[number % len(rows)]["question"] for number in range(count)]


# The servers.


@contextmanager
def _server(name: str, given: argparse.Namespace, threads: int, folder: Path) -> Generator[tuple[str, str, int]]:
    """A server's address, its name of the model, and its process."""
    port = _free_port()
    command, model, more = _command(name, given, port, folder)
    output = folder / "said.txt"
    with (
        output.open("wb") as out,
        subprocess.Popen(
            command, stdout=out, stderr=out, env=_environment(threads) | more, start_new_session=True
        ) as process,
    ):
        try:
            _wait_for(f"http://127.0.0.1:{port}", process, output)
            yield f"http://127.0.0.1:{port}/v1", model, process.pid
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """A server and what it has started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, how)
            process.wait(30)


Start = tuple[list[str], str, dict[str, str]]
"""A command, the server's name of the model, and further variables of the environment."""


def _command(name: str, given: argparse.Namespace, port: int, folder: Path) -> Start:
    own = given.model
    if name == "unguarded":
        return [sys.executable, __file__, "--serve", "--model", own, "--port", str(port)], own, {}
    if name in OURS:
        options = [
            "--model",
            own,
            "--estimator",
            name,
            "--mode",
            "annotate",
            "--log",
            str(folder / "log.db"),
            "--port",
            str(port),
        ]
        return [sys.executable, "-m", "semgrad_guard.cli", "serve", *options], own, {}
    if given.others is None:
        raise SystemExit(f"{name} takes --others, the Python of an environment that has it")
    host, _, score = name.partition("-")
    settings = {"mode": "annotate", "estimator": score, "no_log": True, "max_tokens": given.tokens}
    weights = str(_folder(own))
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if host == "vllm":
        command, more = _vllm(given, weights, settings if score else None, folder)
        return [*command, *where], weights, more
    batching = ["--continuous-batching"] if name == "continuous" else []
    command = [str(given.others.parent / "transformers"), "serve", weights, "--dtype", "bfloat16", "--device", "cpu"]
    return [*command, *batching, *where], weights, {}


def _vllm(
    given: argparse.Namespace, weights: str, settings: dict[str, Any] | None, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """The program of `vllm serve` (the wheel for CPUs has no such script that starts), with our plugin where there are
    settings."""
    command = [str(given.others), "-m", "vllm.entrypoints.openai.api_server", "--model", weights]
    command += ["--dtype", "bfloat16", "--max-model-len", "1024", "--enforce-eager"]
    openmp = given.others.parents[1] / "lib" / "libiomp5.so"
    more = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    more |= {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    if settings is None:
        return command, more | {"VLLM_PLUGINS": ""}
    named = folder / "guard.json"
    named.write_text(json.dumps(settings))
    worker = ["--worker-extension-cls", "semgrad_guard.server.in_vllm.worker.ScoringWorker"]
    return [*command, *worker], more | {"VLLM_PLUGINS": "semgrad_guard", "SEMGRAD_GUARD_SETTINGS": str(named)}


def _folder(name: str) -> Path:
    return folder_of(name) if name in ("pocket", "smollm2") else Path(name)


def _environment(threads: int) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", **os.environ, "OMP_NUM_THREADS": str(threads)}


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait_for(url: str, process: subprocess.Popen[bytes], output: Path) -> None:
    for _ in range(_START):
        for path in ("/readyz", "/health"):
            with suppress(httpx.HTTPError):
                if httpx.get(url + path, timeout=10).status_code == 200:
                    return
        if process.poll() is not None:
            break
        time.sleep(1)
    raise SystemExit(f"{url} does not answer:\n{output.read_text(errors='replace')[-2000:]}")


def _serve_unguarded(name: str, tokens: int, port: int) -> None:
    """Our server with an estimator that looks at nothing."""
    from dataclasses import dataclass
    from typing import ClassVar

    from semgrad_guard import GenerationOptions, LanguageModel, Policy
    from semgrad_guard.engine.objective import Objective
    from semgrad_guard.guard import Terms
    from semgrad_guard.records import Score
    from semgrad_guard.server.app import make_app
    from semgrad_guard.server.hosting import listen, run
    from semgrad_guard.server.scheduler import Scheduler
    from semgrad_guard.server.service import ServedModel, Service

    @dataclass(frozen=True)
    class Nothing:
        name: ClassVar[str] = "nothing"
        title: ClassVar[str] = "Nothing"
        objective: ClassVar[Objective] = Objective(gradients=False)

        def settings(self) -> dict[str, Any]:
            return {}

        def __call__(self, evidence: object) -> Score:
            return Score(0.0, None)

    scheduler = Scheduler(LanguageModel.from_pretrained(name), Nothing())
    served = ServedModel(
        name=name,
        scheduler=scheduler,
        terms=Terms(policy=Policy(threshold=1.0), mode="annotate"),
        options=GenerationOptions(max_tokens=tokens),
    )
    run(make_app(Service([served])), listen("127.0.0.1", port), connections=256)


# Without a server.


def _inside_of_a_process(given: argparse.Namespace, threads: int) -> list[Figures]:
    command = [sys.executable, __file__, "--inside", "--model", given.model, "--tokens", str(given.tokens)]
    command += ["--each", str(given.each), "--clients", *map(str, given.clients)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=_environment(threads)).stdout
    return [json.loads(line) for line in printed.splitlines()]


def _inside(given: argparse.Namespace) -> None:
    """`model.stream`'s first piece, and transformers' own `generate` in padded batches."""
    from transformers import AutoModelForCausalLM

    from semgrad_guard import GenerationOptions, LanguageModel

    model, options = LanguageModel.from_pretrained(given.model), GenerationOptions(max_tokens=given.tokens)
    plain = AutoModelForCausalLM.from_pretrained(_folder(given.model), dtype="auto")
    model.generate("Hello", options)
    firsts = [_timed(lambda q=q: _first_piece(model, q, options)) for q in _questions(_FIRST_TOKENS)]
    print(json.dumps({"first_token": statistics.median(firsts)}))
    for clients in given.clients:
        questions, waits, written = _questions(clients * _each(given, clients)), list[float](), list[int]()
        spent = time.process_time()
        for start in range(0, len(questions), clients):
            prompts = [model.render(question).ids for question in questions[start : start + clients]]
            began = time.perf_counter()
            written += _generated(plain, prompts, given.tokens)
            waits += [time.perf_counter() - began] * clients
        cpu = {"cpu_ms_a_token": 1000 * (time.process_time() - spent) / sum(written)}
        print(json.dumps(_figures(clients, sum(waits) / clients, waits, written) | cpu))


def _first_piece(model: Any, question: str, options: Any) -> None:
    stream = model.stream(question, options)
    next(iter(stream))
    stream.close()


def _generated(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[int]:
    """How many tokens each answer of one padded batch has."""
    import torch

    named, width = model.generation_config.eos_token_id, max(map(len, prompts))
    ends = {named} if isinstance(named, int) else set(named)
    pad = min(ends)
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=pad)
    rows = [row[width:].tolist() for row in found]
    return [next((place + 1 for place, token in enumerate(row) if token in ends), len(row)) for row in rows]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# Output.


def table(points: Sequence[dict[str, Any]]) -> str:
    """Medians over the rounds, as Markdown: tokens and answers a second, seconds."""
    keys = dict.fromkeys((p["threads"], p["clients"], p["server"]) for p in points if "clients" in p)
    titles = (
        "threads", "clients", "server", "tokens a second", "answers a second", "CPU ms a token", "p50", "p99",
        "first token",
    )  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
    for threads, clients, server in keys:
        same = [p for p in points if (p["threads"], p["server"]) == (threads, server)]
        first = statistics.median([p["first_token"] for p in same if "first_token" in p])
        of = [p for p in same if p.get("clients") == clients]
        rate, answers, cpu, p50, p99 = (
            statistics.median([p[key] for p in of])
            for key in ("tokens_a_second", "answers_a_second", "cpu_ms_a_token", "p50", "p99")
        )
        rates, seconds = f"{rate:.1f} | {answers:.2f} | {cpu:.1f}", f"{p50:.2f} s | {p99:.2f} s"
        lines.append(f"| {threads} | {clients} | {server} | {rates} | {seconds} | {1000 * first:.0f} ms |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

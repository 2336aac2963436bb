"""The rate of another server, and of the guard in front of it that scores by its log-probabilities.

    python benchmarks/reported.py --url http://127.0.0.1:8001/v1 --model NAME [--pid PID] [--clients 1 4] [--rounds 8]

The server runs already. The ways take turns within each round, with the same questions: `plain` requests to it,
`logprobs` requests to it that ask for log-probabilities, and `guarded` ones through `semgrad-guard serve --upstream`
without a copy of the model, which enforces and lets every answer through. A rate is a median over the rounds, a share
the median of the rounds' shares. With --pid, the server's process, there is a share by CPU seconds as well: those of
the server over those of the server and the guard, for guarded answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from command import keep
from machine import about
from serving import _cpu_seconds, _end, _free_port, _wait_for

WAYS = ("plain", "logprobs", "guarded")


def main() -> None:
    given = _parser().parse_args()
    options = (
        "--upstream",
        given.url,
        "--model",
        given.model,
        "--threshold",
        "1000",
        "--max-tokens",
        str(given.tokens),
    )
    with (
        TemporaryDirectory() as folder,
        started(["serve", "--log", f"{folder}/log.db", *options], Path(folder) / "said.txt") as (guard, pid),
    ):
        urls = {"plain": given.url, "logprobs": given.url, "guarded": f"{guard}/v1"}
        report: dict[str, Any] = {"machine": about(), "model": given.model, "tokens": given.tokens, "points": []}
        for way in WAYS:
            asyncio.run(_rate(urls[way], way, given, clients=1, seed=-1))
        for clients in given.clients:
            for number in range(given.rounds):
                point: dict[str, float] = {"clients": clients}
                for way in WAYS:
                    began = _cpu(given.pid), _cpu(pid)
                    point[way] = asyncio.run(_rate(urls[way], way, given, clients=clients, seed=number))
                    point[f"{way}_cpu"] = _cpu(given.pid) - began[0]
                    point["guard_cpu"] = _cpu(pid) - began[1]  # the last way's
                report["points"].append(point)
                keep(report, given.output)
            points = [point for point in report["points"] if point["clients"] == clients]
            rates = {way: statistics.median(point[way] for point in points) for way in WAYS}
            shares = {way: statistics.median(point["guarded"] / point[way] for point in points) for way in WAYS[:2]}
            found = {"clients": clients, "answers_a_second": rates, "guarded_of": shares}
            if given.pid is not None:
                spent = [(point["guarded_cpu"], point["guard_cpu"]) for point in points]
                found["by_cpu"] = statistics.median(server / (server + guard) for server, guard in spent)
            print(json.dumps(found), flush=True)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--url", required=True)
    made.add_argument("--model", required=True)
    made.add_argument("--pid", type=int)
    made.add_argument("--clients", type=int, nargs="*", default=[1, 4])
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--each", type=int, default=2, help="answers that each client waits for in a round (2)")
    made.add_argument("--tokens", type=int, default=32)
    made.add_argument("--output", type=Path)
    return made


@contextmanager
def started(options: list[str], output: Path) -> Generator[tuple[str, int]]:
    """The address of our server, and its process."""
    port = _free_port()
    command = [sys.executable, "-m", "semgrad_guard.cli", *options, "--port", str(port)]
    with (
        output.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            _wait_for(f"http://127.0.0.1:{port}", process, output)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            _end(process)


def _cpu(pid: int | None) -> float:
    return 0.0 if pid is None else _cpu_seconds(pid)


async def _rate(url: str, way: str, given: argparse.Namespace, *, clients: int, seed: int) -> float:
    """Answers a second."""
    more = {"logprobs": True, "top_logprobs": 5} if way == "logprobs" else {}
    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:

        async def one(client: int) -> None:
            for number in range(given.each):
                question = f"Tell me fact {number} about the number {1000 * (seed + 2) + client}."
                body = {"model": given.model, "messages": [{"role": "user", "content": question}], **more}
                body |= {"temperature": 0, "max_tokens": given.tokens}
                (await http.post(f"{url}/chat/completions", json=body)).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*map(one, range(clients)))
        return clients * given.each / (time.perf_counter() - began)


if __name__ == "__main__":
    main()

"""Starts `semgrad-guard serve`, and has schemathesis send it requests inside and outside its OpenAPI schema.

python scripts/check_fuzz.py --fuzzer .venv-fuzz/bin/python [--requests 100000] [--minutes 60]

Fails where a request is answered with a server's error, in another form than OpenAI's, or not within a minute, and
where the server's log names a bug. Finished rounds are in a file, and are not repeated: the same command goes
on where it was stopped. One that ends before so many requests were sent has not passed; its status is 2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path

from load_checks.results import Check, report
from load_checks.servers import serving
from load_checks.small_model import small_model
from pydantic import BaseModel

FUZZ = Path(__file__).parent / "fuzzing" / "fuzz.py"
EXAMPLES = 30
"""Requests of each kind to each route in one round."""


class Round(BaseModel):
    """The results of one round's requests; `seed` repeats them, and is None for the server's own problems."""

    seed: int | None
    at: datetime
    routes: int
    statuses: dict[str, int]
    problems: list[str]


def fuzzed(fuzzer: str, url: str, *, model: str, seed: int) -> Round:
    """One round."""
    command = [fuzzer, FUZZ, url.removesuffix("/v1"), "--model", model, "--seed", seed, "--examples", EXAMPLES]
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)  # noqa: S603
    if found.returncode != 0:
        raise SystemExit(f"the fuzzer ended with {found.returncode} at seed {seed}: {found.stderr[-2000:]}")
    return Round(seed=seed, at=datetime.now(UTC), **json.loads(found.stdout.splitlines()[-1]))


def rounds(fuzzer: str, url: str, *, model: str, workers: int, done: set[int | None]) -> Iterator[Round]:
    """Round after round, so many at once, without those that are done."""
    seeds = (seed for seed in count(1) if seed not in done)
    with ThreadPoolExecutor(workers) as pool:
        while True:
            yield from (
                future.result()
                for future in as_completed(
                    pool.submit(fuzzed, fuzzer, url, model=model, seed=seed) for seed in islice(seeds, workers)
                )
            )


def sent(done: Sequence[Round]) -> int:
    """How many requests were sent."""
    return sum(number for round_ in done for status, number in round_.statuses.items() if status != "sent again")


def go_on(done: list[Round], options: argparse.Namespace) -> None:
    """More rounds, until there are enough requests, or the time is over; each is written down when it is done."""
    options.state.parent.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes

    def add(found: Round) -> None:
        done.append(found)
        with options.state.open("a", encoding="utf-8") as file:
            file.write(found.model_dump_json() + "\n")
        print(f"{sent(done)} requests, {sum(len(round_.problems) for round_ in done)} problems", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = small_model(folder / "small")
        given = ("--model", model, "--threshold", "0.5", "--max-tokens", 8)
        with serving(folder, *given, allow_override=["mode"]) as server:
            known = {round_.seed for round_ in done}
            for found in rounds(options.fuzzer, server.url, model=model.name, workers=options.workers, done=known):
                add(found)
                if sent(done) >= options.requests or time.monotonic() > ends:
                    break
            unwritten = server.metrics().get("semgrad_guard_log_failures_total", 0.0)
            problems = [] if server.end() == 0 else ["the server did not end by itself"]
            problems += server.loud() + ([f"{unwritten:g} decisions were not written down"] if unwritten else [])
    if problems:
        add(Round(seed=None, at=datetime.now(UTC), routes=0, statuses={}, problems=problems))


def read(state: Path) -> list[Round]:
    """The rounds that are done."""
    if not state.exists():
        return []
    return [Round.model_validate_json(line) for line in state.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fuzzer", required=True, help="the Python of the fuzzer's environment")
    parser.add_argument("--requests", type=int, default=100_000, help="how many requests at least")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so many minutes")
    parser.add_argument("--workers", type=int, default=2, help="rounds at once")
    parser.add_argument("--state", type=Path, default=Path("output/fuzz.jsonl"), help="the record of the run")
    parser.add_argument("--output", type=Path, default=Path("output/fuzz.json"))
    options = parser.parse_args()
    done = read(options.state)
    if sent(done) < options.requests:
        go_on(done, options)
    statuses = sum((Counter(round_.statuses) for round_ in done), Counter[str]())
    figures = {
        "requests": sent(done),
        "of": options.requests,
        "routes": max((round_.routes for round_ in done), default=0),
    }
    problems = [problem for round_ in done for problem in round_.problems]
    holds = report([Check("fuzzed", figures | dict(sorted(statuses.items())), problems)], options.output)
    if holds and sent(done) < options.requests:
        print(f"not done: {sent(done)} of {options.requests} requests; run the same command again to resume")
        raise SystemExit(2)
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()

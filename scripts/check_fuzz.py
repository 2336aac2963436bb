"""Starts `semgrad-guard serve`, and has schemathesis send it what its OpenAPI schema allows, and what it does not.

python scripts/check_fuzz.py --fuzzer .venv-fuzz/bin/python [--requests 100000] [--output output/fuzz.json]

Fails where a request is answered with a server's error, in another form than OpenAI's, or not within a minute, and
where the server's log names a bug.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count, islice
from pathlib import Path
from typing import Any

from load_checks.results import Check, report
from load_checks.servers import serving
from load_checks.small_model import small_model

FUZZ = Path(__file__).parent / "fuzzing" / "fuzz.py"
EXAMPLES = 30
"""Requests of each kind to each route in one round."""


def fuzzed(fuzzer: str, url: str, *, model: str, seed: int) -> dict[str, Any]:
    """What became of the requests of one round."""
    command = [fuzzer, FUZZ, url.removesuffix("/v1"), "--model", model, "--seed", seed, "--examples", EXAMPLES]
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)  # noqa: S603
    if found.returncode != 0:
        raise SystemExit(f"the fuzzer ended with {found.returncode} at seed {seed}: {found.stderr[-2000:]}")
    return json.loads(found.stdout.splitlines()[-1])


def rounds(fuzzer: str, url: str, *, model: str, workers: int) -> Iterator[dict[str, Any]]:
    """Round after round, so many at once."""
    seeds = count(1)
    with ThreadPoolExecutor(workers) as pool:
        while True:
            yield from (
                each.result()
                for each in as_completed(
                    pool.submit(fuzzed, fuzzer, url, model=model, seed=seed) for seed in islice(seeds, workers)
                )
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fuzzer", required=True, help="the Python of the fuzzer's environment")
    parser.add_argument("--requests", type=int, default=100_000, help="how many requests at least")
    parser.add_argument("--minutes", type=float, default=600, help="end after so many minutes at the latest")
    parser.add_argument("--workers", type=int, default=2, help="rounds at once")
    parser.add_argument("--output", type=Path, default=Path("output/fuzz.json"))
    options = parser.parse_args()
    statuses, problems = Counter[str](), list[str]()
    ends = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = small_model(folder / "small")
        given = ("--model", model, "--threshold", "0.5", "--max-tokens", 8, "--allow-override", "mode")
        with serving(folder, *given) as server:
            for found in rounds(options.fuzzer, server.url, model=model.name, workers=options.workers):
                statuses.update(found["statuses"])
                problems += found["problems"]
                print(f"{statuses.total()} requests, {len(problems)} problems: {dict(statuses)}", flush=True)
                if statuses.total() >= options.requests or time.monotonic() > ends:
                    break
            bugs = sum(value for name, value in server.metrics().items() if name == "semgrad_guard_log_failures")
            if server.end() != 0:
                problems.append("the server did not end by itself")
            problems += server.loud() + ([f"{bugs:g} decisions were not written down"] if bugs else [])
    figures = {"requests": statuses.total(), **dict(sorted(statuses.items()))}
    raise SystemExit(0 if report([Check("fuzzed", figures, problems)], options.output) else 1)


if __name__ == "__main__":
    main()

"""The price of concurrent callers: CPU seconds over those of one batch of as many, and of an earlier version's.

    python benchmarks/callers.py [--model smollm2] [--against PYTHON] [--rounds 5] [--ways ...] [--output callers.json]

Each environment is a process of its own, and they take turns, way by way: a ratio is of two neighbours in time. The
Python of --against runs another version of the package. A way is `one` call of a guard, `calls` that come together
(`acall`), or one `batch` of them; `sampled` is one call that draws ten samples for its score.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from measuring import about, cpu_seconds, keep, over, parsed, parser, ranged, spread, table

COUNTRIES = ("France", "Mongolia", "Peru", "Japan", "Kenya", "Norway", "Chile", "Egypt")
PLACES = ("capital", "largest city", "longest river", "national animal")
QUESTIONS = [f"What is the {name} of {country}?" for name in PLACES for country in COUNTRIES]
WAYS = ("one", "calls8", "batch8", "calls32", "batch32", "sampled")
RATIOS = (("calls8", "batch8"), ("calls32", "batch32"))


def works(name: str, tokens: int) -> dict[str, Callable[[], object]]:
    """The ways of this environment's package."""
    from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy
    from semgrad_guard.estimators import Sampling, SemanticEntropy

    model = LanguageModel.from_pretrained(name)
    options, policy = GenerationOptions(max_tokens=tokens), Policy(threshold=1e9)
    guard = Guard(model, policy, options=options)
    drawing = SemanticEntropy(plan=Sampling(count=10, max_tokens=tokens))
    sampled = Guard(model, policy, options=options, estimator=drawing)

    async def together(count: int) -> None:
        await asyncio.gather(*map(guard.acall, QUESTIONS[:count]))

    def wide(work: Callable[[], object], rows: int | None) -> None:
        model.max_batch = rows
        work()

    return {
        "one": lambda: wide(lambda: guard(QUESTIONS[0]), None),
        "calls8": lambda: wide(lambda: asyncio.run(together(8)), None),
        "batch8": lambda: wide(lambda: guard.batch(QUESTIONS[:8]), None),
        "calls32": lambda: wide(lambda: asyncio.run(together(32)), 32),
        "batch32": lambda: wide(lambda: guard.batch(QUESTIONS[:32]), 32),
        "sampled": lambda: wide(lambda: sampled(QUESTIONS[0]), None),
    }


def serve(name: str, tokens: int) -> None:
    """Run the ways that come by standard input, and answer with their CPU seconds."""
    import torch

    torch.set_num_threads(1)
    ways = works(name, tokens)
    ways["one"]()  # the self-check
    for line in sys.stdin:
        print(json.dumps(cpu_seconds(ways[line.strip()])), flush=True)


class Environment:
    """A process with one version of the package."""

    def __init__(self, python: str, arguments: argparse.Namespace) -> None:
        command = [python, __file__, "--serve", "--model", arguments.model, "--max-tokens", str(arguments.max_tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, way: str) -> float:
        """CPU seconds of one way, once."""
        assert self._process.stdin
        assert self._process.stdout
        print(way, file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def ratios(seconds: dict[str, list[float]], against: dict[str, list[float]] | None) -> dict[str, list[float]]:
    """Round by round: concurrent calls over a batch, and every way over the earlier version's."""
    found = {
        f"{one}/{other}": over(seconds[one], seconds[other]) for one, other in RATIOS if {one, other} <= {*seconds}
    }
    return found | {f"{way}/earlier": over(own, against[way]) for way, own in seconds.items() if against is not None}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--max-tokens", type=int, default=24)
    options.add_argument("--against", help="the Python of an environment with an earlier version")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parsed(options)
    if arguments.serve:
        serve(arguments.model, arguments.max_tokens)
        return
    pythons = [sys.executable, *([arguments.against] if arguments.against else [])]
    environments = [Environment(python, arguments) for python in pythons]
    seconds: list[dict[str, list[float]]] = [{way: [] for way in arguments.ways} for _ in environments]
    for _ in range(arguments.rounds):
        for way in arguments.ways:
            for environment, found in zip(environments, seconds, strict=True):
                found[way].append(environment.seconds(way))
    for environment in environments:
        environment.close()
    own, against = seconds[0], seconds[1] if arguments.against else None
    found = ratios(own, against)
    report: dict[str, Any] = {"machine": about(), "max_tokens": arguments.max_tokens, "seconds": own, "ratios": found}
    keep(report if against is None else report | {"earlier": against}, arguments.output)
    shown = [(way, ranged(spread(values))) for way, values in found.items()]
    print(table(("ratio", "median (range)"), shown))


if __name__ == "__main__":
    main()

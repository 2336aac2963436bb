"""Where the time of a score goes, part by part, next to the floor of each part.

    python benchmarks/phases.py [--dtype bfloat16]

One thread, random weights; CPU seconds, medians. The parts are the replay's forward pass (attention, norms and
activations: the linear maps' outputs were kept), the entropies from the kept logits, the sensitivities A, the seed A W,
ParaGrad's products A^T H, and the backward pass through the upper layers; the rest is bookkeeping.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import command
import torch
from floor import scoring_floor
from machine import about, cpu_seconds, measured_rates
from shapes import USUAL, build
from tables import table
from ways import Bench

from semgrad_guard.engine.replay.replayer import Replayer
from semgrad_guard.engine.scoring import head
from semgrad_guard.engine.scores.head import Logits, Products

PARTS: dict[str, tuple[Any, str]] = {
    "replay": (Replayer, "captured"),
    "entropies": (Logits, "survey"),
    "A": (head, "_sensitivity"),
    "seed A W": (head, "add_product"),
    "ParaGrad": (Products, "add"),
    "backward": (torch.autograd, "grad"),
}


@contextmanager
def watched(seconds: dict[str, float]) -> Iterator[None]:
    """For the time of a block, add up the CPU seconds of every part."""
    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            usual = getattr(owner, name)
            setattr(owner, name, _timed(usual, part, seconds))
            stack.callback(setattr, owner, name, usual)
        yield


def _timed(usual: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = usual(*args, **kwargs)
        seconds[part] = seconds.get(part, 0.0) + time.process_time() - began
        return result

    return call


def measure(bench: Bench, rounds: int) -> dict[str, float]:
    """CPU seconds of each part and of the whole, medians over the rounds."""
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        seconds: dict[str, float] = {}
        with watched(seconds):
            whole = cpu_seconds(bench.captured)
        found.append(seconds | {"rest": whole - sum(seconds.values()), "whole": whole})
    return {part: statistics.median(row[part] for row in found) for part in found[0]}


def main() -> None:
    options = command.parser(__doc__, rounds="how often each answer is scored")
    options.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="float32")
    arguments = command.parsed(options)
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    model, rates = build(arguments.shape, dtype), measured_rates(dtype)
    report: dict[str, Any] = {"shape": arguments.shape, "dtype": arguments.dtype, "machine": about(), "rows": []}
    columns, lines = (*PARTS, "rest", "whole"), list[tuple[str, ...]]()
    for setting in USUAL:
        seconds = measure(Bench(model, setting), arguments.rounds)
        least = scoring_floor(model.config, setting, rates, dtype.itemsize)
        floors = {"seed A W": least.seed, "ParaGrad": least.paragrad, "backward": least.backward, "whole": least.total}
        report["rows"].append({"setting": str(setting), "seconds": seconds, "floors": floors})
        shown = (f"{seconds[c]:.3f}" + (f" ({floors[c]:.3f})" if c in floors else "") for c in columns)
        lines.append((str(setting), *shown))
        command.keep(report, arguments.output)
        print(f"{setting} done, {len(lines)} of {len(USUAL)}", file=sys.stderr)
    print("\n".join(table(("prompt/answer", *columns), lines)))


if __name__ == "__main__":
    main()

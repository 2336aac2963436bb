"""What the simulation says for 1, 8 and 64 GPUs that serve a model of 8 billion weights. Nothing here ran on a GPU.

    python benchmarks/scale/gpus.py [benchmarks/scale/measured.json] [--output docs/scale-gpus.svg]
        [--sensitivity docs/scale-assumptions.svg] [--count 300]

How long a step, a prompt and a score take is arithmetic (`RooflineServices`); what the host takes beside was measured
here on a CPU, with a model of as many layers that computes next to nothing. Traffic is drawn: prompts of 500 tokens and
answers of 100 on average. `--count` is how many requests each GPU gets in each simulation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.ticker import PercentFormatter
from panels import drawn, legend
from predict import LOOKS, MEASURED
from services import H100, LLAMA_8B, Accelerator, Host, Left, Measured, Question, RooflineServices
from simulation import ROWS, Run, Server, closed, opened

from semgrad_guard.evaluation.figures.plots import LINE, MUTED, POINT

GPUS = (1, 8, 64)
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
"""Shares of what the unguarded server can answer at most."""
USUAL = 0.7
_LEAST = 2000  # requests of which a 99th percentile is taken


@dataclass(frozen=True)
class World:
    """Everything that is assumed: machines, replicas and what is asked of them (lengths in tokens, on average).

    `left` is what writing leaves to a score (see `RooflineServices`).
    """

    gpu: Accelerator
    host: Host
    rows: int = ROWS
    prompt: float = 500
    answer: float = 100
    doubts: float = 0.25
    left: Left = "states"

    def server(self, cost: str, *, gpus: int = 1) -> Server:
        """So many GPUs, each with a replica."""
        services = RooflineServices(LLAMA_8B, self.gpu, self.host, cost, self.doubts, self.left)
        return Server(services, replicas=gpus, rows=self.rows, around=0.005)

    def draw(self, random: Random) -> Question:
        """A question and its answer: lengths around their means, answers with a long tail."""
        prompt = random.uniform(0.5, 1.5) * self.prompt
        return Question(prompt=max(1, round(prompt)), answer=1 + round(random.expovariate(1 / self.answer)))

    @cache  # noqa: B019  # a handful of frozen worlds, as long as the command runs
    def capacity(self, cost: str, *, count: int = 300) -> float:
        """Answers a second of one GPU that always has twice the requests that it can write at once."""
        random, clients = Random(0), 2 * self.rows
        each = max(4, count // clients)
        questions = [self.draw(random) for _ in range(clients * each)]
        return closed(self.server(cost), questions, clients=clients, each=each).answers_a_second

    def under_load(self, cost: str, *, rate: float, gpus: int, count: int) -> Run:
        """So many requests a second for each GPU, arriving at random; the first fifth does not count."""
        server, number = self.server(cost, gpus=gpus), max(_LEAST, count * gpus)
        run = opened(server, self.draw, rate=rate * gpus, count=number, seed=gpus)
        return run.after(number / (rate * gpus) / 5)


def worlds(host: Host) -> dict[str, World]:
    """Our engine's own loop, and an engine whose steps are recorded once and played back (vLLM's CUDA graphs): as the
    plugin for `vllm serve` scores today, and as it would if scores could read what vLLM's own passes leave."""
    graphs = host.model_copy(update={"step": 0.001})
    return {
        f"our engine, {ROWS} at once": World(H100, host),
        "vLLM's, scores read anew": World(H100, graphs, rows=256, left="nothing"),
        "vLLM's, if from its cache": World(H100, graphs, rows=256, left="cache"),
    }


def capacities(world: World, count: int) -> str:
    """What one GPU answers at most, by score."""
    lines = ["| score | answers a second, at most | cost of guarding |", "| --- | --- | --- |"]
    for cost in LOOKS:
        found = world.capacity(cost, count=count)
        lines.append(f"| {cost} | {found:.1f} | {max(0.0, cost_of(world, cost, count)):.1%} |")
    return "\n".join(lines)


def waits(world: World, count: int) -> str:
    """How long requests take at the usual load, by score and number of GPUs; no number where queues grow for ever."""
    plain = world.capacity("unguarded", count=count)
    lines = ["| GPUs | score | requests a second | p50, s | p99, s |", "| --- | --- | --- | --- | --- |"]
    for gpus in GPUS:
        for cost in LOOKS:
            waited = "the queue grows | "
            if USUAL * plain < world.capacity(cost, count=count):
                run = world.under_load(cost, rate=USUAL * plain, gpus=gpus, count=count)
                waited = " | ".join(f"{run.percentile(share):.2f}" for share in (0.5, 0.99))
            lines.append(f"| {gpus} | {cost} | {USUAL * plain * gpus:.0f} | {waited} |")
    return "\n".join(lines)


# What if an assumption is wrong.

FACTOR = 1.5
ASSUMPTIONS: dict[str, Callable[[World, float], World]] = {
    "memory bandwidth reached": lambda world, by: replace(
        world, gpu=replace(world.gpu, memory_share=world.gpu.memory_share * by)
    ),
    "operations reached": lambda world, by: replace(
        world, gpu=replace(world.gpu, compute_share=world.gpu.compute_share * by)
    ),
    "host's part of a step": lambda world, by: replace(world, host=_host(world.host, step=by)),
    "host's part of a score": lambda world, by: replace(world, host=_host(world.host, score=by)),
    "tokens in a prompt": lambda world, by: replace(world, prompt=world.prompt * by),
    "tokens in an answer": lambda world, by: replace(world, answer=world.answer * by),
    "answers at once": lambda world, by: replace(world, rows=round(world.rows * by)),
}


def _host(host: Host, *, step: float = 1, score: float = 1) -> Host:
    return host.model_copy(update={"step": host.step * step, "score": host.score * score})


def cost_of(world: World, cost: str, count: int) -> float:
    """The share of the rate that guarding takes."""
    return 1 - world.capacity(cost, count=count) / world.capacity("unguarded", count=count)


def sensitivity(world: World, count: int) -> Iterator[tuple[str, float, float]]:
    """HybridGrad's cost where each assumption is too high, and too low, by a half."""
    for name, change in ASSUMPTIONS.items():
        low, high = (cost_of(change(world, by), "hybridgrad", count) for by in (1 / FACTOR, FACTOR))
        yield name, low, high


# Pictures.


def draw(named: dict[str, World], target: Path, count: int) -> Path:
    """The 99th percentile against the load, a panel for each engine; one GPU. Lines end where queues would grow.

    Raises:
        InputError: no picture format by that suffix.
    """
    with drawn(target, columns=len(named)) as (figure, [panels]):
        for axes, (name, world) in zip(panels, named.items(), strict=True):
            plain = world.capacity("unguarded", count=count)
            for cost, (color, mark) in LOOKS.items():
                loads = [load for load in LOADS if load * plain < world.capacity(cost, count=count)]
                waited = [
                    world.under_load(cost, rate=load * plain, gpus=1, count=count).percentile(0.99) for load in loads
                ]
                axes.plot(loads, waited, color=color, marker=mark, markersize=4, linewidth=1.4, label=cost)
            axes.set_title(f"{name}\n{plain:.0f} a second unguarded", loc="left", fontsize=8)
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("p99, seconds")
        legend(panels[0])
        figure.supxlabel(
            "load, as a share of what an unguarded server answers at most (simulated; nothing ran on a GPU)", fontsize=8
        )
    return target


def draw_sensitivity(named: dict[str, World], target: Path, count: int) -> Path:
    """HybridGrad's cost where assumptions are wrong, as bars from low to high.

    Raises:
        InputError: no picture format by that suffix.
    """
    with drawn(target, columns=len(named)) as (figure, [panels]):
        for axes, (name, world) in zip(panels, named.items(), strict=True):
            found = list(sensitivity(world, count))
            middle = cost_of(world, "hybridgrad", count)
            for place, (_, low, high) in enumerate(found):
                axes.plot([low, high], [place, place], color=LINE, linewidth=7, solid_capstyle="butt")
                for value, mark in ((low, "<"), (high, ">")):
                    axes.plot(value, place, mark, color=POINT, markersize=5)
            axes.axvline(middle, color=MUTED, linewidth=1, linestyle="--")
            axes.set_yticks(range(len(found)), [each for each, _, _ in found])
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
            axes.margins(x=0.06)
            axes.set_title(f"{name}\n{middle:.1%}", loc="left", fontsize=8)
        figure.supxlabel(f"HybridGrad's cost where an assumption is {FACTOR} times lower (<) or higher (>)", fontsize=9)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="?", default=MEASURED)
    parser.add_argument("--output", type=Path, help=".svg, .png or .pdf")
    parser.add_argument("--sensitivity", type=Path, help=".svg, .png or .pdf")
    parser.add_argument("--count", type=int, default=300)
    given = parser.parse_args()
    named = worlds(Measured.load(given.measured).host)
    for name, world in named.items():
        print(f"\n{name}, {LLAMA_8B.name}, {world.gpu.name} (simulated)\n\n{capacities(world, given.count)}\n")
        print(waits(world, given.count))
    if given.output:
        print(draw(named, given.output, given.count))
    if given.sensitivity:
        print(draw_sensitivity(named, given.sensitivity, given.count))


if __name__ == "__main__":
    main()

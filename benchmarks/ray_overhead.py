"""CPU seconds an answer: a run in one process, and the same run by Ray's workers of one thread each.

python benchmarks/ray_overhead.py [--questions 200] [--workers 1 2]

Wall time says little where Ray's own processes share the cores with the workers; CPU seconds are those of this process
and of all its descendants, from the first batch on (without loading: every worker is loaded by a first run).
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel
from semgrad_guard.evaluation.questions.data import read_questions
from semgrad_guard.evaluation.runs.answers import Answer
from semgrad_guard.evaluation.runs.run import Answering, Batch, Spread, collect_answers, recipe_of
from semgrad_guard.loading import ModelSource
from semgrad_guard.ray.cluster import Job, cluster, spread

ESTIMATORS = {"hybridgrad": HybridGrad()}
OPTIONS = GenerationOptions(max_tokens=16)


def cpu_seconds() -> float:
    """Of this process and everything below it that runs now."""
    ticks, parents = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            number = int(folder.name)
            parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(ticks.get(number, 0) for number in mine) / os.sysconf("SC_CLK_TCK")


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, seconds) of a call."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    run()
    return cpu_seconds() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="none: only the one process")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, questions = LanguageModel.from_pretrained("pocket"), read_questions("pocket").rows[: options.questions]

    answering = Answering(model, ESTIMATORS, OPTIONS)

    def collect(answers: Spread[Answer] | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.jsonl"
            collect_answers(questions, path, answering, spread=answers, batch_size=8)

    for _ in range(options.rounds):
        cpu, wall = measured(lambda: collect(None))
        print(f"one process: {1000 * cpu / len(questions):.1f} CPU ms an answer, {wall:.1f} s", flush=True)
    if not options.workers:
        return
    job = Job(ModelSource.of("pocket", identity=model.identity), recipe_of(answering))
    with cluster(num_cpus=max(options.workers)) as ray:
        for workers in options.workers:
            rounds = options.rounds
            batches = [Batch(i, questions[i : i + 8]) for i in range(0, len(questions), 8)]
            found = spread(ray, job, itertools.chain.from_iterable([batches] * (rounds + 1)), workers=workers)

            def some(results: Iterator[object] = found, count: int = len(batches)) -> None:
                for _ in itertools.islice(results, count):
                    pass

            some()  # loads the workers
            for _ in range(rounds):
                cpu, wall = measured(some)
                print(
                    f"{workers} workers: {1000 * cpu / len(questions):.1f} CPU ms an answer, {wall:.1f} s", flush=True
                )
            for _ in found:
                pass


if __name__ == "__main__":
    main()

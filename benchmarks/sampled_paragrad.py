"""Time saved by sampled ParaGrad, and its error: scores of the same answers with and without it, taking turns.

    python benchmarks/sampled_paragrad.py

CPU time of one thread, float32, Qwen2.5-0.5B's shape with random weights. Random weights say everything with nearly
equal probability; `--sharpness` scales the last norm, so that few tokens share the probability, as in trained models.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch
from machine import about
from shapes import SEMANTIC_TOKEN, Setting, build
from ways import OBJECTIVE, Bench

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.scores.gradients import GradientScores


def timed(bench: Bench, objective: Objective) -> tuple[float, GradientScores]:
    """CPU seconds of scoring the answer that was generated last, from its generation's states; and its scores."""
    began = time.process_time()
    responses = bench.ids[:, bench.setting.prompt :].tolist()
    batch = TokenBatch.of(bench.prompts.tolist(), responses, [SEMANTIC_TOKEN], bench.model.device)
    (scores,) = bench.scorer.score(batch, objective, bench.states)
    return time.process_time() - began, scores


def measure(bench: Bench, rows: list[int], rounds: int) -> list[str]:
    """A line of the table for each number of rows: times over exact scoring's, and errors."""
    objectives = [OBJECTIVE, *(replace(OBJECTIVE, sampled_rows=number) for number in rows)]
    found = [[timed(bench, objective) for objective in objectives] for _ in range(rounds)]
    exact, lines = found[0][0][1], []
    for way, number in enumerate(rows, start=1):
        ratios, scores = [turn[way][0] / turn[0][0] for turn in found], found[0][way][1]
        value, error, truth = scores.paragrad, scores.paragrad_error, exact.paragrad
        assert value is not None
        assert error is not None
        assert truth
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        least, seconds = (min(turn[i][0] for turn in found) for i in (way, 0))
        lines.append(
            f"| {bench.setting} | {exact.mean_entropy:.1f} | {number} | {seconds:.2f} "
            f"| {least / seconds:.3f} | {spread} | {error / truth:.1e} | {abs(value - truth) / truth:.1e} |"
        )
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Sampled ParaGrad against the exact one.")
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, 4000])
    parser.add_argument("--answers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(about())
    print(
        "| prompt/answer | mean entropy | rows | exact, least s | least / least | in a round | standard error | error |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for sharpness in options.sharpness:
        model = build(options.shape, torch.float32)
        with torch.no_grad():
            model.model.norm.weight.mul_(sharpness)
        for answer in options.answers:
            bench = Bench(model, Setting(60, answer))
            print("\n".join(measure(bench, options.rows, options.rounds)), flush=True)


if __name__ == "__main__":
    main()

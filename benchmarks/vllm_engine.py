"""The cost of verdicts with vLLM: tokens a second with and without them, and the wait of one answer.

    make .venv-vllm/.installed
    LD_PRELOAD=.venv-vllm/lib/libiomp5.so OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_engine.py
        [--model smollm2] [--dtype bfloat16] [--rows 32] [--tokens 32] [--rounds 5] [--clock cpu] [--output vllm.json]

`vllm` is vLLM alone (`LLM.generate`), `unscored` the same answers through our running batch; the others also score
every answer. Every way answers the same prompts, in turn, round by round; the rate is that of the median round, the
ratio the median of the rounds' ratios to `vllm`. A second part sends one prompt at a time, and counts what its score
takes in decode steps. Where others use the machine as well, `--clock cpu` counts this process's CPU seconds: with one
thread they are the times of an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from command import keep
from machine import about
from tables import table

from research.smollm2.questions import closed_book
from semgrad_guard import GenerationOptions, HybridGrad
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.guard import Answerer
from semgrad_guard.questions.data_files import require_writable
from semgrad_guard.vllm import VLLMLanguageModel
from semgrad_guard.vllm.shared_weights import library

Way = Callable[[Sequence[str]], int]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
HEADER = ("way", "prompts at once", "tokens a second", "of vLLM alone", "decode steps that a score takes")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--rows", type=int, default=32)
    made.add_argument("--tokens", type=int, default=32)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="what a second is: passed, or of this process's CPU"
    )
    made.add_argument("--output", type=Path, help="where the figures go (JSON)")
    given = made.parse_args()
    if given.output:
        require_writable(given.output)
    model = VLLMLanguageModel.from_pretrained(
        given.model, dtype=given.dtype, max_model_len=1024, max_num_seqs=given.rows, enable_prefix_caching=False
    )
    clock = CLOCKS[given.clock]
    ways = ways_of(model, given.tokens)
    report: dict[str, Any] = {"machine": about(), "arguments": {**vars(given), "output": None}, "points": []}
    for rows in (given.rows, 1):
        prompts = [row["question"] for row in closed_book(Random(0))[: rows * (given.rounds + 1)]]
        for number in range(given.rounds + 1):
            for name, way in ways.items():
                some = prompts[number * rows : (number + 1) * rows]
                began = clock()
                tokens = way(some)
                if number:  # the first round warms up
                    point = {"way": name, "rows": rows, "tokens": tokens, "seconds": clock() - began}
                    report["points"].append(point)
                    print(json.dumps(point), flush=True)
        keep(report, given.output)
    print("\n".join(table(HEADER, rows_of(report["points"]))))


def ways_of(model: VLLMLanguageModel, tokens: int) -> dict[str, Way]:
    """A function that answers questions and counts the tokens written."""
    options = GenerationOptions(max_tokens=tokens)
    sampling = library().SamplingParams(
        max_tokens=tokens, temperature=0.0, stop_token_ids=list(model._end_tokens), detokenize=False
    )

    def alone(questions: Sequence[str]) -> int:
        prompts = [{"prompt_token_ids": list(model.render(question).ids)} for question in questions]
        outputs = model._llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def scored(answerer: Answerer) -> Way:
        return lambda questions: sum(draft.answer.completion_tokens for draft in answerer.drafts(list(questions)))

    estimators = {"max_probability": MaxProbability(), "hybridgrad": HybridGrad()}
    return {
        "vllm": alone,
        "unscored": lambda questions: sum(
            answer.completion_tokens for answer in model.generate_batch(list(questions), options)
        ),
        **{name: scored(Answerer(model, estimator, options=options)) for name, estimator in estimators.items()},
    }


def rows_of(points: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each way and number of prompts."""
    found: list[tuple[str, ...]] = []
    for rows in sorted({point["rows"] for point in points}, reverse=True):
        own = [point for point in points if point["rows"] == rows]
        by_way = {name: [p for p in own if p["way"] == name] for name in dict.fromkeys(p["way"] for p in own)}
        alone = by_way["vllm"]
        for name, measured in by_way.items():
            rates = [point["tokens"] / point["seconds"] for point in measured]
            ratios = [rate / (p["tokens"] / p["seconds"]) for rate, p in zip(rates, alone, strict=True)]
            steps = [
                (m["seconds"] - a["seconds"]) / (a["seconds"] / a["tokens"])
                for m, a in zip(measured, alone, strict=True)
            ]
            late = f"{statistics.median(steps):.1f}" if rows == 1 else ""
            rate, ratio = statistics.median(rates), statistics.median(ratios)
            found.append((name, str(rows), f"{rate:.0f}", f"{ratio:.2f}", late))
    return found


if __name__ == "__main__":
    main()

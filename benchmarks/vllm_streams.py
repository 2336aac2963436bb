"""Guarded streams by sentence with vLLM in the process, against whole guarded answers: tokens a CPU second of each.

    LD_PRELOAD=.venv-vllm/lib/libiomp5.so OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_streams.py
        [--model smollm2] [--way context] [--clients 8] [--tokens 120] [--rounds 3] [--output vllm_streams.json]

Every answer is let through. Both ways answer the same questions, in turn, round by round; a ratio is that of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import command
from machine import about, spread
from sentence_streams import QUESTIONS, WAYS
from tables import ranged

from semgrad_guard import GenerationOptions, Guard, Policy
from semgrad_guard.vllm import VLLMLanguageModel


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--way", choices=WAYS, default="context", help="the scores, as in sentence_streams.py")
    made.add_argument("--clients", type=int, default=8)
    made.add_argument("--tokens", type=int, default=120)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--output", type=Path, help="where the figures go (JSON)")
    given = command.parsed(made)
    model = VLLMLanguageModel.from_pretrained(given.model, dtype=given.dtype, max_model_len=1024)
    report: dict[str, Any] = {"machine": about(), "rounds": []}
    guards = {
        by: Guard(
            model,
            Policy(threshold=1e9),
            estimator=WAYS[given.way],
            by=by,
            options=GenerationOptions(max_tokens=given.tokens),
        )
        for by in ("answer", "sentence")
    }
    for number in range(given.rounds + 1):
        found = {by: measured(guard, given.clients) for by, guard in guards.items()}
        if number:  # the first round warms up
            report["rounds"].append(found)
            command.keep(report, given.output)
            print(json.dumps(found), flush=True)
    ratios = [one["sentence"]["rate"] / one["answer"]["rate"] for one in report["rounds"]]
    print(f"tokens a CPU second, sentence over answer: {ranged(spread(ratios), digits=2)}")


def measured(guard: Guard, clients: int) -> dict[str, Any]:
    """The tokens of one answer to each client, and their CPU seconds."""
    began = time.process_time()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(partial(tokens_of, guard), QUESTIONS[:clients]))
    seconds = time.process_time() - began
    return {"tokens": tokens, "cpu_s": seconds, "rate": tokens / seconds}


def tokens_of(guard: Guard, question: str) -> int:
    """The tokens of an answer that was read to its end."""
    stream = guard.stream(question)
    for _ in stream:
        pass
    return stream.verdict.scored_tokens or 0


if __name__ == "__main__":
    main()

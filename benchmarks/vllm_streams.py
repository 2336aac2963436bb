"""Guarded streams by sentence with vLLM in the process, against whole guarded answers: tokens a CPU second of each.

    LD_PRELOAD=.venv-vllm/lib/libiomp5.so OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_streams.py
        [--model smollm2] [--way context] [--clients 8] [--tokens 120] [--rounds 3] [--output vllm_streams.json]
        [--stop]

Every answer is let through. Both ways answer the same questions, in turn, round by round; a ratio is that of a round.

With --stop: the share of the tokens that `stop` saves of answers with a doubtful sentence in their first two thirds.
Doubtful are scores above the median of all sentences. Tokens that are written until the scores are there count.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import command
from machine import about, spread
from sentence_streams import QUESTIONS, WAYS
from tables import ranged

from semgrad_guard import GenerationOptions, Guard, Policy, Verdict
from semgrad_guard.engine.answers.writing import RunningAnswer
from semgrad_guard.vllm import VLLMLanguageModel


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--way", choices=WAYS, default="context", help="the scores, as in sentence_streams.py")
    made.add_argument("--clients", type=int, default=8)
    made.add_argument("--tokens", type=int, default=120)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--stop", action="store_true", help="measure the tokens that a stop saves instead")
    made.add_argument("--output", type=Path, help="where the figures go (JSON)")
    given = command.parsed(made)
    model = VLLMLanguageModel.from_pretrained(given.model, dtype=given.dtype, max_model_len=1024)
    report: dict[str, Any] = {"machine": about(), "rounds": []}

    def guard_by(by: Any, threshold: float = 1e9) -> Guard:
        options = GenerationOptions(max_tokens=given.tokens)
        return Guard(model, Policy(threshold=threshold), estimator=WAYS[given.way], by=by, options=options)

    if given.stop:
        report["stopped"] = stopped(partial(guard_by, "sentence"), given.clients)
        command.keep(report, given.output)
        written, whole = (sum(one[count] for one in report["stopped"]) for count in ("written", "tokens"))
        print(f"{len(report['stopped'])} of {given.clients} answers: {1 - written / whole:.0%} of {whole} tokens saved")
        return
    guards = {by: guard_by(by) for by in ("answer", "sentence")}
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


def stopped(guarded: Callable[[float], Guard], clients: int) -> list[dict[str, Any]]:
    """The answers with a doubtful sentence in their first two thirds: their tokens, and those written before a stop."""
    with ThreadPoolExecutor(clients) as pool:
        answers = dict(zip(QUESTIONS, pool.map(partial(verdict_on, guarded(1e9)), QUESTIONS[:clients]), strict=False))
        threshold = median(one.uncertainty or 0.0 for answer in answers.values() for one in answer.sentences)
        written, end = dict[str, int](), RunningAnswer.end

        def noted(row: RunningAnswer, tokens: int) -> None:
            written[row.prompt.question] = len(row.ids)
            end(row, tokens)

        with patch.object(RunningAnswer, "end", noted):
            list(pool.map(partial(verdict_on, guarded(threshold)), answers))
    found = list[dict[str, Any]]()
    for question, answer in answers.items():
        ends = accumulate(one.tokens for one in answer.sentences)
        doubts = [end for end, one in zip(ends, answer.sentences, strict=True) if (one.uncertainty or 0.0) > threshold]
        tokens = answer.details.scored_tokens or 0
        if doubts and doubts[0] <= tokens * 2 / 3:
            found.append({"tokens": tokens, "doubt": doubts[0], "written": written.get(question, tokens)})
    return found


def tokens_of(guard: Guard, question: str) -> int:
    """The tokens of an answer that was read to its end."""
    return verdict_on(guard, question).details.scored_tokens or 0


def verdict_on(guard: Guard, question: str) -> Verdict:
    """The verdict on an answer that was read to its end."""
    stream = guard.stream(question)
    for _ in stream:
        pass
    return stream.verdict


if __name__ == "__main__":
    main()

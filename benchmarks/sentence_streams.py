"""The cost of scores by sentence, while an answer is written and behind it: CPU seconds over those of writing alone.

    nice python benchmarks/sentence_streams.py [--model smollm2] [--tokens 50 120 200 450] [--clients 1 8] \
        [--ways free context differentiated] [--rounds 3] [--output results.json]

Guarded streams of free scores (entropy) and of HybridGrad in both forms of `earlier`; each round first writes the same
answers unguarded. `first` is the time to the first sentence over that of writing as far, `behind` HybridGrad of all
sentences of a finished answer over its writing.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import command
import torch
from machine import about, spread
from tables import ranged

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.estimators import MeanEntropy
from semgrad_guard.estimators.base import Estimator

QUESTIONS = (
    "Tell me in detail how bread is baked.",
    "Write a long report about the history of Rome.",
    "Explain in many sentences how a ship is built.",
    "Describe the seasons of the year in detail.",
    "Tell a long story about a fisherman and his boat.",
    "Explain in many sentences how a telephone works.",
    "Describe in detail how a city plans its streets.",
    "Write a long report about elephants.",
)
WAYS: dict[str, Estimator] = {
    "free": MeanEntropy(),
    "context": HybridGrad(),
    "differentiated": HybridGrad(earlier="differentiated"),
}


def stream(model: LanguageModel, way: str | None, tokens: int, start: float, question: str) -> list[tuple[float, int]]:
    """The CPU seconds at which the pieces of an answer arrived, and the characters until then."""
    options = GenerationOptions(max_tokens=tokens)
    if way is None:
        pieces: Any = model.stream(question, options)
    else:
        guard = Guard(model, Policy(threshold=1e9), estimator=WAYS[way], by="sentence", options=options)
        pieces = guard.stream(question)
    length, found = 0, list[tuple[float, int]]()
    for piece in pieces:
        length += len(piece)
        found.append((time.process_time() - start, length))
    return found


def together(model: LanguageModel, way: str | None, tokens: int, clients: int) -> tuple[float, list[Any]]:
    """The CPU seconds of answers to so many clients at once, and the arrivals of each."""
    start = time.process_time()
    with ThreadPoolExecutor(clients) as pool:
        arrivals = list(pool.map(partial(stream, model, way, tokens, start), QUESTIONS[:clients]))
    return time.process_time() - start, arrivals


def behind(model: LanguageModel, tokens: int) -> dict[str, float]:
    """The CPU seconds of HybridGrad of all sentences of finished answers, in both forms, over those of writing."""
    shares = dict[str, float]()
    for way in ("context", "differentiated"):
        start = time.process_time()
        answer = model.generate(QUESTIONS[0], GenerationOptions(max_tokens=tokens))
        between = time.process_time()
        for _, own in model.sentences(answer.evidence) or []:
            if own is not None:
                WAYS[way](own)
        shares[way] = (time.process_time() - between) / (between - start)
    return shares


def measured(model: LanguageModel, tokens: int, clients: int, ways: list[str], rounds: int) -> dict[str, Any]:
    """The ratios of one length of answers, round by round."""
    row: dict[str, Any] = {"tokens": tokens, "clients": clients, "writing_s": [], "behind": []}
    row |= {way: {"total": [], "first": []} for way in ways}
    for _ in range(rounds):
        writing, plain = together(model, None, tokens, clients)
        row["writing_s"].append(writing)
        if clients == 1:
            row["behind"].append(behind(model, tokens))
        for way in ways:
            seconds, arrivals = together(model, way, tokens, clients)
            row[way]["total"].append(seconds / writing)
            for own, others in zip(arrivals, plain, strict=True):
                at, length = own[0]
                row[way]["first"].append(at / next(then for then, reached in others if reached >= length))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[50, 120, 200, 450])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where the figures go (JSON)")
    given = command.parsed(parser)
    torch.set_num_threads(1)
    model = LanguageModel.from_pretrained(given.model, dtype=torch.float32)
    behind(model, max(given.tokens))  # once, replays are verified up to this length
    report: dict[str, Any] = {"machine": about(), "rows": []}
    print(
        "| clients | tokens | writing, s | " + " | ".join(f"{way}, first | total" for way in given.ways) + " | behind |"
    )
    print("| --- " * (4 + 2 * len(given.ways)) + "|")
    for clients in given.clients:
        for tokens in given.tokens:
            row = measured(model, tokens, clients, given.ways, given.rounds)
            report["rows"].append(row)
            command.keep(report, given.output)
            ratios = [ranged(spread(row[way][part]), digits=2) for way in given.ways for part in ("first", "total")]
            later = zip(*(one.values() for one in row["behind"]), strict=True)
            behind_it = ", ".join(ranged(spread(list(shares)), digits=2) for shares in later)
            cells = [clients, tokens, f"{min(row['writing_s']):.1f}", *ratios, behind_it]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()

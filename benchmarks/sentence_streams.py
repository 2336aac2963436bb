"""The cost of scores by sentence, while an answer is written and behind it: seconds over those of writing alone.

    nice python benchmarks/sentence_streams.py [--model smollm2] [--tokens 50 120 200 450] [--clients 1 8] \
        [--ways free context] [--rounds 3] [--output results.json]
    python benchmarks/sentence_streams.py --shape 8B --dtype bfloat16 --device cuda     (random weights and words)

CPU seconds of this process; on a GPU, seconds by the clock. Guarded streams of free scores (entropy) and of HybridGrad;
each round first writes the same answers unguarded. `first` is the time to the first sentence over that of writing as
far, `behind` HybridGrad of all sentences of a finished answer over its writing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring import about, keep, parsed, parser, ranged, spread, table
from shapes import SHAPES, wordy_model

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.engine.answers.running import Request
from semgrad_guard.engine.answers.sentence_evidence import sentences_of
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
WAYS: dict[str, Estimator] = {"free": MeanEntropy(), "context": HybridGrad()}


@dataclass(frozen=True)
class Writer:
    """A model, how it writes, and the clock of its device."""

    model: LanguageModel
    temperature: float
    seconds: Callable[[], float]

    def options(self, tokens: int) -> GenerationOptions:
        """So many tokens, the same ones every time."""
        return GenerationOptions(max_tokens=tokens, temperature=self.temperature, seed=0)


def writer(given: argparse.Namespace) -> Writer:
    """A model that the options name. Random weights draw their words: greedy ones would repeat one."""
    dtype, clock = getattr(torch, given.dtype), time.process_time if given.device == "cpu" else time.perf_counter
    if given.shape:
        return Writer(wordy_model(given.shape, dtype, given.device), 1.0, clock)
    return Writer(LanguageModel.from_pretrained(given.model, dtype=dtype, device_map=given.device), 0.0, clock)


def stream(writer: Writer, way: str | None, tokens: int, start: float, question: str) -> list[tuple[float, int]]:
    """The seconds at which the pieces of an answer arrived, and the characters until then."""
    options, found = writer.options(tokens), list[tuple[float, int]]()

    def arrived(piece: Any) -> None:
        found.append((writer.seconds() - start, len(piece) + (found[-1][1] if found else 0)))

    if way is None:
        prompt = writer.model.render(question)
        writer.model.submit(Request(prompt=prompt, options=(options,), finish=len, on_piece=arrived)).outcome()
    else:
        guard = Guard(writer.model, Policy(threshold=1e9), estimator=WAYS[way], by="sentence", options=options)
        for piece in guard.stream(question):
            arrived(piece)
    return found


def together(writer: Writer, way: str | None, tokens: int, clients: int) -> tuple[float, list[Any]]:
    """The seconds of answers to so many clients at once, and the arrivals of each."""
    start = writer.seconds()
    with ThreadPoolExecutor(clients) as pool:
        arrivals = list(pool.map(partial(stream, writer, way, tokens, start), QUESTIONS[:clients]))
    return writer.seconds() - start, arrivals


def behind(writer: Writer, tokens: int) -> float:
    """The seconds of HybridGrad of all sentences of a finished answer, over those of writing."""
    start = writer.seconds()
    answer = writer.model.generate(QUESTIONS[0], writer.options(tokens))
    between = writer.seconds()
    for _, own in sentences_of(answer.evidence) or []:
        if own is not None:
            WAYS["context"](own)
    return (writer.seconds() - between) / (between - start)


def measured(writer: Writer, tokens: int, clients: int, ways: list[str], rounds: int) -> dict[str, Any]:
    """The ratios of one length of answers, round by round."""
    row: dict[str, Any] = {"tokens": tokens, "clients": clients, "writing_s": [], "behind": []}
    row |= {way: {"total": [], "first": []} for way in ways}
    for _ in range(rounds):
        writing, plain = together(writer, None, tokens, clients)
        row["writing_s"].append(writing)
        if clients == 1:
            row["behind"].append(behind(writer, tokens))
        for way in ways:
            scoring, arrivals = together(writer, way, tokens, clients)
            row[way]["total"].append(scoring / writing)
            for own, others in zip(arrivals, plain, strict=True):
                at, length = own[0]
                row[way]["first"].append(at / next(then for then, reached in others if reached >= length))
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--device", default="cpu")
    options.add_argument("--tokens", type=int, nargs="+", default=[50, 120, 200, 450])
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    options.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    options.add_argument("--rounds", type=int, default=3)
    given = parsed(options)
    torch.set_num_threads(1)
    subject = writer(given)
    behind(subject, max(given.tokens))  # once, replays are verified up to this length
    report: dict[str, Any] = {"machine": about(), "rows": []}
    lines: list[list[object]] = []
    for clients in given.clients:
        for tokens in given.tokens:
            row = measured(subject, tokens, clients, given.ways, given.rounds)
            report["rows"].append(row)
            keep(report, given.output)
            ratios = [ranged(spread(row[way][part]), digits=2) for way in given.ways for part in ("first", "total")]
            behind_it = ranged(spread(row["behind"]), digits=2) if row["behind"] else ""
            lines.append([clients, tokens, f"{min(row['writing_s']):.1f}", *ratios, behind_it])
            print(*lines[-1], sep="  ", flush=True)
    ways = [f"{way}, {part}" for way in given.ways for part in ("first", "total")]
    print(table(("clients", "tokens", "writing, s", *ways, "behind"), lines))


if __name__ == "__main__":
    main()

"""The cost of a chat's next turn when the turns before it are not read again: answer and score, over reading all of it.

    python benchmarks/turns.py [--layers 24 --width 896] [--instructions 1000] [--rounds 3] [--output results.json]

Random weights of a given size. Two models with the same weights go through the same chat, turn by turn in alternation:
one as it comes, one with `Memory(prompts=...)`. Times are CPU seconds of this process for an answer and its HybridGrad.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import command
import torch
from machine import about, spread
from rich.console import Console
from shapes import speaking_model
from tables import ranged, table

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Message
from semgrad_guard.engine.replay.memory import Memory

QUESTIONS = ("What is the capital of France?", "And of Mongolia?", "Which of the two is larger?", "Why is that so?")
HEADER = ("turn", "prompt, tokens", "not read again", "answer, s", "resumed, s", "resumed over answer", "difference")
AMPLE = 2 << 30


def answered(model: LanguageModel, history: list[Message], tokens: int) -> tuple[float, Any, float]:
    """CPU seconds of an answer and its score, the answer, and HybridGrad."""
    estimator = HybridGrad()
    start = time.process_time()
    generation = model.generate(history, GenerationOptions(max_tokens=tokens), objective=estimator.objective)
    uncertainty = estimator(generation.evidence).uncertainty
    seconds = time.process_time() - start
    if uncertainty is None:
        raise RuntimeError("an answer without a score says nothing about what scores cost")
    return seconds, generation, uncertainty


def chat(plain: LanguageModel, resuming: LanguageModel, instructions: str, tokens: int) -> list[dict[str, Any]]:
    """One chat: for each turn the seconds of both models, and how far their scores lie apart."""
    resuming.memory = Memory()  # forget the round before
    resuming.memory = Memory(prompts=AMPLE)
    history, turns = [Message("system", instructions)], []
    for question in QUESTIONS:
        history.append(Message("user", question))
        (whole, answer, one), (rest, again, two) = (answered(m, history, tokens) for m in (plain, resuming))
        if answer.text != again.text:
            raise RuntimeError("both models must say the same, or their times do not compare")
        turns.append(
            {
                "prompt": len(answer.prompt.ids),
                "reused": again.reused_tokens,
                "seconds": whole,
                "resumed_seconds": rest,
                "relative_difference": abs(two / one - 1),
            }
        )
        history.append(Message("assistant", answer.text))
    return turns


def rows(chats: list[list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """A row for each turn: medians over the rounds, the ratio round by round."""
    found: list[tuple[str, ...]] = []
    for number, turns in enumerate(zip(*chats, strict=True), start=1):
        ratios = [turn["resumed_seconds"] / turn["seconds"] for turn in turns]
        middle = [f"{statistics.median(t[name] for t in turns):.2f}" for name in ("seconds", "resumed_seconds")]
        apart = max(turn["relative_difference"] for turn in turns)
        tokens = [str(turns[0][name]) for name in ("prompt", "reused")]
        found.append((str(number), *tokens, *middle, ranged(spread(ratios)), f"{apart:.0e}"))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--width", type=int, default=896, help="a multiple of 64 (896)")
    options.add_argument("--instructions", type=int, default=1000, help="tokens of the system message, about (1000)")
    options.add_argument("--max-tokens", type=int, default=8)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--output", type=Path, help="where the figures go (JSON)")
    arguments = command.parsed(options)
    torch.set_num_threads(1)
    plain = speaking_model(arguments.layers, arguments.width)
    resuming = LanguageModel.from_transformers(copy.copy(plain._model), plain.tokenizer)
    sentence = "Answer briefly. "
    instructions = sentence * (arguments.instructions // len(plain.tokenizer(sentence)["input_ids"]))
    console, chats = Console(stderr=True), []
    for number in range(arguments.rounds):
        with console.status(f"round {number + 1} of {arguments.rounds}"):
            chats.append(chat(plain, resuming, instructions, arguments.max_tokens))
        command.keep({"machine": about(), "arguments": _plain(arguments), "chats": chats}, arguments.output)
    print("\n".join(table(HEADER, rows(chats))))


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "output"}


if __name__ == "__main__":
    main()

"""The cost of an answer scored without a replay, as a ratio to plain generation by transformers.

    python benchmarks/observed.py [--model MODEL] [--dtype bfloat16] [--tokens 48] [--rows 1 8] [--pairs 7]

Plain generation is `model.generate`, greedy, of exactly as many tokens as our answer has. Next to it is ours with
`FusedStates` (and the likelihoods that come with it), in turns, in CPU time of the process: a busy machine does not
blur it. `kept` is a generation's memory for scoring, per answer token. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.estimators import FusedStates, MaxProbability
from semgrad_guard.estimators.observed import OBSERVING

QUESTION = "Tell me at length what happened to the old harbour, who built it, and why nobody sails from there any more."


def plain(model: LanguageModel, prompts: Sequence[Any], tokens: int) -> Callable[[], object]:
    """The library's own generation on the model's own object."""
    own: Any = model._model
    ids = torch.tensor([prompt.ids for prompt in prompts])
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return lambda: own.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def scored(model: LanguageModel, rows: int, tokens: int) -> tuple[Callable[[], object], list[int]]:
    """Ours, of as many tokens at most, and its kept bytes."""
    kept: list[int] = []

    def run() -> None:
        options = GenerationOptions(max_tokens=tokens)
        generations = model.generate_batch([QUESTION] * rows, options, objective=OBSERVING)
        tapes = [one.scoring.tape(one.row) for one in generations]
        recorders = {recorder for tape in tapes if tape for recorder, _ in tape.passes}
        kept.append(sum(step.nbytes for recorder in recorders for step in (recorder.hidden(), *recorder.finals)))
        for generation in generations:
            FusedStates()(generation.evidence)
            MaxProbability()(generation.evidence)

    return run, kept


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dtype")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dtype = {} if chosen.dtype is None else {"dtype": chosen.dtype}
    model = LanguageModel.from_pretrained(chosen.model, **dtype)
    for rows in chosen.rows:
        prompts = [model.render(QUESTION)] * rows
        steps = model.generate(QUESTION, GenerationOptions(max_tokens=chosen.tokens)).completion_tokens
        base, (ours, kept) = plain(model, prompts, steps), scored(model, rows, chosen.tokens)
        base(), ours()  # one-time work
        pairs = [(seconds(base), seconds(ours)) for _ in range(chosen.pairs)]
        ratios = sorted(b / a for a, b in pairs)
        print(
            f"{chosen.model}, {rows} rows of {steps} tokens: ratio {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}), plain {statistics.median(a for a, _ in pairs):.2f} s of CPU, "
            f"kept {kept[-1] / rows / steps / 1024 if kept else 0:.1f} KiB a token"
        )


if __name__ == "__main__":
    main()

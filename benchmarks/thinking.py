"""The cost of scoring an answer given its thought, as a ratio to writing both.

    python benchmarks/thinking.py [--shape 0.5B] [--thought 500] [--answer 32] [--rounds 3]

Random weights write a thought of full length, which `max_thinking_tokens` closes, and an answer. Writing and scoring
are measured in CPU time of the process, in turns: a busy machine does not blur it. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.shapes import SHAPES, build
from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel
from semgrad_guard.estimators import Estimator, MeanEntropy

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}\n<think>\n{% endif %}{# </think> #}"
)


def thinking_model(shape: str) -> LanguageModel:
    """The shape with random weights, which thinks by its template."""
    tokenizer = LanguageModel.from_pretrained("pocket").tokenizer
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    model = build(shape, torch.float32)
    with torch.no_grad():  # it writes words that the tokenizer knows
        model.get_output_embeddings().weight[len(tokenizer) :] = 0
    return LanguageModel.from_transformers(model, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--thought", type=int, default=500)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = thinking_model(arguments.shape)
    closing = len(model.tokenizer("\n</think>\n\n", add_special_tokens=False)["input_ids"])
    options = GenerationOptions(
        max_tokens=arguments.thought + closing + arguments.answer,
        max_thinking_tokens=arguments.thought,
    )
    estimators: tuple[Estimator, ...] = (HybridGrad(), MeanEntropy())
    ratios: dict[str, list[float]] = {estimator.name: [] for estimator in estimators}
    for _ in range(arguments.rounds + 1):
        for estimator in estimators:
            began = time.process_time()
            evidence = model.generate("Who built it?", options, objective=estimator.objective).evidence
            cost, began = time.process_time() - began, time.process_time()
            evidence.thought()
            estimator(evidence)
            score = time.process_time() - began
            print(
                f"{estimator.name}: {len(evidence.preceding_ids)} + {len(evidence.response_ids)} tokens, written in "
                f"{cost:.1f} s, scored in {score:.2f} s",
                flush=True,
            )
            ratios[estimator.name].append(score / cost)
    for name, found in ratios.items():
        print(f"{name}: {statistics.median(found[1:]):.3f} of writing ({min(found[1:]):.3f} to {max(found[1:]):.3f})")


if __name__ == "__main__":
    main()

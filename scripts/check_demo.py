"""The fetched model's demo on questions that tuned nothing: its own facts, each in the other of their two wordings.

python scripts/check_demo.py [--questions 400]      (`semgrad-guard fetch smollm2` first; ten minutes)

It fails where the guard withholds less than half of the wrong answers, or half of the right ones.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace

from rich.console import Console

from langchain_semgrad_guard import demo
from langchain_semgrad_guard.demo.library import BM25Retriever, Question, documents, questions
from semgrad_guard import LanguageModel

WORDINGS = (
    ("Do you know the capital of {}?", "Which city is {}'s capital?"),
    ("Tell me the currency of {}.", "Which currency do people use in {}?"),
    ("Tell me the continent of {}.", "What continent is {} on?"),
    ("Tell me the main language of {}.", "What language do people speak in {}?"),
    ("Tell me the chemical symbol of {}.", "Which chemical symbol stands for {}?"),
    ("Tell me the atomic number of {}.", "What atomic number does {} have?"),
)


def reworded(question: Question) -> Question:
    """The same fact in its kind's other wording."""
    for pair in WORDINGS:
        for wording, other in (pair, pair[::-1]):
            if found := re.fullmatch(re.escape(wording).replace(r"\{\}", "(.+)"), question.question):
                return replace(question, question=other.format(found[1]))
    raise SystemExit(f"{question.question!r} has none of the wordings in WORDINGS: add its pair")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=400)
    pool = [reworded(question) for question in questions()[: parser.parse_args().questions]]
    model, library = LanguageModel.from_pretrained("smollm2"), BM25Retriever.over(documents())
    made = replace(demo.calibrated_before(Console(), model, "smollm2", library, ()), held_out=pool)
    effect = demo.effect(made, demo.ask(made.chain, pool))
    print(f"Promised: at most {made.alpha:.0%} wrong. Effect: {effect}.")
    right = effect.answers - effect.wrong
    return 0 if 2 * effect.withheld_wrong >= effect.wrong and 2 * effect.withheld_right <= right else 1


if __name__ == "__main__":
    sys.exit(main())

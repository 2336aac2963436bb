"""The fetched model's demo on questions that tuned nothing: its own facts, each in the other of their two wordings.

python scripts/check_demo.py [--questions 400]      (`semgrad-guard fetch smollm2` first; ten minutes)

It fails where the guard withholds less than half of the wrong answers, or half of the right ones.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, demo, get_verdict
from langchain_semgrad_guard.demo.library import BM25Retriever, Question, documents, questions, reading_chain
from semgrad_guard import Calibration, LanguageModel, Policy
from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.grading import Contains
from semgrad_guard.grading.abstention import abstains

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

    calibration = Calibration.load(Path(demo.__file__).parent / "smollm2.json")
    router = UncertaintyRouterCallback(Policy.from_calibration(calibration), keep_draft=True)
    reader = ChatSemGrad.from_model(LanguageModel.from_pretrained("smollm2"), max_tokens=48, router=router)
    chain = reading_chain(BM25Retriever.over(documents()), reader, model="smollm2")
    answers = chain.batch([question.question for question in pool], {"max_concurrency": demo.BATCH})

    graded, grader = list[tuple[float, bool]](), Contains()
    for question, answer in zip(pool, answers, strict=True):
        verdict = get_verdict(answer)
        draft = "" if verdict is None else verdict.draft or verdict.text
        if verdict is not None and not abstains(draft):
            graded.append((float(not verdict.promised), grader(draft, question.answers, question=question.question)))
    effect = Effect.of(graded, lambda withheld: withheld == 0)
    print(f"{len(graded)} answers; promised: at most {calibration.alpha:.0%} wrong. {effect}")
    right = effect.answers - effect.wrong
    return 0 if 2 * effect.withheld_wrong >= effect.wrong and 2 * effect.withheld_right <= right else 1


if __name__ == "__main__":
    sys.exit(main())

"""Answers as a run would keep them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from semgrad_guard.paper.results import GradedRun
from semgrad_guard.questions.data import Question
from semgrad_guard.questions.run_record import AnswerScore, EvaluatedAnswer

SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "estimators": {
        "hybridgrad": {"name": "hybridgrad", "title": "HybridGrad"},
        "gnll": {"name": "gnll", "title": "G-NLL"},
    },
    "ablations": ["l2 norm"],
}


def made(
    number: int, text: str | None = "Paris", references: tuple[str, ...] = ("Paris",), **more: Any
) -> EvaluatedAnswer:
    """The answer to question `number`, whose uncertainties are its number."""
    question = more.pop("question", f"question {number}")
    return EvaluatedAnswer(
        key=Question(question=question).key,
        id=str(number),
        question=question,
        text=text,
        references=references,
        scores={name: AnswerScore(uncertainty=float(number)) for name in SETTINGS["estimators"]},
        **{
            "milliseconds": {"hybridgrad": 1.0, "gnll": 0.5},
            "generation_ms": 10.0,
            "entropies": (0.5, 1.5),
            "ablations": {"l2 norm": 2.0 * number},
            "kind": "odd" if number % 2 else "even",
            **more,
        },
    )


def example_run(*, n: int = 60, methods: Sequence[str] = ("HybridGrad", "G-NLL"), seed: int = 0) -> GradedRun:
    """A made-up run with every column filled: half of the answers or more are right, every method knows something."""
    rng = np.random.default_rng(seed)
    difficulty = rng.normal(0.0, 1.0, n)
    correct = difficulty + rng.normal(0.0, 0.7, n) < 0.4

    def score(noise: float) -> list[float | None]:
        return np.exp(difficulty + rng.normal(0.0, noise, n) - 6.0).tolist()

    return GradedRun(
        title=f"example {seed}",
        model="example model",
        data=f"example data {seed}",
        scores={method: score(0.5 + 0.1 * rank) for rank, method in enumerate(methods)},
        correct=correct.tolist(),
        milliseconds={method: rng.gamma(9.0, 2.0, n).tolist() for method in methods},
        generation_ms=rng.gamma(9.0, 4.0, n).tolist(),
        mean_entropy=np.exp(0.8 * difficulty - 1.0).tolist(),
        kinds=rng.choice(["closed book", "reading"], n).tolist(),
        other_graders={"judge": (correct ^ (rng.random(n) < 0.05)).tolist()},
        ablations={"l2 norm": score(0.6), "without entropy weights": score(0.9)},
        settings={"grader": "exact-match", "max_new_tokens": 32},
    )

"""Answers as a run would keep them, made by hand."""

from __future__ import annotations

from typing import Any

from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.runs.answers import AnswerScore, EvaluatedAnswer

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

"""The demo's printed lines and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from rich.console import Console
from rich.table import Table
from rich.text import Text

from langchain_semgrad_guard.demo.library import Question
from langchain_semgrad_guard.messages import get_verdict
from semgrad_guard import Calibration, Verdict
from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.errors import ScoringError
from semgrad_guard.grading import AnswerGrader, AnswerToGrade
from semgrad_guard.grading.grader import ABSTAINED, Verdicts
from semgrad_guard.paper.drawing import draw_risk_coverage


@dataclass(frozen=True)
class Demo:
    """A guarded chain with its promise: the calibration that decides first, and the questions that it has not seen."""

    chain: Runnable[Any, AIMessage]
    calibration: Calibration
    held_out: Sequence[Question]
    grader: AnswerGrader
    stages: int
    alpha: float
    delta: float


_STYLES = {"answer": "green", "escalate": "cyan", "abstain": "yellow"}


def stage(console: Console, name: str, calibration: Calibration) -> None:
    """One stage's calibration in a line."""
    if calibration.threshold is None:
        console.print(f"Stage {name}: nothing is let through. {calibration.reason}")
        return
    console.print(
        f"Stage {name}: {calibration.n} questions, {calibration.n_wrong} wrong; threshold {calibration.threshold:.3g} "
        f"lets {calibration.coverage:.0%} through, {calibration.n_answered_wrong} wrong of {calibration.n_answered}."
    )


def table(console: Console, questions: Sequence[Question], answers: Sequence[AIMessage], *, stages: int) -> None:
    """A row for each question: the number that decided, and the delivered answer; with two stages also its stage.

    Below is one line for each draft that was withheld.
    """
    grid, withheld = Table(box=None, pad_edge=False), list[str]()
    for name in ("question", "answer", "uncertainty", *(("action", "source") if stages > 1 else ())):
        grid.add_column(name)
    for question, message in zip(questions, answers, strict=True):
        verdict = _verdict(message)
        final = verdict.escalated or verdict
        abstains = final.action == "abstain"
        number = "-" if final.uncertainty is None else f"{final.uncertainty:.2g}"
        answer = Text(" ".join(message.text.split()), style=_STYLES["abstain" if abstains else verdict.action])
        source = "-" if abstains else ", ".join(_sources(message)) or "memory"
        grid.add_row(question.question, answer, number, *((verdict.action, source) if stages > 1 else ()))
        if abstains and final.draft is not None:
            withheld.append(f"{question.question} {' '.join(final.draft.split())}")
    console.print(grid)
    if withheld:
        console.print("\nWithheld:", *withheld, sep="\n  ", markup=False, highlight=False)


def outcome(console: Console, demo: Demo, answers: Sequence[AIMessage]) -> None:
    """How the promise did on questions that calibrated nothing; of one stage also the guard's effect."""
    questions, promised = demo.held_out, [_verdict(message).promised for message in answers]
    delivered = [pair for pair, counts in zip(zip(questions, answers, strict=True), promised, strict=True) if counts]
    wrong = sum(not grade for grade in _grades(demo, [(question, message.text) for question, message in delivered]))
    retrieved = sum(bool(_sources(message)) for _, message in delivered)
    console.print(
        f"On {len(questions)} held-out questions: {len(delivered)} delivered ({retrieved} of them from the library), "
        f"{wrong} wrong ({wrong / max(1, len(delivered)):.1%}; promised: at most {demo.alpha:.0%} with probability "
        f"{1 - demo.delta:.0%}), {len(questions) - len(delivered)} abstentions."
    )
    if demo.stages == 1:
        console.print(f"Effect: {effect(demo, answers)}.")


def effect(demo: Demo, answers: Sequence[AIMessage]) -> Effect:
    """What the promise makes of the drafts of one stage that do not decline."""
    graded = [(float(not verdict.promised), right) for verdict, right in _graded(demo, answers)]
    return Effect.of(graded, lambda withheld: withheld == 0)


def picture(path: Path, demo: Demo, answers: Sequence[AIMessage]) -> None:
    """Risk against coverage of the drafts that the first calibration decides about, on held-out questions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    graded = _graded(demo, answers)
    draw_risk_coverage(
        path,
        [verdict.uncertainty for verdict, _ in graded],
        [right for _, right in graded],
        calibration=demo.calibration,
        label=demo.calibration.binding.estimator if demo.calibration.binding else "uncertainty",
        title="Error rate among the answered",
    )


def _graded(demo: Demo, answers: Sequence[AIMessage]) -> list[tuple[Verdict, bool]]:
    """Each draft that does not decline, and whether it is right; of the first stage where there are two."""
    verdicts = [_verdict(message) for message in answers]
    texts = [verdict.draft or verdict.text for verdict in verdicts]
    grades = _grades(demo, [*zip(demo.held_out, texts, strict=True)])
    return [(verdict, grade is True) for verdict, grade in zip(verdicts, grades, strict=True) if grade != ABSTAINED]


def _grades(demo: Demo, answers: Sequence[tuple[Question, str]]) -> Verdicts:
    return demo.grader.grade([AnswerToGrade(q.question, text, tuple(q.answers)) for q, text in answers])


def _sources(message: AIMessage) -> Sequence[str]:
    """The documents that an answer was read from; none where it came from memory."""
    return message.additional_kwargs.get("sources", ())


def _verdict(message: AIMessage) -> Verdict:
    """The first stage's verdict, with the second's inside."""
    verdict = get_verdict(message)
    if verdict is None:
        raise ScoringError("an answer of this demo carries no verdict")
    return verdict.details.escalated_from or verdict

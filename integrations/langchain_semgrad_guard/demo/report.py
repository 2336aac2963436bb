"""The demo's printed lines and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from langchain_core.messages import AIMessage
from rich.console import Console
from rich.table import Table
from rich.text import Text

from langchain_semgrad_guard.demo.library import Question
from langchain_semgrad_guard.messages import get_verdict
from semgrad_guard import Calibration, Verdict
from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.errors import ScoringError
from semgrad_guard.grading import Grader
from semgrad_guard.paper.drawing import draw_risk_coverage

_STYLES = {"answer": "green", "escalate": "cyan", "abstain": "yellow"}


def promise(console: Console, *, alpha: float, delta: float) -> None:
    """The promise of all stages together."""
    console.print(f"Promise for everything delivered: error rate <= {alpha:.0%}, with probability {1 - delta:.0%}.")


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


def outcome(
    console: Console,
    questions: Sequence[Question],
    answers: Sequence[AIMessage],
    *,
    alpha: float,
    delta: float,
    grader: Grader,
) -> None:
    """How the promise did on questions that calibrated nothing."""
    pairs = zip(questions, answers, strict=True)
    delivered = [(question, message) for question, message in pairs if _verdict(message).promised]
    wrong = sum(not grader(message.text, q.answers, question=q.question) for q, message in delivered)
    retrieved = sum(bool(_sources(message)) for _, message in delivered)
    console.print(
        f"On {len(questions)} held-out questions: {len(delivered)} delivered ({retrieved} of them from the library), "
        f"{wrong} wrong ({wrong / max(1, len(delivered)):.1%}; promised: at most {alpha:.0%} with probability "
        f"{1 - delta:.0%}), {len(questions) - len(delivered)} abstentions."
    )


def effect(console: Console, questions: Sequence[Question], answers: Sequence[AIMessage], *, grader: Grader) -> None:
    """The guard's effect: the error rates without it and with it, and the withheld answers of either kind."""
    withheld = [float(not _verdict(message).promised) for message in answers]
    graded = zip(withheld, _graded(questions, answers, grader), strict=True)
    console.print(f"Effect: {Effect.of(graded, lambda withheld: withheld == 0)}.")


def picture(
    path: Path,
    questions: Sequence[Question],
    answers: Sequence[AIMessage],
    *,
    calibration: Calibration,
    grader: Grader,
) -> None:
    """Risk against coverage of the drafts that this calibration decides about, on held-out questions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_risk_coverage(
        path,
        [_verdict(message).uncertainty for message in answers],
        _graded(questions, answers, grader),
        calibration=calibration,
        label=calibration.binding.estimator if calibration.binding else "uncertainty",
        title="Error rate among the answered",
    )


def _graded(questions: Sequence[Question], answers: Sequence[AIMessage], grader: Grader) -> list[bool]:
    """Whether each draft is right, of the first stage where there are two."""
    verdicts = map(_verdict, answers)
    return [
        grader(verdict.draft or verdict.text, question.answers, question=question.question)
        for question, verdict in zip(questions, verdicts, strict=True)
    ]


def _sources(message: AIMessage) -> Sequence[str]:
    """The documents that an answer was read from; none where it came from memory."""
    return message.additional_kwargs.get("sources", ())


def _verdict(message: AIMessage) -> Verdict:
    """The first stage's verdict, with the second's inside."""
    verdict = get_verdict(message)
    if verdict is None:
        raise ScoringError("an answer of this demo carries no verdict")
    return verdict.details.escalated_from or verdict

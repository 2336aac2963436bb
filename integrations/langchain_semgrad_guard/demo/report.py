"""The demo's printed lines and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from langchain_core.messages import AIMessage
from rich.console import Console
from rich.table import Table
from rich.text import Text

from langchain_semgrad_guard.demo.library import Question
from langchain_semgrad_guard.demo.stages import GRADER, grade_of, graded
from langchain_semgrad_guard.messages import get_verdict
from semgrad_guard import Calibration, Verdict
from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.errors import ScoringError
from semgrad_guard.grading import AnswerGrader
from semgrad_guard.grading.grader import ABSTAINED
from semgrad_guard.paper.drawing import draw_risk_coverage

_ONE_STAGE = ("question", "answer", "uncertainty")
_TWO_STAGES = (*_ONE_STAGE, "action", "source")
_GAP, _QUESTION = 2, 24
"""Columns between two cells, and the least that a question gets."""
_STYLES = {"answer": "green", "escalate": "cyan", "abstain": "yellow"}


def opening(console: Console, model: str, *, n_documents: int, alpha: float, delta: float) -> None:
    """The model, the library and the promise."""
    console.print(
        f"[bold]A guarded RAG chain.[/] Model: {model}; {n_documents} documents; BM25 retrieval.\n"
        f"Promise for everything delivered: error rate <= {alpha:.0%}, with probability {1 - delta:.0%}."
    )


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
    """One line for each question: the number that decided, and the delivered answer; with two stages also its stage.

    Below is one line for each draft that was withheld.

    Where the terminal is narrow, whole words are left out: of questions from the front.
    """
    rows = [_row(question, message, stages) for question, message in zip(questions, answers, strict=True)]
    heading = _TWO_STAGES if stages > 1 else _ONE_STAGE
    widths = [max(len(cells[i]) for cells in (heading, *(cells for cells, _, _ in rows))) for i in range(len(heading))]
    room = console.width - _GAP * (len(heading) - 1) - sum(widths[2:])
    if room < widths[0] + widths[1]:
        widths[1] = min(widths[1], room - min(widths[0], _QUESTION))
        widths[0] = min(widths[0], room - widths[1])
    grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for name in heading:
        grid.add_column(name, no_wrap=True)
    for (question, answer, *rest), style, _ in rows:
        shown = Text(_shortened(answer, widths[1]), style=style)
        grid.add_row(_shortened(question, widths[0], tail=True), shown, *rest)
    console.print(grid)
    if drafts := [f"{cells[0]} {draft}" for cells, _, draft in rows if draft is not None]:
        lines = [_shortened(draft, console.width - _GAP) for draft in drafts]
        console.print("\nWithheld:", *lines, sep="\n  ", markup=False, highlight=False)


def _row(question: Question, message: AIMessage, stages: int) -> tuple[tuple[str, ...], str, str | None]:
    """The cells of a question, the style of its answer, and the draft that was withheld, if one was."""
    verdict = _verdict(message)
    final = verdict.escalated or verdict
    withheld = final.action == "abstain"
    answer = " ".join(str(message.text).split())
    number = "-" if final.uncertainty is None else f"{final.uncertainty:.2g}"
    cells = (question.question, answer, number)
    if stages > 1:
        cells = (*cells, verdict.action, "-" if withheld else ", ".join(_sources(message)) or "memory")
    draft = " ".join(final.draft.split()) if withheld and final.draft is not None else None
    return cells, _STYLES["abstain" if withheld else verdict.action], draft


def _shortened(text: str, width: int, *, tail: bool = False) -> str:
    """The text in so many characters; whole words are left out at its end, or at its beginning."""
    if len(text) <= width:
        return text
    words = text.split()
    while words and len(" ".join(words)) + 2 > width:
        words.pop(0 if tail else -1)
    return " ".join(["…", *words] if tail else [*words, "…"])


def outcome(
    console: Console,
    questions: Sequence[Question],
    answers: Sequence[AIMessage],
    *,
    alpha: float,
    delta: float,
    grader: AnswerGrader = GRADER,
) -> None:
    """How the promise did on questions that calibrated nothing."""
    verdicts = [_verdict(message) for message in answers]
    delivered = [(q, m) for q, m, v in zip(questions, answers, verdicts, strict=True) if v.promised]
    wrong = sum(grade_of(str(m.text), q, grader) is False for q, m in delivered)
    retrieved = sum(bool(_sources(message)) for _, message in delivered)
    console.print(
        f"On {len(questions)} held-out questions: {len(delivered)} delivered ({retrieved} of them from the library), "
        f"{wrong} wrong ({wrong / max(1, len(delivered)):.1%}; promised: at most {alpha:.0%} with probability "
        f"{1 - delta:.0%}), {len(questions) - len(delivered)} abstentions."
    )


def effect(
    console: Console, questions: Sequence[Question], answers: Sequence[AIMessage], *, grader: AnswerGrader = GRADER
) -> None:
    """The guard's effect: the error rates without it and with it, and the withheld answers of either kind."""
    pairs = [(question, _verdict(message)) for question, message in zip(questions, answers, strict=True)]
    grades = [(verdict.promised, grade_of(verdict.draft or verdict.text, one, grader)) for one, verdict in pairs]
    counted = [(float(not promised), right is True) for promised, right in grades if right != ABSTAINED]
    console.print(f"Effect: {Effect.of(counted, lambda withheld: withheld == 0)}.")


def picture(
    path: Path,
    questions: Sequence[Question],
    answers: Sequence[AIMessage],
    *,
    calibration: Calibration,
    title: str,
    grader: AnswerGrader = GRADER,
) -> None:
    """Risk against coverage of the drafts that this calibration decides about, on held-out questions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drafts = [graded(question, message, grader=grader) for question, message in zip(questions, answers, strict=True)]
    counted = [g for g in drafts if g.verdict.uncertainty is not None and g.correct != ABSTAINED]
    scored = [(g.verdict.uncertainty or 0.0, g.correct is True) for g in counted]
    draw_risk_coverage(
        path,
        [uncertainty for uncertainty, _ in scored],
        [correct for _, correct in scored],
        calibration=calibration,
        label=calibration.binding.estimator if calibration.binding else "",
        title=f"{title}: error rate among the answered",
    )


def closing(console: Console, picture: Path, *, seconds: float) -> None:
    """Where the picture is, and how long all of it took."""
    console.print(f"Picture: {picture}   ({seconds:.0f} s in all)")


def _sources(message: AIMessage) -> Sequence[str]:
    """The documents that an answer was read from; none where it came from memory."""
    return message.additional_kwargs.get("sources", ())


def _verdict(message: AIMessage) -> Verdict:
    verdict = get_verdict(message)
    if verdict is None:
        raise ScoringError("an answer of this demo carries no verdict")
    return verdict.details.escalated_from or verdict  # the first stage's, with the second inside

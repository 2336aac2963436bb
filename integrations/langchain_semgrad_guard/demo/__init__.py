"""`semgrad-guard demo`: a guarded RAG chain on the embedded model, or on a fetched one.

On the embedded model, questions that it knows are answered from memory; others escalate to retrieval and are answered
from a document; without a certain answer in either, the chain abstains. Both stages are calibrated in the run, on
questions of their own, so that the promise covers the error rate of all delivered answers.

A fetched model answers every question from a document, by a calibration that comes along: to make one takes minutes on
such a model. docs/fifteen-minutes.md has the commands that made it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from rich.console import Console
from rich.table import Table
from rich.text import Text

from langchain_semgrad_guard.chains import calibrate_chain
from langchain_semgrad_guard.chat_semgrad import ChatSemGrad
from langchain_semgrad_guard.demo.library import (
    NOWHERE,
    SHOWN,
    BM25Retriever,
    Question,
    documents,
    questions,
    reading_chain,
)
from langchain_semgrad_guard.messages import get_verdict
from langchain_semgrad_guard.router import UncertaintyRouterCallback
from semgrad_guard import Calibration, LanguageModel, Policy, Verdict
from semgrad_guard.calibration.calibration_set import Effect
from semgrad_guard.errors import ScoringError
from semgrad_guard.grading import AnswerGrader, AnswerToGrade, Contains, ExactMatch
from semgrad_guard.grading.grader import ABSTAINED, Verdicts
from semgrad_guard.guard.policy import split_delta
from semgrad_guard.named import POCKET
from semgrad_guard.paper.drawing import draw_risk_coverage

ALPHA_MEMORY, ALPHA_LIBRARY, DELTA = 0.1, 0.2, 0.1
"""A very small model reads less well than it remembers; the larger alpha holds for all delivered answers."""
N_FIRST, N_SECOND = 300, 300
"""Questions that calibrate each stage on the embedded model; the rest is held out."""
N_CHOSEN, N_CALIBRATED = 272, 400
"""Questions that chose the fetched model's estimator and alpha, and those after them that made its calibration."""
BATCH = 32
"""Questions that are answered together."""


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


def run(output: Path | None = None, *, model: str = POCKET) -> int:
    """Run the demo; the picture goes to `output` (default: the working folder). Returns the exit code."""
    began, console = time.perf_counter(), Console()
    pool = {question.question: question for question in questions()}
    shown = [*(pool.pop(text) for text in SHOWN), *(Question(text, ()) for text in NOWHERE)]
    library = BM25Retriever.over(documents())
    console.print(f"[bold]A guarded RAG chain.[/] Model: {model}; {len(library.documents)} documents; BM25 retrieval.")
    make = calibrated_now if model == POCKET else calibrated_before
    demo = make(console, LanguageModel.from_pretrained(model), model, library, list(pool.values()))
    console.print(
        f"Promise for everything delivered: error rate <= {demo.alpha:.0%}, with probability {1 - demo.delta:.0%}."
    )
    table(console, shown, ask(demo.chain, shown), stages=demo.stages)
    answers = ask(demo.chain, demo.held_out)
    outcome(console, demo, answers)
    path = (output or Path()) / "risk_coverage.png"
    picture(path, demo, answers)
    console.print(f"Picture: {path}   ({time.perf_counter() - began:.0f} s in all)")
    if model == POCKET:
        console.print("The same on a real model: semgrad-guard fetch smollm2, then semgrad-guard demo --model smollm2")
    return 0


def calibrated_now(
    console: Console, model: LanguageModel, name: str, library: BM25Retriever, pool: Sequence[Question]
) -> Demo:
    """Two stages: from memory, and from the library on what the first does not let through. Each gets half of delta."""
    memory = ChatSemGrad.from_model(model, prompt_template="closed-book", max_tokens=24)
    reader = ChatSemGrad.from_model(model, prompt_template="reading", max_tokens=24)
    first_set, second_set = pool[:N_FIRST], pool[N_FIRST : N_FIRST + N_SECOND]
    delta, _ = split_delta(DELTA, 2)
    grader = ExactMatch()

    first = calibrate_chain(
        memory, _examples(first_set), grader, alpha=ALPHA_MEMORY, delta=delta, max_concurrency=BATCH
    )
    stage(console, "1, memory", first)
    drafts = ask(memory, second_set)
    verdicts = [get_verdict(draft) for draft in drafts]
    handed_on = [
        question
        for question, verdict in zip(second_set, verdicts, strict=True)
        if verdict is None or not first.lets_through(verdict.uncertainty)
    ]
    second = calibrate_chain(
        reading_chain(library, reader, model=name),
        _examples(handed_on),
        grader,
        alpha=ALPHA_LIBRARY,
        delta=delta,
        upstream=first.id,
        max_concurrency=BATCH,
    )
    stage(console, "2, library", second)

    router = UncertaintyRouterCallback(Policy.from_calibration(second), keep_draft=True)
    reading = reading_chain(library, reader.model_copy(update={"router": router}), model=name)
    router = UncertaintyRouterCallback(Policy.from_calibration(first), escalate_to=reading, keep_draft=True)
    chain = memory.model_copy(update={"router": router})
    return Demo(chain, first, pool[N_FIRST + N_SECOND :], grader, stages=2, alpha=ALPHA_LIBRARY, delta=DELTA)


def calibrated_before(
    console: Console, model: LanguageModel, name: str, library: BM25Retriever, pool: Sequence[Question]
) -> Demo:
    """One stage, by the calibration that comes along for this model's answers from the demo's documents."""
    calibration = Calibration.load(Path(__file__).parent / f"{name}.json")
    stage(console, "1, library", calibration)
    router = UncertaintyRouterCallback(Policy.from_calibration(calibration), keep_draft=True)
    reader = ChatSemGrad.from_model(model, max_tokens=48, router=router)
    chain, held_out = reading_chain(library, reader, model=name), pool[N_CHOSEN + N_CALIBRATED :]
    alpha, delta = calibration.alpha, calibration.delta
    return Demo(chain, calibration, held_out, Contains(), stages=1, alpha=alpha, delta=delta)


def _examples(pool: Sequence[Question]) -> list[tuple[str, tuple[str, ...]]]:
    return [(question.question, question.answers) for question in pool]


def ask(chain: Runnable[Any, AIMessage], pool: Sequence[Question]) -> list[AIMessage]:
    return chain.batch([question.question for question in pool], {"max_concurrency": BATCH})


# The printed lines, and the picture.

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

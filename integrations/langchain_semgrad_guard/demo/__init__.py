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
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from rich.console import Console

from langchain_semgrad_guard.chat_semgrad import ChatSemGrad
from langchain_semgrad_guard.demo import report
from langchain_semgrad_guard.demo.library import NOWHERE, SHOWN, BM25Retriever, Question, documents, questions
from langchain_semgrad_guard.demo.stages import GRADER, ask, calibrate_stage, grade, reading_chain
from langchain_semgrad_guard.router import UncertaintyRouterCallback
from semgrad_guard import Calibration, LanguageModel, Policy
from semgrad_guard.grading import AnswerGrader, Contains
from semgrad_guard.guard import estimator_of, split_delta
from semgrad_guard.named import POCKET

ALPHA_MEMORY, ALPHA_LIBRARY, DELTA = 0.1, 0.2, 0.1
"""A very small model reads less well than it remembers; the larger alpha holds for all delivered answers."""
N_FIRST, N_SECOND = 300, 300
"""Questions that calibrate each stage on the embedded model; the rest is held out."""
N_CHOSEN, N_CALIBRATED = 272, 400
"""Questions that chose the fetched model's estimator and alpha, and those after them that made its calibration."""


def run(output: Path | None = None, *, model: str = POCKET) -> int:
    """Run the demo; the picture goes to `output` (default: the working folder). Returns the exit code."""
    return run_embedded(output) if model == POCKET else run_fetched(model, output)


def run_embedded(output: Path | None) -> int:
    """Both stages on the embedded model, calibrated in the run."""
    began, console = time.perf_counter(), Console()
    shown, rest = _split(questions())
    model = LanguageModel.from_pretrained(POCKET)
    memory = ChatSemGrad.from_model(model, prompt_template="closed-book", max_tokens=24)
    reader = ChatSemGrad.from_model(model, prompt_template="reading", max_tokens=24)
    library = BM25Retriever.over(documents())
    report.opening(console, model.name, n_documents=len(library.documents), alpha=ALPHA_LIBRARY, delta=DELTA)

    first_set, second_set, held_out = rest[:N_FIRST], rest[N_FIRST : N_FIRST + N_SECOND], rest[N_FIRST + N_SECOND :]
    first, second = _calibrate(console, memory, reading_chain(library, reader, model=POCKET), first_set, second_set)
    router = UncertaintyRouterCallback(Policy.from_calibration(second), keep_draft=True)
    guarded_reader = reader.model_copy(update={"router": router})
    second_stage = reading_chain(library, guarded_reader, model=POCKET)
    first_router = UncertaintyRouterCallback(Policy.from_calibration(first), escalate_to=second_stage, keep_draft=True)
    guarded = memory.model_copy(update={"router": first_router})

    report.table(console, shown, ask(guarded, shown), stages=2)
    answers = _outcome(console, guarded, held_out, alpha=ALPHA_LIBRARY, delta=DELTA, grader=GRADER)
    picture = (output or Path()) / "risk_coverage.png"
    report.picture(picture, held_out, answers, calibration=first, title="Answering from memory")
    report.closing(console, picture, seconds=time.perf_counter() - began)
    console.print("The same on a real model: semgrad-guard fetch smollm2, then semgrad-guard demo --model smollm2")
    return 0


def run_fetched(name: str, output: Path | None) -> int:
    """Answers from documents by the fetched model of that name."""
    began, console = time.perf_counter(), Console()
    shown, rest = _split(questions())
    held_out, grader = rest[N_CHOSEN + N_CALIBRATED :], Contains()
    model = LanguageModel.from_pretrained(name)
    calibration = Calibration.load(calibration_of(name))
    library = BM25Retriever.over(documents())
    reader = ChatSemGrad.from_model(model, max_tokens=48, estimator=estimator_of(calibration))
    router = UncertaintyRouterCallback(Policy.from_calibration(calibration), keep_draft=True)
    guarded = reading_chain(library, reader.model_copy(update={"router": router}), model=name)
    alpha, delta = calibration.alpha, calibration.delta
    report.opening(console, model.name, n_documents=len(library.documents), alpha=alpha, delta=delta)
    report.stage(console, "1, library", calibration)

    report.table(console, shown, ask(guarded, shown), stages=1)
    answers = _outcome(console, guarded, held_out, alpha=alpha, delta=delta, grader=grader)
    report.effect(console, held_out, answers, grader=grader)
    picture = (output or Path()) / "risk_coverage.png"
    report.picture(picture, held_out, answers, calibration=calibration, title=f"{name} on passages", grader=grader)
    report.closing(console, picture, seconds=time.perf_counter() - began)
    return 0


def calibration_of(model: str) -> Path:
    """The calibration that comes along for this model's answers from the demo's documents."""
    return Path(__file__).parent / f"{model}.json"


def _outcome(
    console: Console,
    guarded: Runnable[Any, AIMessage],
    held_out: Sequence[Question],
    *,
    alpha: float,
    delta: float,
    grader: AnswerGrader,
) -> list[AIMessage]:
    answers = ask(guarded, held_out, note="What is delivered, on questions that calibrated nothing")
    report.outcome(console, held_out, answers, alpha=alpha, delta=delta, grader=grader)
    return answers


def _calibrate(
    console: Console,
    memory: ChatSemGrad,
    library: Runnable[Any, AIMessage],
    first_set: Sequence[Question],
    second_set: Sequence[Question],
) -> tuple[Calibration, Calibration]:
    """Stage 1 on its own questions; stage 2 on those of others that stage 1 hands on. Each gets half of delta."""
    delta, _ = split_delta(DELTA, 2)
    drafts = grade(memory, first_set, note="Stage 1, from memory: answer, score, grade")
    first = calibrate_stage(drafts, alpha=ALPHA_MEMORY, delta=delta)
    report.stage(console, "1, memory", first)
    drafts = grade(memory, second_set, note="Stage 2: what does stage 1 hand on?")
    handed_on = [g.question for g in drafts if not first.lets_through(g.verdict.uncertainty)]
    readings = grade(library, handed_on, note="Stage 2, from the library: read, score, grade")
    second = calibrate_stage(readings, alpha=ALPHA_LIBRARY, delta=delta, upstream=first.id)
    report.stage(console, "2, library", second)
    return first, second


def _split(pool: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """The questions of the table, with those that no document answers; and the rest."""
    by_text = {question.question: question for question in pool}
    nowhere = [Question(text, ()) for text in NOWHERE]
    return [*map(by_text.__getitem__, SHOWN), *nowhere], [
        question for question in pool if question.question not in SHOWN
    ]

"""`semgrad-guard demo`: a guarded RAG chain, on the embedded model (here) or on a fetched one (`reading`).

On the embedded model, questions that it knows are answered from memory; others escalate to retrieval and are answered
from a document; what is certain nowhere ends in an abstention. Both stages are calibrated in the run, on questions of
their own, so that the error rate of everything delivered is promised as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from rich.console import Console

from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.chat_model import ChatSemGrad
from langchain_semgrad_guard.demo import report
from langchain_semgrad_guard.demo.library import NOWHERE, SHOWN, BM25Retriever, Question, documents, questions
from langchain_semgrad_guard.demo.reading import run as run_reading
from langchain_semgrad_guard.demo.stages import ask, calibrate_stage, grade, reading_chain
from semgrad_guard import Calibration, LanguageModel, Policy
from semgrad_guard.guard import split_delta
from semgrad_guard.named import POCKET

ALPHA_MEMORY, ALPHA_LIBRARY, DELTA = 0.1, 0.2, 0.1
"""A very small model reads less well than it remembers; what is delivered as a whole keeps the larger alpha."""
N_FIRST, N_SECOND = 300, 300
"""Questions that calibrate each stage; the rest is for looking at the outcome."""


def run(output: Path | None = None, *, model: str = POCKET) -> int:
    """Run the demo; the picture goes to `output` (default: the working folder). Returns the exit code."""
    return run_embedded(output) if model == POCKET else run_reading(model, output)


def run_embedded(output: Path | None) -> int:
    """Both stages on the embedded model, calibrated in the run."""
    began = time.perf_counter()
    console = Console()
    shown, first_set, second_set, held_out = _split(questions())
    model = LanguageModel.from_pretrained(POCKET)
    memory = ChatSemGrad.from_model(model, prompt_template="closed-book", max_tokens=24)
    reader = ChatSemGrad.from_model(model, prompt_template="reading", max_tokens=24)
    library = BM25Retriever.over(documents())
    report.opening(console, model.name, n_documents=len(library.documents), alpha=ALPHA_LIBRARY, delta=DELTA)

    first, second = _calibrate(console, memory, reading_chain(library, reader, model=POCKET), first_set, second_set)
    router = UncertaintyRouterCallback(Policy.from_calibration(second), keep_draft=True)
    guarded_reader = reader.model_copy(update={"callbacks": [router]})
    second_stage = reading_chain(library, guarded_reader, model=POCKET)
    guarded = memory.with_config(
        callbacks=[UncertaintyRouterCallback(Policy.from_calibration(first), escalate_to=second_stage, keep_draft=True)]
    )

    asked = [*shown, *(Question(text, ()) for text in NOWHERE)]
    report.table(console, asked, ask(guarded, asked), stages=2)
    answers = ask(guarded, held_out, note="What is delivered, on questions that calibrated nothing")
    report.outcome(console, held_out, answers, alpha=ALPHA_LIBRARY, delta=DELTA)
    picture = (output or Path()) / "risk_coverage.png"
    report.picture(picture, held_out, answers, calibration=first, title="Answering from memory")
    report.closing(console, picture, seconds=time.perf_counter() - began)
    console.print("The same on a real model: semgrad-guard fetch smollm2, then semgrad-guard demo --model smollm2")
    return 0


def _calibrate(
    console: Console,
    memory: ChatSemGrad,
    library: Runnable[Any, AIMessage],
    first_set: Sequence[Question],
    second_set: Sequence[Question],
) -> tuple[Calibration, Calibration]:
    """Stage 1 on its own questions; stage 2 on what stage 1 hands on of others. Each gets half of delta."""
    delta, _ = split_delta(DELTA, 2)
    drafts = grade(memory, first_set, note="Stage 1, from memory: answer, score, grade")
    first = calibrate_stage(drafts, alpha=ALPHA_MEMORY, delta=delta)
    report.stage(console, "1, memory", first)
    asked = grade(memory, second_set, note="Stage 2: what does stage 1 hand on?")
    handed_on = [g.question for g in asked if not first.lets_through(g.verdict.uncertainty)]
    readings = grade(library, handed_on, note="Stage 2, from the library: read, score, grade")
    second = calibrate_stage(readings, alpha=ALPHA_LIBRARY, delta=delta, upstream=first.id)
    report.stage(console, "2, library", second)
    return first, second


def _split(pool: Sequence[Question]) -> tuple[list[Question], list[Question], list[Question], list[Question]]:
    """Shown, stage 1, stage 2, held out: disjoint."""
    by_text = {question.question: question for question in pool}
    rest = [question for question in pool if question.question not in SHOWN]
    parts = rest[:N_FIRST], rest[N_FIRST : N_FIRST + N_SECOND], rest[N_FIRST + N_SECOND :]
    return [by_text[text] for text in SHOWN], *parts

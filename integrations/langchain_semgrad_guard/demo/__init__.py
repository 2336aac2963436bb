"""`semgrad-guard demo`: a guarded RAG chain on the embedded model, calibrated and run before your eyes.

Questions the model knows are answered from memory; others escalate to retrieval and are answered from a document; what
is certain nowhere ends in an abstention. Both stages are calibrated in the run, on questions of their own, so that the
error rate of everything delivered is promised as a whole.
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
from langchain_semgrad_guard.demo.library import Question, documents, questions, retriever
from langchain_semgrad_guard.demo.stages import Graded, calibrate_stage, grade, reading_chain
from semgrad_guard import Calibration, LanguageModel, Policy, split_delta

ALPHA, DELTA = 0.1, 0.1
N_FIRST, N_SECOND = 260, 340
"""Questions that calibrate each stage; the rest is for looking at the outcome."""

SHOWN = (
    "Do you know the capital of France?",
    "Tell me the chemical symbol of gold.",
    "Which currency do people use in Japan?",
    "What continent is Kenya on?",
    "Do you know the capital of Mongolia?",
    "Tell me the currency of Iceland.",
    "Which chemical symbol stands for tungsten?",
    "Tell me the main language of Ethiopia.",
)
NOWHERE = (
    "Which city is Atlantis's capital?",
    "Tell me the chemical symbol of kryptonite.",
    "Who won the chess tournament in Ulverton last year?",
)
"""No document answers these, nor does the model know them."""


def run(output: Path | None = None) -> int:
    """Run the demo; the picture goes to `output` (default: the working folder). Returns the exit code."""
    began = time.perf_counter()
    console = Console()
    shown, first_set, second_set, held_out = _split(questions())
    model = LanguageModel.from_pretrained("pocket")
    memory = ChatSemGrad.from_model(model, prompt_template="closed-book", max_tokens=24)
    reader = ChatSemGrad.from_model(model, prompt_template="reading", max_tokens=24)
    library = reading_chain(retriever(), reader)
    report.opening(console, model.name, n_documents=len(documents()), alpha=ALPHA, delta=DELTA)

    share, _ = split_delta(DELTA, 2)
    with console.status(f"Stage 1, memory: answering, scoring and grading {N_FIRST} questions"):
        drafts = grade(memory, first_set)
        first = calibrate_stage(drafts, alpha=ALPHA, delta=share)
    report.stage(console, "1 memory", first)
    with console.status("Stage 2, library: what stage 1 does not let through"):
        handed_on = [g.question for g in grade(memory, second_set) if not first.lets_through(g.verdict.uncertainty)]
        readings = grade(library, handed_on)
        second = calibrate_stage(readings, alpha=ALPHA, delta=share, upstream=first.id)
    report.stage(console, "2 library", second)

    guarded = _guarded(memory, reader, first, second)
    asked = [*shown, *(Question(text, ()) for text in NOWHERE)]
    report.table(console, asked, _ask(guarded, asked))
    with console.status(f"Everything delivered, on {len(held_out)} questions that calibrated nothing"):
        answers = _ask(guarded, held_out)
    report.outcome(console, held_out, answers, alpha=ALPHA, delta=DELTA)
    picture = (output or Path()) / "risk_coverage.png"
    report.picture(picture, drafts=_first_drafts(memory, held_out), calibration=first)
    console.print(f"Picture: {picture}   ({time.perf_counter() - began:.0f} s in all)")
    return 0


def _guarded(
    memory: ChatSemGrad, reader: ChatSemGrad, first: Calibration, second: Calibration
) -> Runnable[Any, AIMessage]:
    """The whole chain, as an application would write it."""
    library = reading_chain(
        retriever(),
        reader.model_copy(
            update={"callbacks": [UncertaintyRouterCallback(Policy.from_calibration(second), keep_draft=True)]}
        ),
    )
    router = UncertaintyRouterCallback(Policy.from_calibration(first), escalate_to=library, keep_draft=True)
    return memory.with_config(callbacks=[router])


def _ask(chain: Runnable[Any, AIMessage], asked: Sequence[Question]) -> list[AIMessage]:
    return chain.batch([question.question for question in asked])


def _first_drafts(memory: ChatSemGrad, held_out: Sequence[Question]) -> list[Graded]:
    return grade(memory, held_out)


def _split(pool: Sequence[Question]) -> tuple[list[Question], list[Question], list[Question], list[Question]]:
    """Shown, stage 1, stage 2, held out: disjoint."""
    by_text = {question.question: question for question in pool}
    shown = [by_text.get(text, Question(text, ())) for text in SHOWN]
    rest = [question for question in pool if question.question not in SHOWN]
    return shown, rest[:N_FIRST], rest[N_FIRST : N_FIRST + N_SECOND], rest[N_FIRST + N_SECOND :]

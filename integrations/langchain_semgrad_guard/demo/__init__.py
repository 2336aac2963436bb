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

from langchain_semgrad_guard.calibrating import calibrate_chain
from langchain_semgrad_guard.chat_semgrad import ChatSemGrad
from langchain_semgrad_guard.demo import report
from langchain_semgrad_guard.demo.library import (
    NOWHERE,
    SHOWN,
    BM25Retriever,
    Question,
    documents,
    questions,
    reading_chain,
)
from langchain_semgrad_guard.demo.report import Demo
from langchain_semgrad_guard.messages import get_verdict
from langchain_semgrad_guard.router import UncertaintyRouterCallback
from semgrad_guard import Calibration, LanguageModel, Policy
from semgrad_guard.grading import Contains, ExactMatch
from semgrad_guard.guard.promise import split_delta
from semgrad_guard.named import POCKET

ALPHA_MEMORY, ALPHA_LIBRARY, DELTA = 0.1, 0.2, 0.1
"""A very small model reads less well than it remembers; the larger alpha holds for all delivered answers."""
N_FIRST, N_SECOND = 300, 300
"""Questions that calibrate each stage on the embedded model; the rest is held out."""
N_CHOSEN, N_CALIBRATED = 272, 400
"""Questions that chose the fetched model's estimator and alpha, and those after them that made its calibration."""
BATCH = 32
"""Questions that are answered together."""


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
    report.table(console, shown, ask(demo.chain, shown), stages=demo.stages)
    answers = ask(demo.chain, demo.held_out)
    report.outcome(console, demo, answers)
    picture = (output or Path()) / "risk_coverage.png"
    report.picture(picture, demo, answers)
    console.print(f"Picture: {picture}   ({time.perf_counter() - began:.0f} s in all)")
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
    report.stage(console, "1, memory", first)
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
    report.stage(console, "2, library", second)

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
    report.stage(console, "1, library", calibration)
    router = UncertaintyRouterCallback(Policy.from_calibration(calibration), keep_draft=True)
    reader = ChatSemGrad.from_model(model, max_tokens=48, router=router)
    return Demo(
        reading_chain(library, reader, model=name),
        calibration,
        pool[N_CHOSEN + N_CALIBRATED :],
        Contains(),
        stages=1,
        alpha=calibration.alpha,
        delta=calibration.delta,
    )


def _examples(pool: Sequence[Question]) -> list[tuple[str, tuple[str, ...]]]:
    return [(question.question, question.answers) for question in pool]


def ask(chain: Runnable[Any, AIMessage], pool: Sequence[Question]) -> list[AIMessage]:
    return chain.batch([question.question for question in pool], {"max_concurrency": BATCH})

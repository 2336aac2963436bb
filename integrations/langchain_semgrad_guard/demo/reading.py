"""The demo on a fetched model: every question is answered from a document, by a calibration that comes along.

A calibration takes minutes on such a model, so it is not made in the run. How it was made, command by command, stands
in docs/fifteen-minutes.md.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.chat_model import ChatSemGrad
from langchain_semgrad_guard.demo import report
from langchain_semgrad_guard.demo.library import NOWHERE, SHOWN, BM25Retriever, Question, documents, questions
from langchain_semgrad_guard.demo.stages import ask, reading_chain
from semgrad_guard import Calibration, LanguageModel, Policy
from semgrad_guard.evaluation.graders import Contains
from semgrad_guard.guard import estimator_of

GRADER = Contains()
N_CHOSEN, N_CALIBRATED = 272, 400
"""Of the questions that are not shown: those that chose the estimator and alpha, and those after them that made the
calibration. What follows is held out."""


def calibration_of(model: str) -> Path:
    """The calibration that comes along for this model's answers from the demo's documents."""
    return Path(__file__).parent / f"{model}.json"


def run(name: str, output: Path | None = None) -> int:
    """Run it on the fetched model of that name; the picture goes to `output`. Returns the exit code."""
    began = time.perf_counter()
    console = Console()
    model = LanguageModel.from_pretrained(name)
    calibration = Calibration.load(calibration_of(name))
    library = BM25Retriever.over(documents())
    reader = ChatSemGrad.from_model(model, max_tokens=48, estimator=estimator_of(calibration))
    router = UncertaintyRouterCallback(Policy.from_calibration(calibration), keep_draft=True)
    guarded = reading_chain(library, reader.model_copy(update={"callbacks": [router]}), model=name)
    promise = {"alpha": calibration.alpha, "delta": calibration.delta}
    report.opening(console, model.name, n_documents=len(library.documents), **promise)
    report.stage(console, "1, library", calibration)

    pool = questions()
    rest = [question for question in pool if question.question not in SHOWN]
    held_out = rest[N_CHOSEN + N_CALIBRATED :]
    shown = [*(question for question in pool if question.question in SHOWN), *(Question(each, ()) for each in NOWHERE)]
    report.table(console, shown, ask(guarded, shown), stages=1)
    answers = ask(guarded, held_out, note="What is delivered, on questions that calibrated nothing")
    report.outcome(console, held_out, answers, grader=GRADER, **promise)
    report.effect(console, held_out, answers, grader=GRADER)
    picture = (output or Path()) / "risk_coverage.png"
    report.picture(picture, held_out, answers, calibration=calibration, title=f"{name} on passages", grader=GRADER)
    report.closing(console, picture, seconds=time.perf_counter() - began)
    return 0

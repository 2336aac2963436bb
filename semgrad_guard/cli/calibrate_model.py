"""Answers of a model here for `calibrate`, scored by its own states and gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semgrad_guard.calibration import Binding, EngineIdentity
from semgrad_guard.cli.loading import Cluster, spreading
from semgrad_guard.cli.terminal import kept_on_interrupt
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.evaluation.job_record import differing, read_record
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.evaluation.runs.answers import Answer
from semgrad_guard.evaluation.runs.run import Answering, collect_answers, run_binding, run_settings
from semgrad_guard.guard import template_name
from semgrad_guard.loading import ModelSource
from semgrad_guard.records import Message, PromptForm
from semgrad_guard.settings import OnDoubt


@dataclass(frozen=True)
class ModelWriter:
    """The answers of `model`, which `source` loads in other processes; `batch_size` are requested together."""

    model: LanguageModel
    estimators: Mapping[str, Estimator]
    template: str
    decoding: GenerationOptions
    phrasing: Phrasing
    batch_size: int
    cluster: Cluster
    source: ModelSource
    on_doubt: OnDoubt | None = None
    """The action at a doubtful sentence, where every sentence is scored by itself."""

    def prompt_name(self, template: str) -> str:
        """The full name of the prompts."""
        return template_name(self.model, template)

    def others(self, paths: Sequence[Path], rows: Sequence[Question]) -> list[OtherRun]:
        """The answers of other engines to the same questions."""
        settings = run_settings(self.model, self.estimators, options=self.decoding, template=self.template)
        return [read_other(path, rows, settings) for path in paths]

    def answers(self, rows: Sequence[Question], path: Path, template: str) -> list[Answer]:
        """The answers; Ctrl-C tells how many are kept, and how to resume."""
        by_sentence = self.on_doubt is not None
        answering = Answering(self.model, self.estimators, self.decoding, self.phrasing, by_sentence)
        with (
            kept_on_interrupt("Answering", f"answers are kept in {path}") as tell,
            spreading(self.cluster, self.model, self.source, answering.recipe) as spread,
        ):
            return collect_answers(rows, path, answering, batch_size=self.batch_size, spread=spread, on_progress=tell)

    def binding(self, grader: str, upstream: str | None) -> Callable[[Estimator], Binding]:
        """The binding of a calibration on these answers, for each estimator."""
        return lambda estimator: run_binding(
            self.model,
            estimator,
            options=self.decoding,
            template=self.template,
            grader=grader,
            upstream=upstream,
            on_doubt=self.on_doubt,
        )

    def form(self, conversation: Sequence[Message]) -> PromptForm:
        """The form of a prompt."""
        return self.model.render(conversation).form


_OF_ENGINES = frozenset({"fingerprint", "dtype"})
"""Settings of a run in which engines and number formats differ."""


@dataclass(frozen=True)
class OtherRun:
    """The answers to the same questions, in their order, and the engine that gave them."""

    engine: EngineIdentity
    answers: Sequence[Answer]


def read_other(path: Path, rows: Sequence[Question], settings: Mapping[str, Any]) -> OtherRun:
    """The answers that a run left at `path`, for a calibration whose own run has these `settings`.

    Raises:
        BindingMismatchError: prompts or scoring differ, or they are of this very engine.
        DataFileError: a line is broken.
        InputError: it is not a record of answers, or questions have no answer there.
    """
    theirs, kept = read_record(path, Answer)
    mine: dict[str, Any] = json.loads(json.dumps(settings))
    changed = differing(theirs, mine)
    if foreign := [text for name, text in changed.items() if name not in _OF_ENGINES]:
        raise BindingMismatchError(
            f"The answers in {path} come from a run that differs in more than its engine: {'; '.join(foreign)}. "
            "Answer the questions there with the settings of this command."
        )
    if not changed:
        raise BindingMismatchError(
            f"The answers in {path} are this engine's own: the fingerprint is {mine['fingerprint']!r} in both. "
            "--also takes those of another engine or number format."
        )
    found = {answer.key: answer for answer in kept}
    if missing := sum(question.key not in found for question in rows):
        raise InputError(
            f"{missing} of the {len(rows)} questions have no answer in {path}. "
            "Run that calibration with these questions."
        )
    engine = EngineIdentity(fingerprint=theirs["fingerprint"], dtype=theirs["dtype"])
    return OtherRun(engine, [found[question.key] for question in rows])

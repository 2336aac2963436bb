"""Answers of a model here for `calibrate`, scored by its own states and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from semgrad_guard.cli.estimators import OtherRun, read_other
from semgrad_guard.cli.loading import Cluster, spreading
from semgrad_guard.cli.terminal import kept_on_interrupt
from semgrad_guard.loading import ModelSource

if TYPE_CHECKING:
    from semgrad_guard.calibration import Binding
    from semgrad_guard.engine.generation.options import GenerationOptions
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.estimators import Estimator
    from semgrad_guard.evaluation.questions.data import Question
    from semgrad_guard.evaluation.questions.prompts import Phrasing
    from semgrad_guard.evaluation.runs.answers import Answer
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
        from semgrad_guard.guard import template_name

        return template_name(self.model, template)

    def others(self, paths: Sequence[Path], rows: Sequence[Question]) -> list[OtherRun]:
        """The answers of other engines to the same questions."""
        from semgrad_guard.evaluation.runs.run import run_settings

        settings = run_settings(self.model, self.estimators, options=self.decoding, template=self.template)
        return [read_other(path, rows, settings) for path in paths]

    def answers(self, rows: Sequence[Question], path: Path, template: str) -> list[Answer]:
        """The answers; Ctrl-C tells how many are kept, and how to resume."""
        from semgrad_guard.evaluation.runs.run import Answering, collect_answers

        by_sentence = self.on_doubt is not None
        recipe = Answering(self.model, self.estimators, self.decoding, self.phrasing, by_sentence).recipe
        with (
            kept_on_interrupt("Answering", f"answers are kept in {path}") as tell,
            spreading(self.cluster, self.model, self.source, recipe) as spread,
        ):
            return collect_answers(
                rows,
                path,
                model=self.model,
                estimators=self.estimators,
                options=self.decoding,
                phrasing=self.phrasing,
                by_sentence=by_sentence,
                batch_size=self.batch_size,
                spread=spread,
                on_progress=tell,
            )

    def binding(self, grader: str, upstream: str | None) -> Callable[[Estimator], Binding]:
        """The binding of a calibration on these answers, for each estimator."""
        from semgrad_guard.evaluation.runs.run import run_binding

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

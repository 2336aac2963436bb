"""Gradients at every layer and late prompt token, for every answer of a file of questions: a resumable run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.evaluation.job_record import JobRecord, Progress
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.evaluation.runs.answers import Answer
from semgrad_guard.evaluation.runs.run import complete, in_turn, run_settings, why_too_long


class GridAnswer(Answer):
    """An answer with its `grid` (`GradientScores.grid`: all layers x last prompt tokens) and its prompt's own t*.

    The grid is None, with a reason, where there is none.
    """

    semantic_token: int | None = None
    grid: tuple[tuple[float, ...], ...] | None = None
    reason: str | None = None

    def semgrad(self, layers: Sequence[int], offset: int | None = None) -> float | None:
        """SemGrad over these layers at a token (default: the prompt's own t*); None where the grid does not hold it."""
        at = self.semantic_token if offset is None else offset
        if self.grid is None or at is None or -at > len(self.grid[0]):
            return None
        return statistics.fmean(self.grid[layer][at] for layer in layers)


def collect_grids(
    questions: Sequence[Question],
    path: Path,
    *,
    model: LanguageModel,
    tokens: int,
    options: GenerationOptions,
    system: str | None = None,
    batch_size: int = 8,
    on_progress: Progress | None = None,
) -> list[GridAnswer]:
    """Answer the questions greedily and differentiate by all layers at the last `tokens` prompt tokens.

    Every answer is kept at `path` as it comes, and what is there already is not redone (see `JobRecord`).
    """
    objective = Objective(layers=tuple(range(model.n_layers)), last_tokens=tokens)
    phrasing = Phrasing(system)
    settings = {**run_settings(model, {}, options=options, template=phrasing.name(questions)), "grid_tokens": tokens}

    def answer(batch: Sequence[Question], _: int) -> list[GridAnswer]:
        turns = [phrasing.conversation(question) for question in batch]
        reasons = [why_too_long(model, turn) for turn in turns]
        asked = [turn for turn, reason in zip(turns, reasons, strict=True) if reason is None]
        generations = iter(model.generate_batch(asked, options, objective=objective))
        return [
            _answered(question, next(generations), objective) if reason is None else _unanswered(question, reason)
            for question, reason in zip(batch, reasons, strict=True)
        ]

    with JobRecord(path, settings, GridAnswer) as record:
        return complete(record, questions, in_turn(answer), batch_size=batch_size, on_progress=on_progress)


def _answered(question: Question, generation: Generation, objective: Objective) -> GridAnswer:
    timed = generation.evidence.gradients(objective)
    grid = timed.scores.grid if timed is not None else ()
    reason = generation.evidence.why_empty if timed is None else timed.scores.reason or "a gradient is not finite"
    return GridAnswer(
        key=question.key,
        id=question.id,
        question=question.question,
        text=generation.text,
        finish_reason=generation.finish_reason,
        scores={},
        semantic_token=generation.prompt.semantic_token.offset,
        grid=grid or None,
        reason=None if grid else reason,
    )


def _unanswered(question: Question, reason: str) -> GridAnswer:
    return GridAnswer(key=question.key, id=question.id, question=question.question, text=None, scores={}, reason=reason)

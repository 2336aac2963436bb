"""Gradients at every layer and late prompt token, for every answer of a file of questions: a resumable run."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scoring.semantic_preservation import SemanticPreservation
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.evaluation.job_record import JobRecord, Progress, differing
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.evaluation.runs.answers import Answer
from semgrad_guard.evaluation.runs.run import complete, in_turn, run_settings, where_it_fits
from semgrad_guard.files import atomic_write
from semgrad_guard.guard import template_name
from semgrad_guard.records import Message


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


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    """How to probe: the prompts' last `tokens` (more, where t* lies further back), and how to answer."""

    tokens: int = 10
    system: str | None = None
    batch_size: int = 8
    options: GenerationOptions = GenerationOptions(max_tokens=64)  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.batch_size < 1:
            raise InputError(f"tokens and batch size must be at least 1, not {self.tokens} and {self.batch_size}")


def collect_grids(
    questions: Sequence[Question],
    path: Path,
    plan: ProbePlan,
    *,
    model: LanguageModel,
    tokens: int,
    on_progress: Progress,
) -> list[GridAnswer]:
    """Answer the questions greedily and differentiate by all layers at the last `tokens` prompt tokens.

    Every answer is kept at `path` as it comes, and recorded answers are not redone (see `JobRecord`).
    """
    objective = Objective(layers=tuple(range(model.n_layers)), last_tokens=tokens)
    phrasing = Phrasing(plan.system)
    settings = {
        **run_settings(model, {}, options=plan.options, template=phrasing.name(questions)),
        "grid_tokens": tokens,
    }

    def answer(batch: Sequence[Question], _: int) -> list[GridAnswer]:
        return where_it_fits(model, phrasing, batch, fitting, _unanswered)

    def fitting(some: Sequence[Question], conversations: Sequence[list[Message]]) -> Iterator[GridAnswer]:
        generations = model.generate_batch(conversations, plan.options, objective=objective)
        return map(partial(_answered, objective=objective), some, generations)

    with JobRecord(path, settings, GridAnswer) as record:
        return complete(record, questions, in_turn(answer), batch_size=plan.batch_size, on_progress=on_progress)


def _answered(question: Question, generation: Generation, *, objective: Objective) -> GridAnswer:
    timed = generation.evidence.gradients(objective)
    grid = timed.scores.grid if timed is not None else ()
    reason = generation.evidence.why_empty if timed is None else timed.scores.reason or "a gradient is not finite"
    return GridAnswer.to(
        question,
        text=generation.text,
        finish_reason=generation.finish_reason,
        scores={},
        semantic_token=generation.prompt.semantic_token.offset,
        grid=grid or None,
        reason=None if grid else reason,
    )


def _unanswered(question: Question, reason: str) -> GridAnswer:
    return GridAnswer.to(question, text=None, scores={}, reason=reason)


_SAVE_EVERY = 20.0


def wordings(model: LanguageModel, question: Question, system: str | None) -> list[Prompt]:
    """The prompts of a question and of its paraphrases."""
    texts = dict.fromkeys((question.question, *question.paraphrases))
    rows = [question.model_copy(update={"question": text}) for text in texts]
    return [model.render(Phrasing(system).conversation(row)) for row in rows]


def measure_preservation(
    questions: Sequence[Question],
    path: Path,
    plan: ProbePlan,
    *,
    model: LanguageModel,
    tokens: int,
    on_progress: Progress,
) -> SemanticPreservation:
    """Sums over all questions, each with a paraphrase at least; kept at `path` now and then, and at the end.

    Args:
        questions: distinct ones.
        path: the sums so far (safetensors); a run with other settings does not continue it.
        plan: a forward pass takes twice its batch of prompts, roughly: a question's wordings stay together.
        model: whose hidden states are measured.
        tokens: how many of the prompts' last tokens.
        on_progress: told (questions done, questions in all).

    Raises:
        BindingMismatchError: the sums at `path` are another run's.
    """
    settings = {
        "model": model.identity.name,
        "fingerprint": model.identity.fingerprint,
        "dtype": model.identity.dtype,
        "prompt_template": template_name(model, Phrasing(plan.system).name(questions)),
        "tokens": tokens,
        "questions": _digest(questions),
    }
    sums = _load(path, settings)
    step = max(1, 2 * plan.batch_size // (1 + max(len(question.paraphrases) for question in questions)))
    done, saved = 0 if sums is None else sums.queries, time.monotonic()
    on_progress(done, len(questions))
    while done < len(questions):
        groups = [wordings(model, question, plan.system) for question in questions[done : done + step]]
        states = model.last_states([prompt for group in groups for prompt in group], tokens)
        sums = sums or SemanticPreservation.empty(states.shape[1], tokens, states.shape[-1])
        begin = 0
        for group in groups:
            sums.add(states[begin : begin + len(group)])
            begin += len(group)
        done += len(groups)
        if done == len(questions) or time.monotonic() - saved > _SAVE_EVERY:
            atomic_write(path, partial(sums.write, settings=settings))
            saved = time.monotonic()
        on_progress(done, len(questions))
    if sums is None:
        raise InputError("there are no questions to measure")
    return sums


def _digest(questions: Sequence[Question]) -> str:
    content = json.dumps([[question.key, *question.paraphrases] for question in questions])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _load(path: Path, settings: dict[str, Any]) -> SemanticPreservation | None:
    if not path.exists():
        return None
    sums, found = SemanticPreservation.read(path)
    if changed := differing(found, settings):
        raise BindingMismatchError(
            f"The sums in {path} come from a probe with other settings: {'; '.join(changed.values())}. Continue with "
            "the same ones, or choose another output."
        )
    return sums

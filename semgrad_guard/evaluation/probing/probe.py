"""Probing a model: where it keeps the meaning of a prompt, where SemGrad works, and which t* follows from that."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from scipy import stats as _untyped_stats  # pyright: ignore[reportMissingTypeStubs]

from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.semantic_token import TokenChoice
from semgrad_guard.engine.scoring.semantic_preservation import SemanticPreservation
from semgrad_guard.errors import InputError, PromptTooLongError
from semgrad_guard.evaluation.graders import Grader
from semgrad_guard.evaluation.job_record import Progress
from semgrad_guard.evaluation.metrics import auroc
from semgrad_guard.evaluation.probing.collecting import GridAnswer, collect_grids, measure_preservation, wordings
from semgrad_guard.evaluation.probing.probe_record import GradedGrid, Probe, Table
from semgrad_guard.evaluation.probing.token_rule import Recommendation, with_answers, without_answers
from semgrad_guard.evaluation.questions.data import Question, with_paraphrases
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.guard import template_name

Correlations = tuple[float | None, float | None]
_stats = cast(Any, _untyped_stats)

Phase = Callable[[str], AbstractContextManager[Progress]]
"""Names a part of the work for as long as it lasts, and yields a progress function."""


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


@dataclass(frozen=True)
class PromptEnds:
    """The common ends of all prompts: how many last tokens to look at, their names, and t*."""

    count: int
    names: tuple[str | None, ...]
    own_token: int

    @property
    def complete(self) -> range:
        """The offsets that can be t*: the tokens all prompts end with, and the one before (the user's last, as a rule).

        Earlier ones have not read the whole question, and are another word in every prompt.
        """
        shared = next((n for n, name in enumerate(reversed(self.names)) if name is None), self.count)
        return range(-min(shared + 1, self.count), 0)


def prompt_ends(model: LanguageModel, questions: Sequence[Question], plan: ProbePlan) -> PromptEnds:
    """Read off the rendered prompts; the count covers every t*, and no more than the shortest prompt has.

    Raises:
        PromptTooLongError: a prompt exceeds the context window.
    """
    prompts = [prompt for question in questions for prompt in _fitting(model, question, plan)]
    offsets = Counter(prompt.semantic_token.offset for prompt in prompts)
    shortest = min(len(prompt.ids) for prompt in prompts)
    count = min(max(plan.tokens, -min(offsets)), shortest)
    ends = [set(column) for column in zip(*(prompt.ids[-count:] for prompt in prompts), strict=True)]
    tokenizer: Any = model.tokenizer
    names = tuple(str(tokenizer.decode(list(ids))) if len(ids) == 1 else None for ids in ends)
    return PromptEnds(count, names, offsets.most_common(1)[0][0])


def _fitting(model: LanguageModel, question: Question, plan: ProbePlan) -> list[Prompt]:
    name, window = repr(question.id or question.question[:60]), model.context_window
    try:
        prompts = wordings(model, question, system=plan.system)
    except PromptTooLongError as error:
        raise PromptTooLongError(f"{name}, or a paraphrase of it: {error}, or leave the line out") from error
    longest = max(len(prompt.ids) for prompt in prompts)
    if window is not None and longest > window:
        raise PromptTooLongError(
            f"{name}, or a paraphrase of it, has {longest} tokens as a prompt, and "
            f"the context window is {window}: shorten the line or leave it out"
        )
    return prompts


def probe(
    questions: Sequence[Question],
    *,
    model: LanguageModel,
    plan: ProbePlan,
    data: str,
    states_path: Path,
    answers_path: Path | None,
    grader: Grader,
    phase: Phase | None = None,
) -> Probe:
    """Measure semantic preservation on the questions with paraphrases and, on request, SemGrad on all with answers.

    Args:
        questions: distinct ones.
        model: is probed.
        plan: how.
        data: the name of the questions in the record.
        states_path: keeps the sums of hidden states, so that an interrupted probe continues.
        answers_path: keeps the answers; None to leave them out.
        grader: decides which answers are right.
        phase: shows how far each part of the work is.

    Raises:
        InputError: too few questions have paraphrases.
        EmptyLayerSpanError: the model has too few layers for SemGrad.
    """
    paraphrased = with_paraphrases(questions)
    upper = Objective().span(model.n_layers)
    ends = prompt_ends(model, questions, plan)
    phase = phase or _unseen
    with phase("Reading paraphrases") as tell:
        sums = measure_preservation(
            paraphrased,
            states_path,
            model=model,
            tokens=ends.count,
            system=plan.system,
            batch_size=2 * plan.batch_size,
            on_progress=tell,
        )
    scores = _rows(sums.scores)
    graded, recommendation = None, without_answers(ends.own_token, _by_offset(scores, upper, ends))
    gradable = [question for question in questions if any(answer.strip() for answer in question.answers)]
    if answers_path is not None and gradable:
        with phase("Answering") as tell:
            answers = collect_grids(
                gradable,
                answers_path,
                model=model,
                tokens=ends.count,
                options=plan.options,
                system=plan.system,
                batch_size=plan.batch_size,
                on_progress=tell,
            )
        correct = [
            answer.text is not None and grader(answer.text, question.answers)
            for question, answer in zip(gradable, answers, strict=True)
        ]
        recommendation = recommend(answers, correct, upper, ends)
        graded = _graded(answers, correct, scores, upper=upper, grader=grader.name, found=recommendation)
    template = template_name(model, Phrasing(plan.system).name(questions))
    left_out = len(questions) - len(paraphrased)
    return _record(model, ends, sums, recommendation, graded, data=data, template=template, left_out=left_out)


def recommend(
    answers: Sequence[GridAnswer], correct: Sequence[bool], upper: Sequence[int], ends: PromptEnds
) -> Recommendation:
    """Apply the rule (`token_rule.py`) to graded answers."""
    others = [offset for offset in ends.complete if offset != ends.own_token]
    by_offset = {offset: [answer.semgrad(upper, offset) for answer in answers] for offset in others}
    return with_answers(ends.own_token, [answer.semgrad(upper) for answer in answers], by_offset, correct)


def correlations(preservation: Sequence[Sequence[float]], aurocs: Sequence[Sequence[float | None]]) -> Correlations:
    """Pearson's and Spearman's correlation over all layers and tokens; None where one side does not vary."""
    pairs = [
        (sps, found)
        for row, others in zip(preservation, aurocs, strict=True)
        for sps, found in zip(row, others, strict=True)
        if found is not None
    ]
    x, y = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    if len(pairs) < 3 or not np.ptp(x) or not np.ptp(y):
        return None, None
    return float(_stats.pearsonr(x, y).statistic), float(_stats.spearmanr(x, y).statistic)


def _graded(
    answers: Sequence[GridAnswer],
    correct: Sequence[bool],
    preservation: Sequence[Sequence[float]],
    *,
    upper: Sequence[int],
    grader: str,
    found: Recommendation,
) -> GradedGrid:
    layers, offsets = range(len(preservation)), range(-len(preservation[0]), 0)
    table = [[auroc([a.semgrad([layer], t) for a in answers], correct) for t in offsets] for layer in layers]
    pearson, spearman = correlations(preservation, table)
    difference = found.difference
    return GradedGrid(
        answers=len(answers),
        right=sum(correct),
        without_grid=sum(answer.grid is None for answer in answers),
        grader=grader,
        auroc=tuple(map(tuple, table)),
        by_token=tuple(auroc([a.semgrad(upper, t) for a in answers], correct) for t in offsets),
        pearson=pearson,
        spearman=spearman,
        proposal=found.proposal,
        difference=None if difference is None else difference.value,
        low=None if difference is None else difference.low,
        high=None if difference is None else difference.high,
    )


def _record(
    model: LanguageModel,
    ends: PromptEnds,
    sums: SemanticPreservation,
    found: Recommendation,
    graded: GradedGrid | None,
    *,
    data: str,
    template: str,
    left_out: int,
) -> Probe:
    identity = model.identity
    return Probe(
        created=datetime.date.today().isoformat(),
        model=identity.name,
        revision=identity.revision,
        fingerprint=identity.fingerprint,
        dtype=identity.dtype,
        prompt_template=template,
        data=data,
        questions=sums.queries,
        without_paraphrases=left_out,
        tokens=ends.names,
        upper_layers=Objective().span(model.n_layers),
        own_token=ends.own_token,
        preservation=_rows(sums.scores),
        within=_rows(sums.similarity_within),
        across=_rows(sums.similarity_across),
        graded=graded,
        semantic_token=TokenChoice(
            offset=found.offset, template=identity.template, model=identity.name, reason=found.reason
        ),
    )


@contextmanager
def _unseen(_: str) -> Generator[Progress]:
    yield lambda done, total: None


def _rows(values: torch.Tensor) -> Table:
    return tuple(tuple(float(number) for number in row) for row in values)


def _by_offset(scores: Sequence[Sequence[float]], upper: Sequence[int], ends: PromptEnds) -> dict[int, float]:
    offsets = sorted({*ends.complete, ends.own_token} & {*range(-ends.count, 0)})
    return {t: math.fsum(scores[layer][t] for layer in upper) / len(upper) for t in offsets}

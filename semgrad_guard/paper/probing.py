"""Probing a model: where it keeps the meaning of a prompt, where SemGrad works, and which t* follows from that.

Gradients at every layer and late prompt token, for every answer of a file of questions, come from a resumable run. A
chat model can write the paraphrases, each question in other words, and an NLI model confirms them.

A wording is dropped where it cannot be the same question: it lacks a name or a number of the question, or repeats a
wording. With an NLI model the question and the wording must entail each other, too.
"""

from __future__ import annotations

import datetime
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel
from scipy import stats

from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.objective import Objective, TokenChoice
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.thoughts import Foreign
from semgrad_guard.engine.scores.gradient_scores import SemanticPreservation, last_states
from semgrad_guard.engine.text_units import normalise
from semgrad_guard.errors import InputError, PromptTooLongError
from semgrad_guard.grading import AnswerGrader, AnswerToGrade
from semgrad_guard.grading.grader import ABSTAINED
from semgrad_guard.guard import template_name
from semgrad_guard.metrics import auroc
from semgrad_guard.paper.probe_record import GradedGrid, Probe, Recommendation, Table, with_answers, without_answers
from semgrad_guard.questions.data import Phrasing, Question, with_paraphrases
from semgrad_guard.questions.run import batches_of, complete, run_settings, where_it_fits
from semgrad_guard.questions.run_record import Answer, JobRecord, Progress, unwatched
from semgrad_guard.records import Message

if TYPE_CHECKING:
    from semgrad_guard.estimators.text_pairs import Entailment


Ask = Callable[[Sequence[str]], Sequence[str]]
"""Replies of a chat model to prompts, in their order."""

PROMPT = """Write the question below in {count} other ways. Keep its meaning, its names and its numbers. Do not answer \
it. Write one question a line, and nothing else.

Question: {question}"""
COUNT, MAX_TOKENS = 3, 160
"""How many wordings are asked for, and the most tokens of a reply."""
KIND = "paraphrases"
"""The kind of the record that keeps them."""

_BULLET = re.compile(r"^(?:[-*•]|\(?\d{1,2}[.):]|[a-z][.)])\s+|^(?:question|paraphrase)\s*\d*:\s*", re.IGNORECASE)
_NAMES = re.compile(r"\d[\d.,]*\d|\d|(?<=\s)[^\W\d_a-z]\w*")
"""A number, or a word behind the first with a capital letter."""


class Paraphrased(BaseModel, frozen=True, extra="forbid"):
    """The paraphrases of the question that has this key: a line of their record."""

    key: str
    texts: tuple[str, ...]


def with_written(
    questions: Sequence[Question],
    path: Path,
    ask: Ask,
    *,
    writer: str,
    nli: Entailment | None = None,
    batch_size: int = 8,
    on_progress: Progress | None = None,
) -> list[Question]:
    """The questions with paraphrases; those that have some keep theirs.

    Args:
        questions: distinct ones.
        path: the record of what was written, from which an interrupted run continues.
        ask: the chat model.
        writer: its name, for the record.
        nli: drops what does not follow from the question, or the question from it.
        batch_size: prompts at once.
        on_progress: told (questions done, questions in all).

    Raises:
        BindingMismatchError: the record at `path` is another writer's.
    """
    bare = [question for question in questions if not question.paraphrases]
    settings = {"writer": writer, "count": COUNT, "nli": None if nli is None else nli.name, "prompt": PROMPT}

    def write(batch: Sequence[Question], _: int) -> list[Paraphrased]:
        replies = ask([PROMPT.format(count=COUNT, question=question.question) for question in batch])
        found = [wordings_in(reply, question.question) for reply, question in zip(replies, batch, strict=True)]
        for place, (row, texts) in enumerate(zip(batch, found, strict=True)):
            if nli is not None:
                there = nli.probabilities([(row.question, text) for text in texts])
                back = nli.probabilities([(text, row.question) for text in texts])
                both = [one.entails and other.entails for one, other in zip(there, back, strict=True)]
                found[place] = tuple(text for text, entailed in zip(texts, both, strict=True) if entailed)
        return [Paraphrased(key=row.key, texts=texts) for row, texts in zip(batch, found, strict=True)]

    with JobRecord(path, settings, Paraphrased, kind=KIND) as record:
        written = complete(record, bare, write, batch_size=batch_size, on_progress=on_progress)
    texts = {one.key: one.texts for one in written}
    return [
        question.model_copy(update={"paraphrases": question.paraphrases or texts[question.key]})
        for question in questions
    ]


def by_model(model: LanguageModel) -> Ask:
    """The model itself, greedily."""

    def ask(prompts: Sequence[str]) -> list[str]:
        conversations = [[Message("user", prompt)] for prompt in prompts]
        options = GenerationOptions(max_tokens=MAX_TOKENS)
        return [generation.text for generation in model.generate_batch(conversations, options)]

    return ask


def wordings_in(reply: str, question: str) -> tuple[str, ...]:
    """The wordings of a question in a reply: its lines without bullets and quotation marks, if they can be the same
    question.
    """
    names, seen, own = {*_NAMES.findall(question)}, set[str](), normalise(question)
    found: list[str] = []
    for line in Foreign.of(reply, None).answer.splitlines():
        text = _BULLET.sub("", line.strip()).strip("\"'“”*` ")
        is_question = text.endswith("?") or not question.rstrip().endswith("?")
        plain = normalise(text)
        if is_question and all(word in text for word in names) and own not in plain and plain not in seen:
            seen.add(plain)
            found.append(text)
    return tuple(text for text in found if text)[:COUNT]


Phase = Callable[[str], AbstractContextManager[Progress]]
"""Names a part of the work for as long as it lasts, and yields a progress function."""


class GridAnswer(Answer, frozen=True):
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
        return where_it_fits(model, phrasing, batch, fitting, unanswered)

    def fitting(some: Sequence[Question], conversations: Sequence[list[Message]]) -> Iterator[GridAnswer]:
        generations = model.generate_batch(conversations, plan.options, objective=objective)
        return map(partial(_answered, objective=objective), some, generations)

    def unanswered(question: Question, reason: str) -> GridAnswer:
        return GridAnswer.to(question, text=None, scores={}, reason=reason)

    with JobRecord(path, settings, GridAnswer) as record:
        return complete(record, questions, answer, batch_size=plan.batch_size, on_progress=on_progress)


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


def wordings(model: LanguageModel, question: Question, system: str | None) -> list[Prompt]:
    """The prompts of a question and of its paraphrases."""
    texts = dict.fromkeys((question.question, *question.paraphrases))
    rows = [question.model_copy(update={"question": text}) for text in texts]
    return [model.render(Phrasing(system).conversation(row)) for row in rows]


def measure_preservation(
    questions: Sequence[Question], plan: ProbePlan, *, model: LanguageModel, tokens: int, on_progress: Progress
) -> SemanticPreservation:
    """Sums over distinct questions, each with a paraphrase at least, at the prompts' last `tokens` tokens.

    A forward pass takes twice the plan's batch of prompts, roughly: a question's wordings stay together.
    """
    sums: SemanticPreservation | None = None
    step = max(1, 2 * plan.batch_size // (1 + max(len(question.paraphrases) for question in questions)))
    for batch in batches_of(questions, step):
        on_progress(batch.start, len(questions))
        groups = [wordings(model, question, plan.system) for question in batch.rows]
        states = iter(last_states(model.scorer, [prompt for group in groups for prompt in group], tokens))
        for group in groups:
            own = torch.stack([next(states) for _ in group])
            sums = sums or SemanticPreservation.empty(own.shape[1], tokens, own.shape[-1])
            sums.add(own)
    if sums is None:
        raise InputError("there are no questions to measure")
    on_progress(len(questions), len(questions))
    return sums


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
    prompts: list[Prompt] = []
    for question in questions:
        name, window = repr(question.id or question.question[:60]), model.context_window
        try:
            rendered = wordings(model, question, plan.system)
        except PromptTooLongError as error:
            raise PromptTooLongError(f"{name}, or a paraphrase of it: {error}, or leave the line out") from error
        longest = max(len(prompt.ids) for prompt in rendered)
        if window is not None and longest > window:
            raise PromptTooLongError(
                f"{name}, or a paraphrase of it, has {longest} tokens as a prompt, and "
                f"the context window is {window}: shorten the line or leave it out"
            )
        prompts += rendered
    offsets = Counter(prompt.semantic_token.offset for prompt in prompts)
    shortest = min(len(prompt.ids) for prompt in prompts)
    count = min(max(plan.tokens, -min(offsets)), shortest)
    ends = [set(column) for column in zip(*(prompt.ids[-count:] for prompt in prompts), strict=True)]
    tokenizer: Any = model.tokenizer
    names = tuple(str(tokenizer.decode(list(ids))) if len(ids) == 1 else None for ids in ends)
    return PromptEnds(count, names, offsets.most_common(1)[0][0])


def probe(
    questions: Sequence[Question],
    *,
    model: LanguageModel,
    plan: ProbePlan,
    data: str,
    answers_path: Path | None,
    grader: AnswerGrader,
    phase: Phase = lambda _: nullcontext(unwatched),
) -> Probe:
    """Measure semantic preservation on the questions with paraphrases and, on request, SemGrad on all with answers.

    Args:
        questions: distinct ones.
        model: is probed.
        plan: how.
        data: the name of the questions in the record.
        answers_path: keeps the answers, so that an interrupted probe continues; None to leave them out.
        grader: decides which answers are right; those that abstain are left out.
        phase: shows how far each part of the work is.

    Raises:
        InputError: too few questions have paraphrases.
        EmptyLayerSpanError: the model has too few layers for SemGrad.
    """
    paraphrased = with_paraphrases(questions)
    upper = Objective().span(model.n_layers)
    ends = prompt_ends(model, questions, plan)
    with phase("Reading paraphrases") as tell:
        sums = measure_preservation(paraphrased, plan, model=model, tokens=ends.count, on_progress=tell)
    scores = _rows(sums.scores)
    offsets = sorted({*ends.complete, ends.own_token} & {*range(-ends.count, 0)})
    preserved = {t: math.fsum(scores[layer][t] for layer in upper) / len(upper) for t in offsets}
    graded, recommendation = None, without_answers(ends.own_token, preserved)
    gradable = [question for question in questions if any(answer.strip() for answer in question.answers)]
    if answers_path is not None and gradable:
        with phase("Answering") as tell:
            answers = collect_grids(gradable, answers_path, plan, model=model, tokens=ends.count, on_progress=tell)
        pairs = zip(gradable, answers, strict=True)
        verdicts = grader.grade([AnswerToGrade(one.question, own.text or "", one.answers) for one, own in pairs])
        kept = [place for place, verdict in enumerate(verdicts) if verdict != ABSTAINED]  # neither right nor wrong
        answers, correct = [answers[place] for place in kept], [verdicts[place] is True for place in kept]
        others = [offset for offset in ends.complete if offset != ends.own_token]
        by_offset = {offset: [answer.semgrad(upper, offset) for answer in answers] for offset in others}
        recommendation = with_answers(ends.own_token, [one.semgrad(upper) for one in answers], by_offset, correct)
        graded = _graded(answers, correct, scores, upper=upper, grader=grader.name, found=recommendation)
    identity = model.identity
    return Probe(
        created=datetime.date.today().isoformat(),
        model=identity.name,
        revision=identity.revision,
        fingerprint=identity.fingerprint,
        dtype=identity.dtype,
        prompt_template=template_name(model, Phrasing(plan.system).name(questions)),
        data=data,
        questions=sums.queries,
        without_paraphrases=len(questions) - len(paraphrased),
        tokens=ends.names,
        upper_layers=upper,
        own_token=ends.own_token,
        preservation=scores,
        within=_rows(sums.similarity_within),
        across=_rows(sums.similarity_across),
        graded=graded,
        semantic_token=TokenChoice(
            offset=recommendation.offset, template=identity.template, model=identity.name, reason=recommendation.reason
        ),
    )


def correlations(
    preservation: Sequence[Sequence[float]], aurocs: Sequence[Sequence[float | None]]
) -> tuple[float | None, float | None]:
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
    return float(stats.pearsonr(x, y).statistic), float(stats.spearmanr(x, y).statistic)


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


def _rows(values: torch.Tensor) -> Table:
    return tuple(tuple(float(number) for number in row) for row in values)

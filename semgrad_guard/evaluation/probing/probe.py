"""Probing a model: where it keeps the meaning of a prompt, where SemGrad works, and which t* follows from that.

Which prompt token to differentiate by: the chat template's own, unless graded answers speak against it. Bare argmax of
the Semantic Preservation Score is a trap: on a small model the prompt's last token has the highest score and the worst
SemGrad (every layer has seen the whole prompt there, and is busy with the next token), and the paper's correlation of
the two need not hold. But the paper's own choices are all of one kind, the first token after the user's text, or that
text's last token, and a chat template gives that place away. So:

1. The template's own place is the recommendation to beat.
2. The Semantic Preservation Score alone never beats it. It is reported, also where it disagrees.
3. Graded answers are split in two halves. The first proposes the token at which SemGrad tells right from wrong best;
   the second compares that one token with the template's, on answers that had no part in choosing it. The proposal is
   recommended only if the interval of the difference in AUROC lies above zero.

Tokens in question are those that have read the whole question: the ones that all prompts end with, and the one before.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from scipy import stats

from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.semantic_token import TokenChoice
from semgrad_guard.errors import PromptTooLongError
from semgrad_guard.evaluation.graders import Grader
from semgrad_guard.evaluation.job_record import Progress, unwatched
from semgrad_guard.evaluation.metrics import auroc
from semgrad_guard.evaluation.metrics.ranking import Estimate, Tally, paired_difference
from semgrad_guard.evaluation.probing.collecting import (
    GridAnswer,
    ProbePlan,
    collect_grids,
    measure_preservation,
    wordings,
)
from semgrad_guard.evaluation.probing.probe_record import GradedGrid, Probe, Table
from semgrad_guard.evaluation.questions.data import Question, with_paraphrases
from semgrad_guard.evaluation.questions.prompts import Phrasing
from semgrad_guard.guard import template_name

Correlations = tuple[float | None, float | None]

Phase = Callable[[str], AbstractContextManager[Progress]]
"""Names a part of the work for as long as it lasts, and yields a progress function."""


@contextmanager
def _unseen(_: str) -> Generator[Progress]:
    yield unwatched


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
        prompts = wordings(model, question, plan.system)
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
    phase: Phase = _unseen,
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
    with phase("Reading paraphrases") as tell:
        sums = measure_preservation(paraphrased, states_path, plan, model=model, tokens=ends.count, on_progress=tell)
    scores = _rows(sums.scores)
    offsets = sorted({*ends.complete, ends.own_token} & {*range(-ends.count, 0)})
    preserved = {t: math.fsum(scores[layer][t] for layer in upper) / len(upper) for t in offsets}
    graded, recommendation = None, without_answers(ends.own_token, preserved)
    gradable = [question for question in questions if any(answer.strip() for answer in question.answers)]
    if answers_path is not None and gradable:
        with phase("Answering") as tell:
            answers = collect_grids(gradable, answers_path, plan, model=model, tokens=ends.count, on_progress=tell)
        correct = [
            answer.text is not None and grader(answer.text, question.answers, question=question.question)
            for question, answer in zip(gradable, answers, strict=True)
        ]
        recommendation = recommend(answers, correct, upper, ends)
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
            offset=recommendation.offset,
            template=identity.template,
            model=identity.name,
            reason=recommendation.reason,
        ),
    )


def recommend(
    answers: Sequence[GridAnswer], correct: Sequence[bool], upper: Sequence[int], ends: PromptEnds
) -> Recommendation:
    """Apply the rule's step 3 to graded answers."""
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


FEWEST = 25
"""Right answers, and wrong ones, that each half needs: intervals of a handful are not to be trusted."""

Scores = Sequence[float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Recommendation:
    """`offset` is None for the template's own place. `difference` in AUROC, proposal against template, is from the
    half that did not choose; None where no other token was proposed."""

    offset: int | None
    reason: str
    proposal: int | None = None
    difference: Estimate | None = None


def without_answers(own: int, preserved: Mapping[int, float]) -> Recommendation:
    """The choice from Semantic Preservation Scores (by offset) alone: the template's own token, `own`."""
    best = max(preserved, key=lambda offset: preserved[offset])
    reason = f"the chat template's own place ({own}); no graded answers were given that could speak against it"
    if best != own:
        reason += (
            f". The Semantic Preservation Score is highest at {best} ({preserved[best]:.3f}, against "
            f"{preserved.get(own, float('nan')):.3f}); alone that proves nothing, since at the prompt's last tokens "
            "it can be high where SemGrad is poor"
        )
    return Recommendation(None, reason)


def with_answers(
    own: int, own_scores: Scores, by_offset: Mapping[int, Scores], correct: Sequence[bool], *, seed: int = 0
) -> Recommendation:
    """The rule's step 3.

    Args:
        own: the template's offset (the commonest, where prompts differ).
        own_scores: SemGrad at each prompt's own t*.
        by_offset: SemGrad at every other token in question, by offset.
        correct: whether each answer is right.
        seed: of the split and the bootstrap.
    """
    choosing, testing = _halves(correct, seed)
    right = [sum(_at(correct, half)) for half in (choosing, testing)]
    wrong = [len(half) - count for half, count in zip((choosing, testing), right, strict=True)]
    if min(*right, *wrong) < FEWEST:
        return Recommendation(
            None,
            f"the chat template's own place ({own}); {sum(correct)} right and {len(correct) - sum(correct)} wrong "
            f"answers are too few to speak against it (it takes {2 * FEWEST} of each)",
        )
    found = {offset: _auroc(scores, correct, choosing) for offset, scores in by_offset.items()}
    found[own] = _auroc(own_scores, correct, choosing)
    proposal = max(found, key=lambda offset: (found[offset], offset == own))
    if proposal == own:
        return Recommendation(None, f"the chat template's own place ({own}): SemGrad is best there as well")
    difference = paired_difference(
        {"auroc": Tally.auroc},
        _at(by_offset[proposal], testing),
        _at(own_scores, testing),
        _at(correct, testing),
        seed=seed,
    )["auroc"]
    return _verdict(own, proposal, difference)


def _verdict(own: int, proposal: int, difference: Estimate) -> Recommendation:
    if difference.value is None or difference.low is None or difference.high is None:
        finding = "on the other half the difference is undefined"
        return Recommendation(None, f"the chat template's own place ({own}): {finding}", proposal, difference)
    measured = f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}] in AUROC"
    if difference.low > 0:
        reason = f"SemGrad is better at {proposal} than at the chat template's own place ({own}): {measured}"
        return Recommendation(proposal, f"{reason}, on answers that had no part in the choice", proposal, difference)
    reason = f"the chat template's own place ({own}): one half of the answers proposed {proposal}, and the other did "
    return Recommendation(None, f"{reason}not confirm it: {measured}", proposal, difference)


def _halves(correct: Sequence[bool], seed: int) -> tuple[list[int], list[int]]:
    """Two halves at random, right and wrong answers alike."""
    rng = np.random.default_rng(seed)
    halves: tuple[list[int], list[int]] = ([], [])
    for kind in (True, False):
        members = rng.permutation([i for i, right in enumerate(correct) if right is kind]).tolist()
        for half in (0, 1):
            halves[half].extend(int(i) for i in members[half::2])
    return halves


def _auroc(scores: Scores, correct: Sequence[bool], half: Sequence[int]) -> float:
    found = auroc(_at(scores, half), _at(correct, half))
    return -1.0 if found is None else found


def _at(values: Sequence[T], places: Sequence[int]) -> list[T]:
    return [values[i] for i in places]

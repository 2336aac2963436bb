"""The result of a generation: the text a user sees, the tokens that carry it, and the facts about them.

Each fact is computed once, only when needed, and for a whole batch at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from semgrad_guard.engine.generation.options import Sample, Sampling, SamplingPlan
from semgrad_guard.engine.generation.sampling import ModelSampler
from semgrad_guard.engine.interruption import add_cost, with_cost
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.responses import Reasoning
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.replay.captured_states import CapturedStates
from semgrad_guard.engine.scoring.gradients import GradientScores
from semgrad_guard.engine.scoring.observation import AttentionReading, HeadGradient, Observation
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.errors import DetachedRecordError, ScoringError
from semgrad_guard.records import FinishReason, in_context


@dataclass(frozen=True)
class Generation:
    """One answer of the model.

    `text` is the visible text: up to, and without, the end token or a stop string. `response_ids` are the tokens
    that carry it and exactly the tokens that are scored: the end token and tokens beyond a stop string do not
    count. `preceding_ids` are the tokens that the model wrote before these: its thought and the thought's marks, given
    which the answer is scored. `reasoning` is that thought, no part of `text`; None where there is nothing between the
    marks. Where a stop string begins inside a token, they are the tokens of the text itself. `completion_tokens`
    counts everything the model produced, `reused_tokens` those of the prompt that an earlier generation had read (see
    `Memory.prompts`). `cut` is where the answer was cut off: after so many tokens, or at this stop string; None where
    the model ended it. `evidence` is the material of scoring; while it has not been used, it holds the answer's KV
    cache, so let generations go once they are scored.
    """

    prompt: Prompt
    text: str
    response_ids: tuple[int, ...]
    finish_reason: FinishReason
    completion_tokens: int
    scoring: BatchScoring = field(repr=False, compare=False)
    row: int = 0
    reused_tokens: int = 0
    cut: int | str | None = None
    reasoning: Reasoning | None = None
    preceding_ids: tuple[int, ...] = ()

    @property
    def evidence(self) -> Evidence:
        """Facts about this answer, each computed once and only when needed."""
        return replace(self.scoring.evidence[self.row], cut=self.cut)


T = TypeVar("T")
_ALONE = "alone"
"""Marks the key of a result that was computed for one row."""

Written = tuple[Sequence[int], Sequence[int]]
"""Tokens that were written after a prompt: those before the scored ones, and these."""


@dataclass(frozen=True)
class TimedScores:
    """A row's scores, and its share of the milliseconds that its batch took to score."""

    scores: GradientScores
    milliseconds: float


class BatchScoring:
    """The computations about the answers of one batch: for all of them together, and once.

    A copy, by `pickle` or `copy.deepcopy`, is plain data: it holds earlier results, neither the model nor the
    states of the generation. Anything else raises `DetachedRecordError`.
    Where the model was changed since something was computed, it is computed anew: answers are scored by the model as it
    is.

    `captured` are the KV cache and states of the batch's generation; it is freed once the batch is scored,
    and a second objective prefills again. `texts` are the answers as read, `sampler` makes the `ModelSampler`, which
    draws more answers, and `stop` are the strings that ended the answers and end samples as well, as
    `max_thinking_tokens` ends their thoughts. `reasoning` is each answer's thought, and `preceding` all the tokens that
    were written before the answer's: answers are scored given these.
    """

    def __init__(
        self,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        responses: Sequence[Sequence[int]],
        captured: CapturedStates | None = None,
        *,
        texts: Sequence[str],
        sampler: Callable[[], ModelSampler],
        stop: tuple[str, ...] = (),
        max_thinking_tokens: int | None = None,
        reasoning: Sequence[Reasoning | None] = (),
        preceding: Sequence[Sequence[int]] = (),
    ) -> None:
        self._live: tuple[Scorer, Callable[[], ModelSampler]] | None = (scorer, sampler)
        self.prompts, self.texts = tuple(prompts), tuple(texts)
        self.stop, self.max_thinking_tokens = stop, max_thinking_tokens
        self.reasoning = tuple(reasoning) or (None,) * len(self.prompts)
        self.preceding = tuple(map(tuple, preceding)) or ((),) * len(self.prompts)
        self._ids = [tuple(response) for response in responses]
        self._offsets = [prompt.semantic_token.offset for prompt in prompts]
        # An empty answer keeps its row with a filler token: rows must stay aligned with the captured states.
        rows = zip(self.preceding, self._ids, strict=True)
        self._responses = [(before, ids) if ids else ((), (0,)) for before, ids in rows]
        self._captured = captured
        self._done: dict[Objective, tuple[TimedScores, ...]] = {}
        self._results: dict[Hashable, tuple[Sequence[Any], float]] = {}
        self._epoch: object = None
        self._name = object()  # an id could be another batch's once this one is gone

    def __getstate__(self) -> dict[str, Any]:
        # Also for `deepcopy`: a copy with a model would keep the KV cache of an answer that nobody scores.
        return {**self.__dict__, "_live": None, "_captured": None, "_epoch": None}

    @property
    def sampler(self) -> ModelSampler:
        """For questions about the answers: renders prompts and reads answers to them.

        Raises:
            DetachedRecordError: this is a copy.
        """
        return self._model[1]()

    @property
    def _scorer(self) -> Scorer:
        return self._model[0]

    @property
    def _model(self) -> tuple[Scorer, Callable[[], ModelSampler]]:
        if self._live is None:
            raise DetachedRecordError(
                "This record of an answer was copied without its model, and holds only what was computed before. "
                "Compute what you need before you copy it, or score the text again with LanguageModel.evidence(...)."
            )
        return self._live

    @property
    def _lock(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._live is None else self._live[0].lock

    @classmethod
    def joined(cls, answers: Sequence[Evidence]) -> BatchScoring:
        """Answers of one model that came one by one (`LanguageModel.evidence`) as one batch: one backward pass for all.

        Earlier results about them are computed again; `stop` strings and `max_thinking_tokens` are the first answer's.
        """
        first = answers[0].scoring
        return cls(
            first._scorer,
            [answer.prompt for answer in answers],
            [answer.response_ids for answer in answers],
            texts=[answer.text for answer in answers],
            sampler=first._model[1],
            stop=first.stop,
            max_thinking_tokens=first.max_thinking_tokens,
            reasoning=[answer.reasoning for answer in answers],
            preceding=[answer.preceding_ids for answer in answers],
        )

    def part(self, rows: Sequence[int]) -> BatchScoring:
        """Some of the answers as a batch of their own, of which nothing is computed yet: a backward pass for these.

        The states of the generation spare it the prompts, as long as nothing has been scored.
        """
        prompts = [self.prompts[row] for row in rows]
        widths = [max(len(prompt.ids) for prompt in some) for some in (self.prompts, prompts)]
        captured = self._captured
        return BatchScoring(
            self._scorer,
            prompts,
            [self._ids[row] for row in rows],
            None if captured is None else captured.part(rows, skip=widths[0] - widths[1]),
            texts=[self.texts[row] for row in rows],
            sampler=self._model[1],
            stop=self.stop,
            max_thinking_tokens=self.max_thinking_tokens,
            reasoning=[self.reasoning[row] for row in rows],
            preceding=[self.preceding[row] for row in rows],
        )

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The evidence about every answer of the batch."""
        return tuple(
            Evidence(p, ids, self, row) for row, (p, ids) in enumerate(zip(self.prompts, self._ids, strict=True))
        )

    def scores(self, objective: Objective, row: int) -> TimedScores:
        """The scores of one row; the first call scores the whole batch in one backward pass."""
        with self._lock:
            self._forget_another_models()
            if objective not in self._done:
                self._done[objective], cost = with_cost(partial(self._score, objective))
                add_cost(-cost)
            timed = self._done[objective][row]
            add_cost(timed.milliseconds, once=(self._name, objective, row))
            return timed

    def observed(self, row: int, *, own: bool = False) -> Observation:
        """The observation of one row's tokens; the first call observes the whole batch and keeps states for scoring."""

        def work(_: Sequence[Evidence]) -> Sequence[Observation]:
            return self._scorer.observe(self._laid_out(self._responses), self._captured, own=own)

        return self.together((Observation, own), work, row)

    def thoughts(self, row: int) -> Observation | None:
        """The observation of the tokens of one row's thought; the first call observes the whole batch.

        None where there is no thought, or its tokens are not known.
        """
        spans = [(0, 0) if thought is None else thought.span for thought in self.reasoning]
        if spans[row][0] == spans[row][1]:
            return None
        rows = list[Written]()
        for thought, (begin, end) in zip(self.reasoning, spans, strict=True):
            ids = () if thought is None else thought.ids
            rows.append((ids[:begin], ids[begin:end]) if begin < end else ((), (0,)))

        def work(_: Sequence[Evidence]) -> Sequence[Observation]:
            return self._scorer.observe(self._laid_out(rows), self._captured)

        return self.together("thoughts", work, row)

    def head_gradient(self, objective: Objective, row: int) -> HeadGradient:
        """One row's gradient by the output head alone; the first call reads the whole batch."""

        def work(_: Sequence[Evidence]) -> Sequence[HeadGradient]:
            return self._scorer.head_gradients(self._laid_out(self._responses), objective, self._captured)

        return self.together((HeadGradient, objective), work, row)

    def attention(self, row: int) -> AttentionReading:
        """How one row's tokens attend to each other; the first call reads the whole batch."""
        return self.together(AttentionReading, lambda _: self._scorer.attention(self._laid_out(self._responses)), row)

    def together(
        self, key: Hashable, work: Callable[[Sequence[Evidence]], Sequence[T]], row: int, *, alone: bool = False
    ) -> T:
        """The result of `work` for one row; the first call under `key` has it done for the whole batch, or `alone`."""
        answers = self.evidence
        if alone:
            key, answers, row = (_ALONE, key, row), answers[row : row + 1], 0
        with self._lock:
            self._forget_another_models()
            if key not in self._results:
                values, cost = with_cost(partial(work, answers))
                add_cost(-cost)
                self._results[key] = values, cost / len(values)
            values, share = self._results[key]
            add_cost(share, once=(self._name, key, row))
            return values[row]

    def keep_samples(self, row: int, plan: Sampling, samples: tuple[Sample, ...], milliseconds: float) -> None:
        """Take in the samples for one row, which were drawn at this cost while its answer was written."""
        with self._lock:
            self._forget_another_models()
            self._results[_ALONE, plan, row] = [samples], milliseconds

    def has_samples(self, row: int, plan: SamplingPlan) -> bool:
        """Whether samples for this row alone were taken in, of the model as it is."""
        with self._lock:
            self._forget_another_models()
            return (_ALONE, plan, row) in self._results

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """The result of `work`, and its cost in milliseconds: its own time and its share of joint work.

        The row that happens to come first does not pay for the batch, nor do later rows get it for nothing.
        """
        with self._lock:
            return with_cost(work)

    def _forget_another_models(self) -> None:
        """Drop results of the model as it was before its owner changed it."""
        if self._live is None:
            return
        if self._epoch is not (epoch := self._live[0].epoch):
            self._done, self._results, self._epoch = {}, {}, epoch

    def _laid_out(self, rows: Sequence[Written], objective: Objective | None = None) -> TokenBatch:
        """Prompts, and what was written: without an objective, for work that needs no token of the prompt."""
        with clean_slate():
            prompts = [prompt.ids for prompt in self.prompts]
            tokens = [-1] * len(prompts) if objective is None else self._offsets
            responses, before = [(*before, *ids) for before, ids in rows], [len(before) for before, _ in rows]
            return TokenBatch.of(prompts, responses, tokens, self._scorer.device, objective=objective, before=before)

    def _score(self, objective: Objective) -> tuple[TimedScores, ...]:
        began = time.perf_counter()
        scored = self._scorer.score(self._laid_out(self._responses, objective), objective, self._captured)
        self._captured = None  # kept until now: a scoring that was interrupted can be taken up again
        share = (time.perf_counter() - began) * 1000 / len(scored)
        return tuple(TimedScores(scores, share) for scores in scored)


@dataclass(frozen=True)
class Evidence:
    """Facts about one answer, for estimators. `response_ids` may be empty: then there is nothing to score.

    `cut` is where the answer was cut off (see `Generation`).
    """

    prompt: Prompt
    response_ids: tuple[int, ...]
    scoring: BatchScoring
    row: int = 0
    cut: int | str | None = None

    @property
    def why_empty(self) -> str:
        """Why there is nothing to score: its reasoning rules that out, or a stop string ended it before it began."""
        if self.reasoning is not None and self.reasoning.why_unscored:
            return self.reasoning.why_unscored
        if isinstance(self.cut, str):
            return f"the response is empty: the model began with {self.cut!r}, where it was to stop"
        return "the response is empty"

    def gradients(self, objective: Objective | None = None) -> TimedScores | None:
        """The gradient scores of the answer, None if it holds no token."""
        if not self.response_ids:
            return None
        return self.scoring.scores(objective or Objective(), self.row)

    def observed(self, *, own: bool = False) -> Observation | None:
        """The observation of the answer's own tokens, without a gradient; None if it holds no token.

        It is read off the states of the generation, as long as nothing has been scored. `own`: its state is the mean
        of the tokens' own, for which an answer that a limit cut off takes one pass.
        """
        return self.scoring.observed(self.row, own=own) if self.response_ids else None

    def head_gradient(self, objective: Objective | None = None) -> HeadGradient | None:
        """ParaGrad alone, None if the answer holds no token: no layer is differentiated, nor run again (`observed`)."""
        return self.scoring.head_gradient(objective or Objective(), self.row) if self.response_ids else None

    def attention(self) -> AttentionReading | None:
        """How the answer's tokens attend to each other in the middle layers, None if it holds no token.

        One pass over prompt and answer, without a graph.
        """
        return self.scoring.attention(self.row) if self.response_ids else None

    def alone(self) -> Evidence:
        """The same answer in a batch of its own, of which nothing is computed yet.

        Raises:
            DetachedRecordError: this is a copy.
        """
        return BatchScoring.joined([self]).evidence[0]

    def likeliest(self, count: int) -> Sequence[tuple[tuple[int, float], ...]]:
        """The `count` likeliest tokens at each place and their log-probabilities in nats, the likeliest first."""
        if not self.response_ids:
            return ()
        return self.sampler.likeliest(self.prompt, self.response_ids, count, before=self.preceding_ids)

    @property
    def reasoning(self) -> Reasoning | None:
        """The thought before the answer, None where there is none."""
        return self.scoring.reasoning[self.row]

    @property
    def preceding_ids(self) -> tuple[int, ...]:
        """The tokens written before the answer's, given which these are scored: a thought and its marks."""
        return self.scoring.preceding[self.row]

    def thought(self) -> Observation | None:
        """The observation of the tokens of the thought; None where there is none, or its tokens are not known."""
        return self.scoring.thoughts(self.row)

    @property
    def text(self) -> str:
        """The answer as the user sees it."""
        return self.scoring.texts[self.row]

    @property
    def question(self) -> str:
        """The user's question: the bare one where its `Message` names it, else the whole last text of the user."""
        return self.prompt.question

    @property
    def question_in_context(self) -> str:
        """The question after the passage that its `Message` names, if it does: for putting it to the model again."""
        return in_context(self.prompt.question, self.prompt.context)

    @property
    def sampler(self) -> ModelSampler:
        """For questions about the answer: renders prompts and reads answers to them."""
        return self.scoring.sampler

    def samples(self, plan: SamplingPlan, *, temperature: float = 1.0) -> tuple[Sample, ...]:
        """`plan.count` more answers to the same prompt, drawn once for a plan and for the whole batch at a time.

        `temperature` is that of the samples' log-probabilities, however they were drawn. Answers of other origin are
        compared with this model's own answers.

        Raises:
            ScoringError: some of them had not begun when the limit of their tokens ended their thoughts.
        """
        batch, alone = self.scoring, self.scoring.has_samples(self.row, plan)

        def draw(rows: Sequence[Evidence]) -> Sequence[tuple[Sample, ...]]:
            prompts = [row.prompt for row in rows]
            return batch.sampler.drawn(prompts, plan, stop=batch.stop, max_thinking_tokens=batch.max_thinking_tokens)

        def judge(rows: Sequence[Evidence]) -> Sequence[tuple[Sample, ...]]:
            drafts = [batch.together(plan, draw, row.row, alone=alone) for row in rows]
            return batch.sampler.judged([row.prompt for row in rows], drafts, temperature=temperature)

        samples = batch.together((plan, temperature), judge, self.row, alone=alone)
        if reason := next((sample.why_unscored for sample in samples if sample.why_unscored), None):
            raise ScoringError(f"of the answers drawn, some have no score: {reason}")
        return samples

    def together(self, key: Hashable, work: Callable[[Sequence[Evidence]], Sequence[T]]) -> T:
        """The result of `work` for this answer: done once for the whole batch, remembered under `key`."""
        return self.scoring.together(key, work, self.row)

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """The result of `work` and its cost in milliseconds (see `BatchScoring.timed`)."""
        return self.scoring.timed(work)

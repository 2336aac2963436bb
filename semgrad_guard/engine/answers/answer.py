"""The result of writing: the text a user sees, the tokens that carry it, and the facts about them.

Each fact is computed once, only when needed, and for a whole batch at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from semgrad_guard.declared import plain
from semgrad_guard.engine.answers.options import GenerationOptions, Sample, SamplingPlan, require_kind
from semgrad_guard.engine.answers.writing_model import WritingModel, likeliest
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.thoughts import Reasoning
from semgrad_guard.engine.scores.gradients import GradientScores, Observation
from semgrad_guard.engine.scores.tape import Row, Tape
from semgrad_guard.errors import DetachedRecordError, InputError, ScoringError
from semgrad_guard.records import FinishReason, in_context

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Answer:
    """A text that answers a prompt, and the tokens that carry it.

    `ids` are the scored tokens: the end token and tokens beyond a stop string do not count. `preceding` are the tokens
    that were written before these, given which they are scored: a thought and its marks, and earlier sentences.
    `written` are all tokens that were written, those behind a sentence included; empty where there are no others.
    `options` are those by which it was written: other answers to its prompt end as it does. `cut` is where it was cut
    off: after so many tokens, or at this stop string; None where its author ended it.
    """

    prompt: Prompt
    text: str
    ids: tuple[int, ...]
    preceding: tuple[int, ...] = ()
    reasoning: Reasoning | None = None
    written: tuple[int, ...] = ()
    options: GenerationOptions = field(default_factory=GenerationOptions)
    cut: int | str | None = None

    @property
    def sample(self) -> Sample:
        """As a sample that is not yet judged."""
        return Sample(
            self.text,
            self.ids,
            preceding=self.preceding if self.ids else (),
            why_unscored=None if self.reasoning is None else self.reasoning.why_unscored,
        )

    @property
    def thought(self) -> Answer:
        """The thought in the place of the answer that follows it."""
        thought = self.reasoning or Reasoning("")
        begin, end = thought.span
        return replace(self, ids=thought.ids[begin:end], preceding=thought.ids[:begin], written=())

    def row(self, objective: Objective, tape: Tape | None, *, in_context: bool = False) -> Row:
        """Its tokens as a row to score."""
        written, before = self.written or (*self.preceding, *self.ids), len(self.preceding)
        return Row.of(
            self.prompt.ids,
            written,
            self.prompt.semantic_token.offset,
            objective,
            before=before,
            end=before + len(self.ids),
            in_context=in_context,
            tape=tape,
        )


@dataclass(frozen=True)
class Generation:
    """One answer of the model.

    `text` is the visible text: up to, and without, the end token or a stop string. `response_ids` are the tokens
    that carry it and exactly the tokens that are scored: the end token and tokens beyond a stop string do not
    count. `preceding_ids` are the tokens that the model wrote before these: its thought and the thought's marks, given
    which the answer is scored. `reasoning` is that thought, no part of `text`; None where there is nothing between the
    marks. Where a stop string begins inside a token, they are the tokens of the text itself. `completion_tokens`
    counts everything the model produced. `cut` is where the answer was cut off: after so many tokens, or at this stop
    string; None where the model ended it. `evidence` is the material of scoring; while it has not been used, it holds
    the answer's KV cache, so let generations go once they are scored.
    """

    prompt: Prompt
    text: str
    response_ids: tuple[int, ...]
    finish_reason: FinishReason
    completion_tokens: int
    evidence: Evidence = field(repr=False, compare=False)
    cut: int | str | None = None
    reasoning: Reasoning | None = None
    preceding_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TimedScores:
    """A row's scores, and its share of the milliseconds that its batch took to score."""

    scores: GradientScores
    milliseconds: float


class BatchScoring:
    """The computations about some answers: for all of them together, and once.

    A copy, by `pickle` or `copy.deepcopy`, is plain data: it holds earlier results, neither the model nor the tapes.
    Anything else raises `DetachedRecordError`. Where the model was changed since something was computed, it is computed
    anew: answers are scored by the model as it is.

    `tapes` are what writing left of each answer; they are freed once the batch is scored, and a second objective reads
    the texts. Where answers are `in_context`, they are sentences, of which all that was written before is a constant to
    the gradient.
    """

    def __init__(
        self,
        model: WritingModel,
        answers: Sequence[Answer],
        *,
        tapes: Sequence[Tape | None] = (),
        in_context: bool = False,
    ) -> None:
        self._model: WritingModel | None = model
        self.answers, self._in_context = tuple(answers), in_context
        self._tapes: Sequence[Tape | None] = tuple(tapes)
        self._results: dict[tuple[Hashable, int], Any] = {}
        self._epoch: object = None

    def __getstate__(self) -> dict[str, Any]:
        # Also for `deepcopy`: a copy with a model would keep the KV cache of an answer that is never scored.
        return {**self.__dict__, "_model": None, "_tapes": (), "_epoch": None}

    @property
    def model(self) -> WritingModel:
        """The model that scores the answers, renders prompts and reads answers to them.

        Raises:
            DetachedRecordError: this is a copy.
        """
        if self._model is None:
            raise DetachedRecordError(
                "This record of an answer was copied without its model, and holds only what was computed before. "
                "Compute what you need before you copy it, or score the text again with LanguageModel.evidence(...)."
            )
        return self._model

    @classmethod
    def joined(cls, answers: Sequence[Evidence]) -> BatchScoring:
        """Answers of one model that came one by one (`LanguageModel.evidence`) as one batch: one backward pass for all.

        Earlier results about them are computed again.
        """
        return cls(answers[0].model, [one.answer for one in answers])

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The evidence about every answer of the batch."""
        return tuple(Evidence(self, row) for row in range(len(self.answers)))

    def tape(self, row: int) -> Tape | None:
        """What writing left of one answer, as long as it has not been scored."""
        return self._tapes[row] if self._tapes else None

    def scores(self, objective: Objective, row: int) -> TimedScores | None:
        """The scores of one row, None where it holds no token; the first call scores the whole batch together."""
        return self.together(objective, partial(self._scored, objective), row)

    def observed(self, row: int, *, own: bool = False, thought: bool = False) -> Observation | None:
        """The observation of one row's tokens, or of those of its `thought`, None where there are none.

        The first call observes the whole batch and keeps tapes for scoring.
        """
        work = partial(self._observed, own=own, thought=thought)
        return self.together((Observation, own, thought), work, row)

    def together(
        self, key: Hashable, work: Callable[[Sequence[Evidence]], Sequence[T]], row: int, *, alone: bool = False
    ) -> T:
        """The result of `work` for one row, known under `key`; the first call has it done for all rows without one.

        Or for this row `alone`.
        """
        with nullcontext() if self._model is None else self._model.turn:
            self._forget_another_models()
            if (key, row) not in self._results:
                new = [one for one in self.evidence if (key, one.row) not in self._results]
                new = [one for one in new if one.row == row or not alone]
                self._results |= {(key, one.row): found for one, found in zip(new, work(new), strict=True)}
            return self._results[key, row]

    def keep(self, key: Hashable, row: int, result: object) -> None:
        """Take in the result of `together` for one row, which was computed elsewhere, within the model's turn."""
        self._forget_another_models()
        self._results[key, row] = result

    def _forget_another_models(self) -> None:
        """Drop results of the model as it was before its owner changed it."""
        if self._model is not None and self._epoch is not (epoch := self._model.scorer.epoch):
            self._results, self._epoch = {}, epoch

    def _of_tokens(
        self, answers: Sequence[tuple[Answer, Tape | None]], objective: Objective, work: Callable[[list[Row]], list[T]]
    ) -> list[T | None]:
        """What `work` makes of the answers that hold tokens; None for the others."""
        rows = [answer.row(objective, tape, in_context=self._in_context) for answer, tape in answers if answer.ids]
        found = iter(work(rows) if rows else ())
        return [next(found) if answer.ids else None for answer, _ in answers]

    def _observed(self, some: Sequence[Evidence], *, own: bool, thought: bool) -> Sequence[Observation | None]:
        answers = [(one.answer.thought if thought else one.answer, self.tape(one.row)) for one in some]
        return self._of_tokens(answers, Objective(token=-1), lambda rows: self.model.scorer.observe(rows, own=own))

    def _scored(self, objective: Objective, some: Sequence[Evidence]) -> Sequence[TimedScores | None]:
        began, answers = time.perf_counter(), [(one.answer, self.tape(one.row)) for one in some]
        found = self._of_tokens(answers, objective, lambda rows: self.model.scorer.score(rows, objective))
        share = (time.perf_counter() - began) * 1000 / max(1, len(list(filter(None, found))))
        self._tapes = ()  # kept until now: a scoring that was interrupted can be taken up again
        return [one and TimedScores(one, share) for one in found]


@dataclass(frozen=True)
class Evidence:
    """Facts about one answer, for estimators. `response_ids` may be empty: then there is nothing to score."""

    scoring: BatchScoring
    row: int = 0

    @property
    def answer(self) -> Answer:
        """The text and its tokens."""
        return self.scoring.answers[self.row]

    @property
    def prompt(self) -> Prompt:
        """The prompt that it answers."""
        return self.answer.prompt

    @property
    def response_ids(self) -> tuple[int, ...]:
        """The tokens that are scored."""
        return self.answer.ids

    @property
    def cut(self) -> int | str | None:
        """Where the answer was cut off (see `Generation`)."""
        return self.answer.cut

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
        return self.scoring.scores(require_kind("objective", objective or Objective(), Objective), self.row)

    def observed(self, *, own: bool = False) -> Observation | None:
        """The observation of the answer's own tokens, without a gradient; None if it holds no token.

        It is read off what writing left, as long as nothing has been scored. `own`: its state is the mean of the
        tokens' own, for which an answer that a limit cut off takes one pass.
        """
        return self.scoring.observed(self.row, own=own)

    def alone(self) -> Evidence:
        """The same answer in a batch of its own, of which nothing is computed yet.

        Raises:
            DetachedRecordError: this is a copy.
        """
        return BatchScoring.joined([self]).evidence[0]

    def likeliest(self, count: int) -> Sequence[tuple[tuple[int, float], ...]]:
        """The `count` likeliest tokens at each place and their log-probabilities in nats, the likeliest first.

        Raises:
            InputError: the count is less than 0, or no whole number.
        """
        if (count := plain("count", count, int)) < 0:
            raise InputError(f"count is a number of tokens at each place, and not {count}").about("count")
        if not self.response_ids:
            return ()
        return likeliest(self.model.scorer, (*self.prompt.ids, *self.preceding_ids), self.response_ids, count)

    @property
    def reasoning(self) -> Reasoning | None:
        """The thought before the answer, None where there is none."""
        return self.answer.reasoning

    @property
    def preceding_ids(self) -> tuple[int, ...]:
        """The tokens written before the answer's, given which these are scored: a thought and its marks."""
        return self.answer.preceding

    def thought(self) -> Observation | None:
        """The observation of the tokens of the thought; None where there is none, or its tokens are not known."""
        return self.scoring.observed(self.row, thought=True)

    @property
    def text(self) -> str:
        """The answer as the user sees it."""
        return self.answer.text

    @property
    def question(self) -> str:
        """The user's question: the bare one where its `Message` names it, else the whole last text of the user."""
        return self.prompt.question

    @property
    def question_in_context(self) -> str:
        """The question after the passage that its `Message` names, if it does: for putting it to the model again."""
        return in_context(self.prompt.question, self.prompt.context)

    @property
    def model(self) -> WritingModel:
        """The model that scores the answer, renders prompts and reads answers to them."""
        return self.scoring.model

    def samples(self, plan: SamplingPlan, *, temperature: float = 1.0) -> tuple[Sample, ...]:
        """`plan.count` more answers to the same prompt, drawn once for a plan and for the whole batch at a time.

        `temperature` is that of the samples' log-probabilities, however they were drawn. Answers of other origin are
        compared with this model's own answers.

        Raises:
            ScoringError: some of them had not begun when the limit of their tokens ended their thoughts.
        """
        batch = self.scoring

        def draw(rows: Sequence[Evidence]) -> Sequence[tuple[Sample, ...]]:
            drawing = batch.model.running_batch(Objective(gradients=False))
            return drawing.draw([(one.prompt, one.answer.options) for one in rows], plan)

        def judge(rows: Sequence[Evidence]) -> Sequence[tuple[Sample, ...]]:
            drafts = [batch.together(plan, draw, one.row) for one in rows]
            pairs = zip(rows, drafts, strict=True)
            return [batch.model.judged(one.prompt, own, temperature=temperature) for one, own in pairs]

        samples = batch.together((plan, temperature), judge, self.row)
        if reason := next((sample.why_unscored for sample in samples if sample.why_unscored), None):
            raise ScoringError(f"of the answers drawn, some have no score: {reason}")
        return samples

    def together(self, key: Hashable, work: Callable[[Sequence[Evidence]], Sequence[T]]) -> T:
        """The result of `work` for this answer: done once for the whole batch, remembered under `key`."""
        return self.scoring.together(key, work, self.row)

"""One answer as it is written, token by token, whichever engine runs the model's passes.

A `WrittenAnswer` takes its tokens from a running batch (`batch.py`), from vLLM, or from a run of its own: the library's
`generate` writes all of them where a model cannot take answers in and out (a recurrent state, no keys by position).
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache

from semgrad_guard.engine.answers.options import (
    DiverseBeams,
    GenerationOptions,
    Sample,
    SamplingPlan,
    ThoughtLimit,
    force,
    sampling_processors,
)
from semgrad_guard.engine.answers.text import CertainText, Piece, StopStrings, Visible, answered
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.responses import Reasoning, Thinking
from semgrad_guard.engine.replay.replay import cut_cache
from semgrad_guard.engine.replay.tape import KeysValues, Recorder, Tape
from semgrad_guard.engine.replay.twin import CACHE
from semgrad_guard.engine.scores.scorer import clean_slate
from semgrad_guard.errors import UnsupportedModelError


class WrittenAnswer:
    """An answer to a prompt that is being written. `error` is the error that ended it, where it cannot be written.

    `listener` gets every piece of text and thought, as soon as it is certain. An answer that is not `scored` is drawn
    for the score of another one. `processors` choose its tokens in the place of the options' sampling.

    `passes` are the recorders that hold it, with its row; `begin` is the position of the first state that they keep.
    `keys` are those of its positions, once it is done. Or else `cut` is the cache of all positions before `begin`.
    """

    def __init__(
        self,
        model: WritingModel,
        prompt: Prompt,
        options: GenerationOptions,
        *,
        listener: Callable[[Piece], None] | None = None,
        scored: bool = True,
        processors: LogitsProcessorList | None = None,
    ) -> None:
        self.prompt, self.options, self.scored, self._listener = prompt, options, scored, listener
        self.replayed = False  # whether its tape is incomplete, so that its text is read again for its score
        self.ids: list[int] = []
        self.ended, self.done = False, False
        self.passes: list[tuple[Recorder, int]] = []
        self.begin = 0
        self.keys: Sequence[KeysValues] = ()
        self.cut: Cache | None = None
        self.epoch: object = None
        self.error: BaseException | None = None
        thinking, limit = thinking_of(prompt, options), options.max_thinking_tokens
        self._certain = CertainText(model.decode, options, prompt.thinking)
        self._processors = _processors(model, prompt, options) if processors is None else processors
        self._limit = None if limit is None else ThoughtLimit(limit, thinking, model)
        self._stop = StopStrings(options.stop, codec=model, thinking=thinking)
        self._codec, self._end_tokens = model, model.end_tokens

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """Answers that are equal in this read the same prompt."""
        return tuple(self.prompt.ids), self.prompt.semantic_token.offset

    def write(self, logits: torch.Tensor, likeliest: int) -> None:
        """Write one more token, chosen from the head's output [V]; an answer that cannot continue is done (`take`)."""
        self._or_fail(lambda: self._take(self._choice(logits, likeliest)))

    def take(self, token: int) -> None:
        """One more token, however it was chosen. An answer that cannot continue is done, with its error."""
        self._or_fail(lambda: self._take(token))

    def finish(self, text: str, reasoning: Reasoning | None) -> None:
        """Send the rest of the whole text to the listener; where that fails, this answer alone has an error."""
        self._or_fail(lambda: self._show(self._certain.rest(text, reasoning)))

    def _or_fail(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.fail(error)

    def visible(self) -> Visible:
        """The answer among the tokens produced."""
        thinking = thinking_of(self.prompt, self.options)
        return answered(self.ids, self.options.stop, self._codec, thinking, cut=not self.ended)

    def sample(self) -> Sample:
        """As a sample that is not yet judged."""
        found = self.visible()
        return Sample(
            found.text,
            found.scored_ids,
            preceding=found.preceding if found.scored_ids else (),
            why_unscored=None if found.reasoning is None else found.reasoning.why_unscored,
        )

    def fail(self, error: BaseException) -> None:
        """The answer ends here, with an error."""
        self.error, self.done = error, True

    def end(self, tokens: int) -> None:
        """The answer ends here, with so many of its tokens."""
        del self.ids[tokens:]
        self.ended = self.done = True

    def tape(self, keys: Sequence[KeysValues] | None = None) -> Tape | None:
        """What writing it left, with its own keys or these; None where nothing was kept."""
        if self.replayed or not (self.passes or self.cut):
            return None
        return Tape(tuple(self.passes), self.begin, len(self.prompt.ids) - 1, keys or self.keys, self.epoch, self.cut)

    def _choice(self, logits: torch.Tensor, likeliest: int) -> int:
        """The next token, from the head's output [V] and its likeliest token."""
        if self._limit is not None and (forced := self._limit.forced(self.ids)) is not None:
            return forced
        if not self._processors:
            return likeliest
        ids = torch.tensor([[*self.prompt.ids, *self.ids]], device=logits.device)
        scores: Any = self._processors(cast(Any, ids), cast(Any, logits[None].to(torch.float32, copy=True)))
        return int(scores.argmax())

    def _take(self, token: int) -> None:
        if token in self._end_tokens:
            self.ended = self.done = True
            return
        self.ids.append(token)
        if self._listener is not None:
            self._show(self._certain.add(token))
        self.done = len(self.ids) >= self.options.max_tokens or self._stop.end(self.ids)

    def _show(self, pieces: Sequence[Piece]) -> None:
        if self._listener is not None and self.error is None:
            for piece in pieces:
                self._listener(piece)


def thinking_of(prompt: Prompt, options: GenerationOptions) -> Thinking | None:
    """How an answer to this prompt thinks. Under a grammar there are no thoughts."""
    return None if options.grammar else prompt.thinking


def _processors(model: WritingModel, prompt: Prompt, options: GenerationOptions) -> LogitsProcessorList:
    """Those that make the likeliest token the options' choice, none where it is greedy.

    A grammar goes first, so that sampling chooses among the tokens that it allows.
    """
    found = LogitsProcessorList()
    if options.temperature > 0:
        seed = secrets.randbits(31) if options.seed is None else options.seed
        found = sampling_processors(seed, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
    if options.grammar is not None:
        found.insert(0, model.grammars.processor(options.grammar, width=len(prompt.ids)))
    return found


def planned(model: WritingModel, prompt: Prompt, options: GenerationOptions, plan: SamplingPlan) -> list[WrittenAnswer]:
    """The answers to a prompt that a plan draws; they end as one with the options does, in any form."""
    window = model.context_window
    room = plan.max_tokens if window is None else min(plan.max_tokens, window - len(prompt.ids))
    if isinstance(plan, DiverseBeams):
        ends = replace(options, max_tokens=room, grammar=None)
        groups = plan.processors(len(prompt.ids), model.end_tokens)
        return [WrittenAnswer(model, prompt, ends, scored=False, processors=own) for own in groups]
    rows = [replace(one, max_tokens=room) for one in plan.rows(prompt.ids, options)]
    return [WrittenAnswer(model, prompt, one, scored=False) for one in rows]


def write_whole(model: WritingModel, row: WrittenAnswer, objective: Objective) -> None:
    """Have the library's `generate` write an answer from the first token to the last, by its own choice of tokens.

    `objective` is that of later scoring: the cache before the first position that it needs is kept for it.

    Raises:
        AnswerInterruptedError: the current stop ended it.
    """
    end = next(iter(model.end_tokens), 0)

    def write(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Leave one token: the one that the row has written, or the end where it has written none."""
        before = len(row.ids)
        row.write(scores[0], int(scores.argmax()))
        force(scores[0], row.ids[-1] if len(row.ids) > before else end)
        return scores

    def is_done(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor([row.done], device=ids.device)

    ids = torch.tensor([list(row.prompt.ids)], device=model.scorer.device)
    with model.scorer.lock, clean_slate(), torch.no_grad():
        if row.scored and objective.gradients:
            _keep_cache(model, row, ids, objective)
        with model.scorer.twin.watching({recorder.layer: recorder.see_hidden for recorder, _ in row.passes}):
            model.scorer.twin.generate(
                ids,
                torch.ones_like(ids),
                **({} if row.cut is None else {CACHE: copy.deepcopy(row.cut)}),
                generation_config=GenerationConfig(
                    max_new_tokens=row.options.max_tokens, do_sample=False, pad_token_id=end
                ),
                logits_processor=LogitsProcessorList([cast("Any", write)]),
                stopping_criteria=StoppingCriteriaList([cast("Any", is_done)]),
            )


def _keep_cache(model: WritingModel, row: WrittenAnswer, ids: torch.Tensor, objective: Objective) -> None:
    """Read a prompt up to the first position that scoring needs, where scores continue from a cache cut there."""
    scorer, n = model.scorer, len(row.prompt.ids)
    known = scorer.if_checked()
    if known is None or known.way != "continued":
        return
    try:
        layer = objective.span(scorer.architecture.n_layers)[0]
    except UnsupportedModelError:
        return
    scorer.twin.reset()
    row.begin = n + min(objective.positions(row.prompt.semantic_token.offset, n))
    found: Any = cut_cache(scorer.twin, ids[:, : row.begin])
    # Of a cache without keys by position `generate` cannot tell how much of the prompt it holds.
    if found is not None and not all(getattr(found, "is_linear", (True,))):
        row.cut, row.epoch = found, scorer.epoch
        if known.begins:
            row.passes = [(Recorder(layer), 0)]

"""One answer as it is written, token by token, whichever engine runs the model's passes; and what is made of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from transformers import LogitsProcessorList

from semgrad_guard.engine.answers.answer import Answer, BatchScoring, Generation
from semgrad_guard.engine.answers.options import GenerationOptions, ThoughtLimit, sampling_processors
from semgrad_guard.engine.answers.sampling import ModelSampler
from semgrad_guard.engine.answers.text import CertainText, Piece, StopStrings, Visible, answered
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.grammar import GrammarCompiler
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.responses import Thinking
from semgrad_guard.engine.replay.memory import Memory
from semgrad_guard.engine.replay.tape import KeysValues, Recorder, Tape
from semgrad_guard.engine.scores.head import surveyed_step
from semgrad_guard.engine.scores.observed import observed_layer
from semgrad_guard.errors import UnsupportedModelError


@dataclass(frozen=True)
class BatchRequest:
    """A prompt to be answered; `listener` gets every piece of text and thought, as soon as it is certain.

    An answer that is not `scored` is drawn for the score of another one. `processors` choose its tokens in the place
    of the options' sampling.
    """

    prompt: Prompt
    options: GenerationOptions
    listener: Callable[[Piece], None] | None = None
    scored: bool = True
    processors: LogitsProcessorList | None = None

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """Requests that are equal in this read the same prompt."""
        return tuple(self.prompt.ids), self.prompt.semantic_token.offset


class WrittenAnswer:
    """An answer that is being written. `error` is the error that ended it, where it cannot be written.

    `passes` are the recorders that hold it, with its row; `begin` is the position of the first state that they keep.
    `keys` are those of its positions, once it is done. `end_of_scored` is how many of its tokens belong to sentences
    that have been scored.
    """

    def __init__(self, request: BatchRequest, writer: Writer) -> None:
        self.prompt, self.options, self._listener = request.prompt, request.options, request.listener
        self.scored, self.reads = request.scored, request.reads
        self.replayed = False  # whether its tape is incomplete, so that its text is read again for its score
        self.ids: list[int] = []
        self.ended, self.done = False, False
        self.passes: list[tuple[Recorder, int]] = []
        self.begin, self.end_of_scored = 0, 0
        self.keys: Sequence[KeysValues] = ()
        self.epoch: object = None
        self.error: BaseException | None = None
        thinking, limit = thinking_of(request.prompt, request.options), request.options.max_thinking_tokens
        self._certain = CertainText(writer.decode, request.options, request.prompt.thinking)
        self._processors = request.processors or writer.processors(request.prompt, request.options)
        self._limit = None if limit is None else ThoughtLimit(limit, thinking, writer)
        self._stop = StopStrings(request.options.stop, codec=writer, thinking=thinking)
        self._end_tokens = writer.end_tokens

    def write(self, logits: torch.Tensor, likeliest: int) -> None:
        """Write one more token, chosen from the head's output [V]; an answer that cannot continue is done (`take`)."""
        self._or_fail(lambda: self._take(self._choice(logits, likeliest)))

    def take(self, token: int) -> None:
        """One more token, however it was chosen. An answer that cannot continue is done, with its error."""
        self._or_fail(lambda: self._take(token))

    def finish(self, answer: Generation) -> None:
        """Send the rest of the whole text to the listener; where that fails, this answer alone has an error."""
        self._or_fail(lambda: self._show(self._certain.rest(answer.text, answer.reasoning)))

    def _or_fail(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The answer ends here, with an error."""
        self.error, self.done = error, True

    def end(self, tokens: int) -> None:
        """The answer ends here, with so many of its tokens."""
        del self.ids[tokens:]
        self.ended = self.done = True

    def tape(self, keys: Sequence[KeysValues] | None = None) -> Tape | None:
        """What writing it left, with its own keys or these; None where nothing was kept."""
        if self.replayed or not self.passes:
            return None
        return Tape(tuple(self.passes), self.begin, len(self.prompt.ids) - 1, keys or self.keys, self.epoch)

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


class Writer(ModelSampler):
    """The settings by which one model writes, and what is made of the tokens that it has written."""

    def visible(self, row: WrittenAnswer) -> Visible:
        """The answer among the tokens produced."""
        return answered(row.ids, row.options.stop, self, thinking_of(row.prompt, row.options), cut=not row.ended)

    def generations(self, rows: Sequence[WrittenAnswer], tapes: Sequence[Tape | None]) -> list[Generation]:
        """Answers that are written, as one batch to be scored; `tapes` belong to the tokens as they were written."""
        seen = [self.visible(row) for row in rows]
        answers = [
            Answer(
                row.prompt,
                found.text,
                found.scored_ids,
                found.preceding,
                found.reasoning,
                ends=GenerationOptions(stop=row.options.stop, max_thinking_tokens=row.options.max_thinking_tokens),
            )
            for row, found in zip(rows, seen, strict=True)
        ]
        fitting = [None if found.retokenized else tape for tape, found in zip(tapes, seen, strict=True)]
        scoring = BatchScoring(self, answers, tapes=fitting)
        made: list[Generation] = []
        for number, (row, found) in enumerate(zip(rows, seen, strict=True)):
            is_whole = row.ended or found.cut is not None
            made.append(
                Generation(
                    prompt=row.prompt,
                    text=found.text,
                    response_ids=found.ids,
                    finish_reason="stop" if is_whole else "length",
                    cut=found.cut if is_whole else row.options.max_tokens,
                    completion_tokens=len(row.ids) + row.ended,
                    scoring=scoring,
                    row=number,
                    reasoning=found.reasoning,
                    preceding_ids=found.preceding,
                )
            )
        return made

    def recorder(self, prompts: Sequence[Prompt], objective: Objective, memory: Memory) -> Recorder | None:
        """One that keeps what scoring needs of answers to these prompts, which end in one column.

        None where nothing could be scored from it; scoring will name the reason.

        Raises:
            InputError: the objective asks for a token that a prompt does not have.
        """
        known, n_layers = self.scorer.if_checked(), self.scorer.architecture.n_layers
        if known is None or known.way != "rows":
            return None
        width = max(len(prompt.ids) for prompt in prompts)
        if not objective.gradients:
            # Beyond the budget for its outputs, the head is not read again.
            survey = partial(surveyed_step, head=self.scorer.twin.head, transform=known.transform)
            return Recorder(observed_layer(n_layers), width - 1, memory=memory, survey=survey)
        try:
            layer = objective.span(n_layers)[0]
        except UnsupportedModelError:
            return None
        firsts = [min(objective.positions(p.semantic_token.offset, len(p.ids))) for p in prompts]
        return Recorder(layer, width + min(firsts), memory=memory)

    def padded(self, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask [B, N] of prompts that end in one column."""
        width, device = max(len(prompt.ids) for prompt in prompts), self.scorer.device
        given: Any = self._tokenizer.pad_token_id
        pad = next(iter(self.end_tokens), 0) if given is None else int(given)
        ids = torch.tensor([[pad] * (width - len(p.ids)) + list(p.ids) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=device)
        return ids, mask

    def processors(self, prompt: Prompt, options: GenerationOptions) -> LogitsProcessorList:
        """Those that make the likeliest token the options' choice, none where it is greedy.

        A grammar goes first, so that sampling chooses among the tokens that it allows.
        """
        found = LogitsProcessorList()
        if options.temperature > 0:
            seed = secrets.randbits(31) if options.seed is None else options.seed
            found = sampling_processors(seed, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
        if options.grammar is not None:
            found.insert(0, self._grammars.processor(options.grammar, width=len(prompt.ids)))
        return found

    def require_grammars(self, options: Sequence[GenerationOptions]) -> None:
        """Return if answers can follow the options' grammars.

        Raises:
            InputError: no answer can be made to follow one.
        """
        for grammar in {one.grammar for one in options} - {None}:
            self._grammars.matcher(grammar)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, end_tokens=self.end_tokens)


def thinking_of(prompt: Prompt, options: GenerationOptions) -> Thinking | None:
    """How an answer to this prompt thinks. Under a grammar there are no thoughts."""
    return None if options.grammar else prompt.thinking

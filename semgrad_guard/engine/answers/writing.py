"""One answer as it is written, token by token, whichever engine runs the model's passes; and what is made of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from semgrad_guard.engine.answers.options import (
    DiverseBeams,
    GenerationOptions,
    Ids,
    Sample,
    SamplingPlan,
    ThoughtLimit,
    sampling_processors,
)
from semgrad_guard.engine.answers.readings import Reading, read
from semgrad_guard.engine.answers.text import CertainText, Piece, StopStrings, Visible, answered
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.grammar import GrammarCompiler
from semgrad_guard.engine.prompts.prompt import Prompt, render
from semgrad_guard.engine.prompts.responses import Codec, Reasoning, Thinking
from semgrad_guard.engine.replay.memory import Memory
from semgrad_guard.engine.replay.tape import KeysValues, Recorder, Tape
from semgrad_guard.engine.scores.observed import observed_layer
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.errors import UnsupportedModelError
from semgrad_guard.records import Conversation


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
        self._codec, self._end_tokens = writer, writer.end_tokens

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


class Writer(Codec):
    """One model that writes, and tells its opinion of answers. Holds the model's lock while it runs.

    `draw` writes answers that are not to be scored. `window` is how many positions the model can attend over, None if
    it states no limit.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        draw: Callable[[Writer, Sequence[BatchRequest]], Sequence[WrittenAnswer]],
        *,
        end_tokens: tuple[int, ...],
        window: int | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.scorer, self._draw, self.end_tokens = scorer, draw, end_tokens
        self._window, self._template_options = window, template_options

    def render(self, conversation: Conversation) -> Prompt:
        """The prompt that the model would see."""
        return render(self._tokenizer, conversation, template_options=self._template_options)

    def drawn(
        self, prompts: Sequence[tuple[Prompt, GenerationOptions]], plan: SamplingPlan
    ) -> list[tuple[Sample, ...]]:
        """`plan.count` answers to each prompt, not yet judged; they end as one with the options does, in any form."""
        wanted = list[BatchRequest]()
        for prompt, options in prompts:
            room = plan.max_tokens if self._window is None else min(plan.max_tokens, self._window - len(prompt.ids))
            if isinstance(plan, DiverseBeams):
                ends = replace(options, max_tokens=room, grammar=None)
                groups = plan.processors(len(prompt.ids), self.end_tokens)
                wanted += [BatchRequest(prompt, ends, scored=False, processors=own) for own in groups]
            else:
                rows = [replace(one, max_tokens=room) for one in plan.rows(prompt.ids, options)]
                wanted += [BatchRequest(prompt, one, scored=False) for one in rows]
        samples = [row.sample() for row in self._draw(self, wanted)]
        return [tuple(samples[start : start + plan.count]) for start in range(0, len(samples), plan.count)]

    def judged(
        self, prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]], *, temperature: float = 1.0
    ) -> list[tuple[Sample, ...]]:
        """The samples with their embeddings and log-probabilities at a temperature, however they were drawn."""
        found: list[tuple[Sample, ...]] = []
        for prompt, own in zip(prompts, samples, strict=True):
            written = [(sample.preceding, sample.ids) for sample in own]
            readings = read(self.scorer, prompt.ids, written, temperature=temperature)
            judged = zip(own, readings, strict=True)
            found.append(tuple(replace(one, log_probs=r.log_probs, embedding=r.embedding) for one, r in judged))
        return found

    def read(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[Ids]],
        *,
        before: Sequence[Sequence[Ids]],
    ) -> list[list[Reading]]:
        """The model's opinion of several answers to each prompt; `before` are the tokens between it and each answer."""
        pairs = [list(zip(*both, strict=True)) for both in zip(before, answers, strict=True)]
        return [read(self.scorer, prompt.ids, own) for prompt, own in zip(prompts, pairs, strict=True)]

    def unthought(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens by which the model answers a prompt without a thought: an empty one, closed."""
        written = None if prompt.thinking is None else prompt.thinking.written("", "")
        return self.encode(written) if written else ()

    def fits(self, prompt: Prompt, longest: int) -> bool:
        """Whether an answer of `longest` tokens has room behind this prompt."""
        return self._window is None or len(prompt.ids) + longest <= self._window

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
            return Recorder(observed_layer(n_layers), width - 1, memory=memory)
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

"""One run of `generate` for a batch and the states that each row of it leaves; and an answer of a running batch."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from semgrad_guard.engine.generation.generation import BatchScoring, Generation
from semgrad_guard.engine.generation.options import (
    GenerationOptions,
    SamplingPlan,
    ThinkingBudget,
    ThoughtLimit,
    sampling_processors,
)
from semgrad_guard.engine.generation.sampling import Draws, ModelSampler
from semgrad_guard.engine.generation.visible import CertainText, Piece, StopStrings, Visible, answered
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.grammar import GrammarCompiler
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.responses import Thinking
from semgrad_guard.engine.replay.batch import Memory, TokenBatch, cache_of, growing_cache, unless_memory_runs_out
from semgrad_guard.engine.replay.captured_states import Capture, CapturedStates
from semgrad_guard.engine.scoring.head import surveyed_step
from semgrad_guard.engine.scoring.observation import observed_layer
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.errors import UnsupportedModelError
from semgrad_guard.records import Conversation

_TOKENS = 1 << 15  # rows x columns of one run that draws samples


@dataclass(frozen=True)
class Written:
    """The tokens of an answer as the model produced them, without the end token, and whether there was one.

    `reused` tokens of the prompt had been read by an earlier generation.
    """

    prompt: Prompt
    options: GenerationOptions
    ids: tuple[int, ...]
    ended: bool
    reused: int = 0


class Decoder(Draws):
    """Generates with one model. Holds the model's lock for the time of a run.

    `render` and `window` (positions the model can attend over) are for estimators that draw samples.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_tokens: tuple[int, ...],
        render: Callable[[Conversation], Prompt],
        window: int | None,
    ) -> None:
        super().__init__(tokenizer)
        self._scorer = scorer
        self.end_tokens = end_tokens
        pad: Any = tokenizer.pad_token_id
        self._pad = int(pad) if pad is not None else next(iter(end_tokens), 0)
        self._render, self._window = render, window

    def sampler(self) -> ModelSampler:
        """For estimators: further answers of the model, and its opinion of answers."""
        return ModelSampler(self._scorer, self, render=self._render, window=self._window)

    def run(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        objective: Objective,
        *,
        streamer: BaseStreamer | None = None,
    ) -> list[Generation]:
        """Answer a batch of prompts; `streamer` hears each new token, only in a batch of one."""
        with self._scorer.lock:
            capture, epoch = self.capture(prompts, objective), self._scorer.epoch
            with clean_slate():
                output, reused = self._generate(prompts, options, capture, streamer)
        width = max(len(prompt.ids) for prompt in prompts)
        produced = [self._produced(row) for row in output.sequences[:, width:].tolist()]
        written = [
            Written(prompt, options, tuple(ids), ended, reused)
            for prompt, (ids, ended) in zip(prompts, produced, strict=True)
        ]
        # The captured states belong to the tokens produced: a batch with other tokens is replayed as a whole.
        other = any(self.read(tokens).retokenized for tokens in written)
        with clean_slate():  # a caller's inference mode would make tensors that nothing can be replayed from
            captured = (
                None
                if capture is None or other
                else unless_memory_runs_out(lambda: CapturedStates.of(cache_of(output), capture, epoch))
            )
        return self.generations(written, captured)

    def generations(self, written: Sequence[Written], captured: CapturedStates | None) -> list[Generation]:
        """Answers as one batch to be scored. `captured` are the states of the run, where they belong to these tokens.

        Their options name the same stop strings and the same `max_thinking_tokens`.
        """
        options = written[0].options
        answers = [self.read(tokens) for tokens in written]
        scoring = BatchScoring(
            self._scorer,
            [tokens.prompt for tokens in written],
            [answer.scored_ids for answer in answers],
            captured,
            texts=[answer.text for answer in answers],
            sampler=self.sampler,
            stop=options.stop,
            max_thinking_tokens=options.max_thinking_tokens,
            reasoning=[answer.reasoning for answer in answers],
            preceding=[answer.preceding for answer in answers],
        )
        return [
            Generation(
                prompt=tokens.prompt,
                text=answer.text,
                response_ids=answer.ids,
                finish_reason="stop" if tokens.ended or answer.cut is not None else "length",
                cut=answer.cut if tokens.ended or answer.cut is not None else tokens.options.max_tokens,
                completion_tokens=len(tokens.ids) + tokens.ended,
                reused_tokens=tokens.reused,
                scoring=scoring,
                row=row,
                reasoning=answer.reasoning,
                preceding_ids=answer.preceding,
            )
            for row, (tokens, answer) in enumerate(zip(written, answers, strict=True))
        ]

    def read(self, written: Written) -> Visible:
        """The answer among the tokens produced."""
        thinking = _thinking(written.prompt, written.options.grammar)
        return answered(written.ids, written.options.stop, self, thinking, cut=not written.ended)

    def capture(self, prompts: Sequence[Prompt], objective: Objective, memory: Memory | None = None) -> Capture | None:
        """Keep h^(k) from the earliest token that scoring needs, where this model's captured tier is exact.

        Besides it as much as `memory` allows, the model's own by default.
        """
        n_layers, width = self._scorer.architecture.n_layers, max(len(prompt.ids) for prompt in prompts)
        memory = memory or self._scorer.memory
        try:
            layer = objective.span(n_layers)[0] if objective.gradients else observed_layer(n_layers)
        except UnsupportedModelError:  # generating may still be possible; scoring will name the reason
            return None
        exactness = self._scorer.if_checked()
        if exactness is None or "captured" not in exactness.tiers:
            return None
        if not objective.gradients:
            head, transform = self._scorer.current_replayer().head, exactness.transform
            # Beyond the budget for its outputs, the head is not read again.
            survey = partial(surveyed_step, head=head, transform=transform)
            return Capture(layer, width - 1, memory=replace(memory, outputs=0), survey=survey)
        firsts = [min(objective.positions(p.semantic_token.offset, len(p.ids))) for p in prompts]
        return Capture(layer, width + min(firsts), memory=memory)

    def draw(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        *,
        stop: tuple[str, ...] = (),
        max_thinking_tokens: int | None = None,
    ) -> list[list[int]]:
        """`plan.count` answers to each prompt, prompt after prompt: token ids without the end token.

        A prompt's own work is done once where its cache can serve all its answers.
        """
        drawn: list[list[int]] = []
        rows = max(1, _TOKENS // (plan.count * (max(len(prompt.ids) for prompt in prompts) + plan.max_tokens)))
        step = rows if self._scorer.pads else 1
        with self._scorer.lock, clean_slate():
            for start in range(0, len(prompts), step):
                drawn += self._draw(prompts[start : start + step], plan, stop, max_thinking_tokens)
        return drawn

    def _draw(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        stop: tuple[str, ...],
        max_thinking_tokens: int | None,
    ) -> list[list[int]]:
        ids = [prompt.ids for prompt in prompts]
        batch = TokenBatch.of(ids, [[0]] * len(prompts), [-1] * len(prompts), self._scorer.device)
        width = batch.prompt_columns
        room = plan.max_tokens if self._window is None else min(plan.max_tokens, self._window - width)
        replayer, cache = self._scorer.current_replayer(), None
        if width > 1 and self._scorer.can_resume(batch.longest):
            owners = [row for row in range(len(prompts)) for _ in range(plan.count)]
            cache = replayer.prefilled(batch, width - 1, owners)
        processors = plan.processors(ids, self.end_tokens)
        if max_thinking_tokens is not None:  # first, so that the plan counts the tokens that are really taken
            limits = [ThoughtLimit(max_thinking_tokens, p.thinking, self) for p in prompts for _ in range(plan.count)]
            processors.insert(0, ThinkingBudget(limits, width=width))
        output = replayer.generate(
            batch.ids[:, :width].repeat_interleave(plan.count, dim=0),
            batch.mask[:, :width].repeat_interleave(plan.count, dim=0),
            cache=cache,
            generation_config=self._config(room),
            logits_processor=processors,
            stopping_criteria=self._stopping(stop, [p.thinking for p in prompts for _ in range(plan.count)], width),
        )
        return [self._produced(row)[0] for row in output.sequences[:, width:].tolist()]

    def _generate(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        capture: Capture | None,
        streamer: BaseStreamer | None,
    ) -> tuple[Any, int]:
        """The output of `generate`, and how many columns of the prompt an earlier run had read."""
        ids, mask = self.padded(prompts)
        width = ids.shape[1]
        replayer, budget = self._scorer.current_replayer(), self.prompt_budget(prompts, options, capture)
        cache = replayer.prompts.begin(prompts[0].ids, min(capture.start, width - 1)) if capture and budget else None
        reused = 0 if cache is None else cache.get_seq_length()
        output = replayer.generate(
            ids,
            mask,
            capture,
            cache=cache,
            generation_config=self._config(options.max_tokens),
            logits_processor=self.processors(options, prompts, width),
            stopping_criteria=self._stopping(options.stop, [_thinking(p, options.grammar) for p in prompts], width),
            streamer=streamer,
        )
        if budget:
            replayer.prompts.keep(output.sequences[0].tolist(), cache_of(output), budget)
        return output, reused

    def padded(self, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask [B, N] of prompts that end in one column."""
        width, device = max(len(prompt.ids) for prompt in prompts), self._scorer.device
        ids = torch.tensor([[self._pad] * (width - len(p.ids)) + list(p.ids) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=device)
        return ids, mask

    def prompt_budget(self, prompts: Sequence[Prompt], options: GenerationOptions, capture: Capture | None) -> int:
        """Bytes for the caches that these prompts leave to later ones: none where a cache may not be taken up again."""
        budget = self._scorer.memory.prompts
        if not budget or capture is None or len(prompts) > 1:
            return 0
        return budget if self._scorer.can_resume(len(prompts[0].ids) + options.max_tokens) else 0

    def _config(self, max_tokens: int) -> GenerationConfig:
        """The configuration of every run."""
        return GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=self._pad,
            eos_token_id=list(self.end_tokens) or None,
            return_dict_in_generate=True,
        )

    def _stopping(self, stop: Sequence[str], thinking: Sequence[Thinking | None], width: int) -> StoppingCriteriaList:
        """The criteria that end a row of answers after prompts of `width` columns."""
        return StoppingCriteriaList([self.stop_strings(stop, thinking, width=width)] if stop else [])

    def stop_strings(self, stop: Sequence[str], thinking: Sequence[Thinking | None], *, width: int = 0) -> StopStrings:
        """A finder of stop strings in answers after prompts of `width` columns; each row thinks in its own way."""
        return StopStrings(stop, codec=self, thinking=thinking, width=width)

    def processors(self, options: GenerationOptions, prompts: Sequence[Prompt], width: int) -> LogitsProcessorList:
        """Those that make a greedy search the options' sampling, none where it is greedy.

        A grammar goes first, so that sampling chooses among the tokens that it allows.
        """
        processors, rows = LogitsProcessorList(), len(prompts)
        if options.temperature > 0:
            seed = secrets.randbits(31) if options.seed is None else options.seed
            processors = sampling_processors(
                range(seed, seed + rows), temperature=options.temperature, top_p=options.top_p, top_k=options.top_k
            )
        if options.grammar is not None:
            processors.insert(0, self._grammars.processor(options.grammar, rows=rows, width=width))
        if limits := [limit for prompt in prompts if (limit := self.thought_limit(prompt, options))]:
            processors.append(ThinkingBudget(limits, width=width))
        return processors

    def thought_limit(self, prompt: Prompt, options: GenerationOptions) -> ThoughtLimit | None:
        """The end of the thought in an answer with these options; under a grammar there are no thoughts."""
        if options.max_thinking_tokens is None or options.grammar is not None:
            return None
        return ThoughtLimit(options.max_thinking_tokens, prompt.thinking, self)

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

    def _produced(self, row: list[int]) -> tuple[list[int], bool]:
        """A row's tokens up to its end token, and whether there was one (rows that end early are padded)."""
        ends: Callable[[int], bool] = self.end_tokens.__contains__
        for index, token in enumerate(row):
            if ends(token):
                return row[:index], True
        return row, False


def _thinking(prompt: Prompt, grammar: str | None) -> Thinking | None:
    """How an answer to this prompt thinks. Under a grammar there are no thoughts."""
    return None if grammar else prompt.thinking


@dataclass(frozen=True)
class BatchRequest:
    """A prompt to be answered; `listener` gets every piece of text and thought, as soon as it is certain.

    An answer that is not `scored` is drawn for the score of another one (`RunningBatch.samples`).
    """

    prompt: Prompt
    options: GenerationOptions
    listener: Callable[[Piece], None] | None = None
    scored: bool = True

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """Requests that are equal in this read the same prompt."""
        return tuple(self.prompt.ids), self.prompt.semantic_token.offset


class RunningAnswer:
    """An answer that is being written. `error` is the error that ended it, where it cannot be written.

    `passes` are the captures that hold it, with its row; `behind` is how many columns of its prompt they include.
    `before` is the cache of the columns before those, once it is done, and `keys` that of all columns, where it is read
    by sentence. `milliseconds` is its share of the steps.
    """

    def __init__(self, request: BatchRequest, decoder: Decoder) -> None:
        self.prompt, self.options, self._listener = request.prompt, request.options, request.listener
        self.scored, self.reads, self.milliseconds = request.scored, request.reads, 0.0
        self.replayed = False  # whether its states are incomplete, and are computed again for its score
        self.ids: list[int] = []
        self.ended, self.done, self.reused = False, False, 0
        self.passes: list[tuple[Capture, int]] = []
        self.before: Cache = growing_cache()
        self.keys: Cache | None = None
        self.behind, self.epoch = 0, object()
        self.error: BaseException | None = None
        self._certain = CertainText(decoder.decode, request.options, request.prompt.thinking)
        self._processors = decoder.processors(request.options, [request.prompt], len(request.prompt.ids))
        thinking = _thinking(request.prompt, request.options.grammar)
        self._stop, self._end_tokens = decoder.stop_strings(request.options.stop, [thinking]), decoder.end_tokens

    @property
    def written(self) -> Written:
        """Its tokens."""
        return Written(self.prompt, self.options, tuple(self.ids), self.ended, self.reused)

    def choose(self, logits: torch.Tensor, likeliest: int) -> int:
        """The next token, from the head's output [V] and its likeliest token."""
        if not self._processors:
            return likeliest
        ids = torch.tensor([[*self.prompt.ids, *self.ids]], device=logits.device)
        scores: Any = self._processors(cast(Any, ids), cast(Any, logits[None].float()))
        return int(scores.argmax())

    def write(self, logits: torch.Tensor, likeliest: int) -> None:
        """Write one more token, chosen from the head's output [V]; an answer that cannot continue is done (`take`)."""
        try:
            self._take(self.choose(logits, likeliest))
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.fail(error)

    def take(self, token: int) -> None:
        """One more token, however it was chosen. An answer that cannot continue is done, with its error."""
        try:
            self._take(token)
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The answer ends here, with an error."""
        self.error, self.done = error, True

    def end(self, tokens: int) -> None:
        """The answer ends here, with so many of its tokens."""
        del self.ids[tokens:]
        self.ended = self.done = True

    def let_go(self, scored: int) -> None:
        """Hold no outputs of the passes that wrote only the first `scored` tokens, which need them no longer."""
        first, *later = self.passes  # the first has read the prompt, and is always needed
        written = accumulate((len(capture.finals()) for capture, _ in later), initial=1)
        count = sum(tokens <= scored for tokens in list(written)[1:])
        if count:
            self.passes = [first, (Capture.of_scored(later[:count]), 0), *later[count:]]

    def finish(self, answer: Generation) -> None:
        """Send the rest of the whole text to the listener; where that fails, this answer alone has an error."""
        try:
            if self._listener is not None and self.error is None:
                for piece in self._certain.rest(answer.text, answer.reasoning):
                    self._listener(piece)
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.error = error

    def _take(self, token: int) -> None:
        if token in self._end_tokens:
            self.ended = self.done = True
            return
        self.ids.append(token)
        if self._listener is not None:
            for piece in self._certain.add(token):
                self._listener(piece)
        self.done = len(self.ids) >= self.options.max_tokens or self._stop.end(self.ids)

"""More answers of a model to the same prompts, and readings of answers: log-probabilities and a middle layer's states.

Answers are read in one pass over a whole batch, without a graph; a prompt is read once, however many answers it has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from semgrad_guard.engine.generation.options import Ids, Sample, SamplingPlan
from semgrad_guard.engine.generation.visible import Visible, answered
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.responses import Codec
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.scoring.scorer import Scorer, clean_slate
from semgrad_guard.records import Conversation

_TOKENS = 1 << 15  # rows x columns of one pass
_LOGITS = 1 << 27  # and its rows x response tokens x vocabulary

_Written = tuple[Ids, Ids]
"""The tokens before an answer, and the answer's."""


@dataclass(frozen=True)
class Reading:
    """One answer as the model sees it. Both are empty where the answer holds no token.

    `log_probs` are the tokens' log-probabilities in nats, `embedding` the hidden state of the last token in the middle
    of the model (layer floor((L + 1) / 2) of 0 .. L); None where the model's layers are not known.
    """

    log_probs: tuple[float, ...] = ()
    embedding: tuple[float, ...] | None = None


class Draws(Codec, ABC):
    """The part of a decoder that a sampler uses."""

    @abstractmethod
    def draw(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        *,
        stop: tuple[str, ...] = (),
        max_thinking_tokens: int | None = None,
    ) -> list[list[int]]: ...


class ModelSampler:
    """Asks one model for further answers, and for its opinion of answers. Holds the model's lock while it runs."""

    def __init__(
        self, scorer: Scorer, decoder: Draws, *, render: Callable[[Conversation], Prompt], window: int | None
    ) -> None:
        self._scorer, self._decoder, self.render, self._window = scorer, decoder, render, window

    def drawn(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        *,
        stop: tuple[str, ...] = (),
        max_thinking_tokens: int | None = None,
    ) -> list[tuple[Sample, ...]]:
        """`plan.count` answers to each prompt, not yet judged; `stop` strings end them before themselves."""
        rows = self._decoder.draw(prompts, plan, stop=stop, max_thinking_tokens=max_thinking_tokens)
        seen = [
            answered(ids, stop, self._decoder, prompts[row // plan.count].thinking, cut=len(ids) >= plan.max_tokens)
            for row, ids in enumerate(rows)
        ]
        samples = [sample_of(answer) for answer in seen]
        return [tuple(samples[start : start + plan.count]) for start in range(0, len(samples), plan.count)]

    def judged(
        self, prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]], *, temperature: float = 1.0
    ) -> list[tuple[Sample, ...]]:
        """The samples with their embeddings and log-probabilities at a temperature, however they were drawn."""
        answers = [[sample.ids for sample in own] for own in samples]
        before = [[sample.preceding for sample in own] for own in samples]
        readings = self.read(prompts, answers, before=before, temperature=temperature)
        return [
            tuple(
                replace(sample, log_probs=reading.log_probs, embedding=reading.embedding)
                for sample, reading in zip(*pair, strict=True)
            )
            for pair in zip(samples, readings, strict=True)
        ]

    def read(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[Ids]],
        *,
        before: Sequence[Sequence[Ids]] | None = None,
        temperature: float = 1.0,
    ) -> list[list[Reading]]:
        """The model's opinion of several answers to each prompt (see the function `read`)."""
        return read(self._scorer, [prompt.ids for prompt in prompts], answers, before=before, temperature=temperature)

    def likeliest(
        self, prompt: Prompt, answer: Ids, count: int, *, before: Ids = ()
    ) -> list[tuple[tuple[int, float], ...]]:
        """The `count` likeliest tokens at each place of an answer and their log-probabilities in nats, likeliest first.

        From the model's raw distribution, in one pass over the prompt, tokens `before` the answer, and the answer.
        """
        scorer = self._scorer
        with scorer.lock, clean_slate(), torch.no_grad():
            batch = TokenBatch.of([prompt.ids], [[*before, *answer]], [-1], scorer.device, before=[len(before)])
            logits, _ = scorer.current_replayer().read(batch, 0, cache=None, layer=None)
            own = logits[0, : len(answer)]
            log_probs = (own if own.dtype == torch.float64 else own.float()).log_softmax(-1)
            values, ids = log_probs.topk(min(count, log_probs.shape[1]))
        return [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]

    def unthought(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens by which the model answers a prompt without a thought: an empty one, closed."""
        written = None if prompt.thinking is None else prompt.thinking.written("", "")
        return self._decoder.encode(written) if written else ()

    def fits(self, prompt: Prompt, longest: int) -> bool:
        """Whether an answer of `longest` tokens has room behind this prompt."""
        return self._window is None or len(prompt.ids) + longest <= self._window

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a piece of an answer."""
        return self._decoder.encode(text)

    def decode(self, ids: Ids) -> str:
        """The text of answer tokens."""
        return self._decoder.decode(ids)


def sample_of(answer: Visible) -> Sample:
    """An answer as a sample that is not yet judged."""
    return Sample(
        answer.text,
        answer.scored_ids,
        preceding=answer.preceding if answer.scored_ids else (),
        why_unscored=None if answer.reasoning is None else answer.reasoning.why_unscored,
    )


def read(
    scorer: Scorer,
    prompts: Sequence[Ids],
    answers: Sequence[Sequence[Ids]],
    *,
    before: Sequence[Sequence[Ids]] | None = None,
    temperature: float = 1.0,
) -> list[list[Reading]]:
    """Read several answers to each prompt.

    Args:
        scorer: the model's.
        prompts: token ids.
        answers: for each prompt any number of answers' token ids.
        before: for each answer the tokens between the prompt and it (a thought), by default none.
        temperature: > 0; logits are divided by it before they become probabilities.
    """
    thoughts = before or [[()] * len(own) for own in answers]
    written = [[*zip(*pair, strict=True)] for pair in zip(thoughts, answers, strict=True)]
    # Answers to one prompt whose logits can be held at once.
    units: list[tuple[int, Sequence[_Written]]] = []
    for index, own in enumerate(written):
        step = max(1, _LOGITS // (max([1, *map(_length, own)]) * scorer.vocabulary))
        units += [(index, own[start : start + step]) for start in range(0, len(own), step)]
    owners = [prompts[index] for index, _ in units]
    parts = [part for _, part in units]
    by_prompt: list[list[Reading]] = [[] for _ in answers]
    with scorer.lock, clean_slate(), torch.no_grad():
        for rows in _pieces(owners, parts, scorer.vocabulary):
            readings = _read(scorer, owners[rows], parts[rows], temperature)
            for (index, _), part in zip(units[rows], readings, strict=True):
                by_prompt[index] += part
    return by_prompt


def middle_layer(n_layers: int) -> int:
    """The layer whose last-token state represents an answer's meaning (Chen et al., 2024: half of L + 1 states)."""
    return (n_layers + 1) // 2


def _length(written: _Written) -> int:
    return len(written[0]) + len(written[1])


def _pieces(prompts: Sequence[Ids], answers: Sequence[Sequence[_Written]], vocabulary: int) -> Iterator[slice]:
    """Successive units, as many as fit into one pass; at least one."""
    start, rows, width, tail = 0, 0, 0, 0
    for index, (prompt, own) in enumerate(zip(prompts, answers, strict=True)):
        rows += len(own)
        width, tail = max(width, len(prompt)), max(tail, *map(_length, own), 1)
        if index > start and (rows * (width + tail) > _TOKENS or rows * tail * vocabulary > _LOGITS):
            yield slice(start, index)
            start, rows, width, tail = index, len(own), len(prompt), max(map(_length, own))
    if start < len(prompts):
        yield slice(start, len(prompts))


def _read(
    scorer: Scorer, prompts: Sequence[Ids], answers: Sequence[Sequence[_Written]], temperature: float
) -> list[list[Reading]]:
    owners = [index for index, own in enumerate(answers) for _ in own]
    # A filler keeps an empty answer's row.
    flat = [([*before, *ids] or [0], len(before)) for own in answers for before, ids in own]
    rows, befores = zip(*flat, strict=True)
    batch = TokenBatch.of([prompts[i] for i in owners], rows, [-1] * len(rows), scorer.device, before=befores)
    if batch.is_padded and not scorer.pads:
        readings = [_pass(scorer, row, None, temperature)[0] for row in batch.rows()]
    else:
        shared = TokenBatch.of(prompts, [[0]] * len(prompts), [-1] * len(prompts), scorer.device)
        readings = _pass(scorer, batch, (shared, owners), temperature)
    if len(readings) > 1 and not all(math.isfinite(sum(reading.log_probs)) for reading in readings):
        # Padding alone makes some attention kernels answer NaN: such rows are given a second chance.
        singly = zip(readings, batch.rows(), strict=True)
        readings = [
            r if math.isfinite(sum(r.log_probs)) else _pass(scorer, row, None, temperature)[0] for r, row in singly
        ]
    rest = iter(readings)
    return [[reading if ids else Reading() for (_, ids), reading in zip(own, rest, strict=False)] for own in answers]


def _pass(
    scorer: Scorer, batch: TokenBatch, shared: tuple[TokenBatch, list[int]] | None, temperature: float
) -> list[Reading]:
    """Every row of a batch; `shared` are the prompts, once each, and which of them each row continues."""
    replayer, architecture = scorer.current_replayer(), scorer.architecture
    start, cache = 0, None
    if shared is not None and batch.prompt_columns > 1 and scorer.can_resume(batch.longest):
        start = batch.prompt_columns - 1
        cache = replayer.prefilled(shared[0], start, shared[1])
    layer = middle_layer(architecture.n_layers)
    known = architecture.layers is not None and layer < architecture.n_layers
    logits, states = replayer.read(batch, start, cache=cache, layer=layer if known else None)
    return [_reading(batch, row, logits, states, temperature) for row in range(len(batch.lengths))]


def _reading(
    batch: TokenBatch, row: int, logits: torch.Tensor, states: torch.Tensor | None, temperature: float
) -> Reading:
    """From the last columns' logits [B, T + 1, V] and hidden states [B, T + 1, d], from the first scored token's on."""
    columns = batch.scored[row]
    targets = batch.ids[row, columns]
    own = logits[row, columns.start - batch.first : columns.stop - batch.first]
    tempered = (own if own.dtype == torch.float64 else own.float()) / temperature
    log_probs = tempered.log_softmax(-1).gather(1, targets[:, None].to(own.device)).squeeze(1)
    embedding = None if states is None else tuple(states[row, columns.stop - batch.first].double().tolist())
    return Reading(tuple(log_probs.double().tolist()), embedding)

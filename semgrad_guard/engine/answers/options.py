"""How to generate, and how to draw more answers to a prompt by plans that several estimators can share.

Logits processors make a greedy search sample, with randomness of its own, and end a thought after so many tokens, by
the chat template's own mark.

Why: docs/decisions.md#0036
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from inspect import signature
from typing import Annotated, Any, TypeVar

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from semgrad_guard.declared import Bounds, require_known, require_valid
from semgrad_guard.engine.prompts.thoughts import Codec, Thinking
from semgrad_guard.errors import InputError
from semgrad_guard.settings import AnswerOptions, TopK, TopP

T = TypeVar("T")


def knows_its_options(kind: type[T]) -> type[T]:
    """For a class: an unknown keyword is an `InputError` that names the known ones."""
    initialize: Any = kind.__init__
    known = signature(kind).parameters.keys() - {"self"}

    @wraps(initialize)
    def checked(self: T, *args: Any, **options: Any) -> None:
        if not options.keys() <= known:
            require_known(type(self).__name__, options, known)
        initialize(self, *args, **options)

    setattr(kind, "__init__", checked)  # noqa: B010 - a type checker keeps to the signature that it has read
    return kind


def require_kind(name: str, value: object, kind: type[T]) -> T:
    """The value of an argument, which is of this class.

    Raises:
        InputError: it is of another one.
    """
    if not isinstance(value, kind):
        raise InputError(f"{name} must be a {kind.__name__}, not {value!r:.60}").about(name)
    return value


@knows_its_options
@dataclass(frozen=True, kw_only=True)
class GenerationOptions(AnswerOptions):
    """How to generate. Greedy by default, as in the paper; a model's own sampling defaults play no part.

    `max_tokens` >= 1; `temperature` from 1e-6 to 100, or 0, which is greedy; `top_p` in (0, 1]; `top_k` >= 0, where 0
    means all; `seed` repeats a sampled answer (row i of a batch draws from seed + i); `stop` strings end an answer
    before themselves; `grammar` (Lark, as llguidance reads it) is the form that an answer must follow. Scores always
    use the raw, untempered and unconstrained distribution.

    Raises:
        InputError: one is out of its range.
    """

    grammar: str | None = None

    def __post_init__(self) -> None:
        require_valid(self)

    def rows(self, count: int) -> tuple[GenerationOptions, ...]:
        """The options of so many answers to one prompt, by themselves."""
        if self.seed is None:
            return (self,) * count
        return tuple(replace(self, seed=self.seed + number) for number in range(count))


def sampling_processors(seed: int, *, temperature: float, top_p: float = 1.0, top_k: int = 0) -> LogitsProcessorList:
    """Processors that make the likeliest token of one row a sample."""
    chain: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    return LogitsProcessorList([*chain, Draw(seed)])


class Draw(LogitsProcessor):
    """Leaves one token, drawn from softmax(logits): where a uniform number falls among the summed probabilities.

    The numbers come from a generator of our own, so that the caller's random state is never read or moved, and a row
    does not depend on its batch. It lives where the scores do: a seed repeats an answer on the same kind of device.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: torch.Generator | None = None
        self._sums = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        if self._generator is None:
            self._generator = torch.Generator(scores.device).manual_seed(self._seed)
            # Kept from step to step: to get and clear these megabytes anew takes several times as long as to fill them.
            self._sums = torch.empty_like(scores, dtype=torch.float64)
        uniform = torch.rand(1, 1, generator=self._generator, dtype=torch.float64, device=scores.device)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()  # in place: the temperature has made them anew
        sums = torch.cumsum(weights, -1, dtype=torch.float64, out=self._sums)
        drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
        drawn.clamp_(max=scores.shape[-1] - 1)  # a number that was rounded up to the whole sum
        return scores.fill_(-math.inf).scatter_(1, drawn, 0.0)


Ids = Sequence[int]
Count = Annotated[int, Bounds(1)]


@knows_its_options
@dataclass(frozen=True)
class Sampling:
    """Independent samples. Fields as in `GenerationOptions`; `temperature` > 0.

    A sample depends on the seed, the prompt and its number, not on the batch it is drawn in.
    """

    count: Count = 10
    temperature: Annotated[float, Bounds(1e-6, 100)] = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    seed: int = 0
    max_tokens: Count = 256

    def __post_init__(self) -> None:
        require_valid(self)

    def rows(self, prompt: Ids, options: GenerationOptions) -> tuple[GenerationOptions, ...]:
        """The options of the answers to one prompt, by themselves. They end as an answer with `options` does."""
        common = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        common |= {"stop": options.stop, "max_thinking_tokens": options.max_thinking_tokens}
        texts = [f"{self.seed} {number} {list(prompt)}" for number in range(self.count)]
        seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 for text in texts]
        return tuple(GenerationOptions(seed=seed, **common) for seed in seeds)


@knows_its_options
@dataclass(frozen=True)
class DiverseBeams:
    """Diverse beam search with `count` groups of one beam each and Hamming diversity `penalty` >= 0.

    The first group is the greedy answer; each further one avoids the tokens that earlier groups took at the same step.
    Source: Vijayakumar et al., "Diverse beam search: decoding diverse solutions from neural sequence models", 2018,
    with group size 1 as in Qiu & Miikkulainen, "Semantic Density", 2024.
    """

    count: Count = 10
    penalty: Annotated[float, Bounds(0)] = 1.0
    max_tokens: Count = 256

    def __post_init__(self) -> None:
        require_valid(self)

    def processors(self, width: int, end_tokens: tuple[int, ...]) -> list[LogitsProcessorList]:
        """For the rows of one prompt of `width` tokens, which have to be written step by step together."""
        taken: dict[int, list[int]] = {}
        return [
            LogitsProcessorList([Diversity(self.penalty, taken, width=width, end_tokens=end_tokens)])
            for _ in range(self.count)
        ]


SamplingPlan = Sampling | DiverseBeams
"""How to draw samples. Plans are equal where their settings are, and then share their samples."""


def plan_record(plan: SamplingPlan) -> dict[str, Any]:
    """A plan's settings for files and for calibrations' bindings, under the names that are in files already."""
    record = asdict(plan)
    record["max_new_tokens"] = record.pop("max_tokens")
    return record


@dataclass(frozen=True)
class Sample:
    """One more answer: its text, the tokens that carry it, and the model's opinion of them.

    `ids` and `log_probs` (nats) leave the end token out; both are empty where the model ended at once. `embedding` is
    the middle layer's state of the last token, None where there is no token or the layers are unknown. `preceding` are
    the tokens of its thought, given which it is read; `why_unscored` is the reason why it cannot be, if there is one.
    """

    text: str
    ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    embedding: tuple[float, ...] | None = field(default=None, repr=False)
    preceding: tuple[int, ...] = field(default=(), repr=False)
    why_unscored: str | None = None


class Diversity(LogitsProcessor):
    """Makes one group of a beam search diverse: log p minus penalty x earlier takers of a token at the same step."""

    def __init__(self, penalty: float, taken: dict[int, list[int]], *, width: int, end_tokens: tuple[int, ...]) -> None:
        self._penalty, self._taken, self._width, self._end_tokens = penalty, taken, width, end_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        others = self._taken.setdefault(input_ids.shape[1] - self._width, [])
        log_probs = scores.double().log_softmax(-1)
        for token in others:
            log_probs[0, token] -= self._penalty
        others.append(int(log_probs.argmax()))
        return log_probs


class ThoughtLimit:
    """Where an answer's thought is open after `budget` tokens, the next ones are those that close it.

    `thinking` is how its model thinks, None where the marks are not known: then nothing is closed.
    """

    def __init__(self, budget: int, thinking: Thinking | None, codec: Codec) -> None:
        self.begin, self._thinking, self._codec = budget, thinking, codec
        self._closing = () if thinking is None else codec.encode(thinking.marks.closing)
        self.end = budget + len(self._closing)
        self._open: bool | None = None

    def forced(self, ids: Sequence[int]) -> int | None:
        """The token behind these of the answer, where the model has no choice."""
        if not self.begin <= len(ids) < self.end:
            return None
        if self._open is None:
            self._open = self._is_open(ids[: self.begin])
        return self._closing[len(ids) - self.begin] if self._open else None

    def _is_open(self, ids: Sequence[int]) -> bool:
        decode, thinking = self._codec.decode, self._thinking
        return thinking is not None and thinking.is_open(thinking.seen(ids, decode(ids, special=True), decode))


def force(scores: torch.Tensor, token: int) -> None:
    """Leave a row [V] of scores one likely token; the model's own scores are kept elsewhere for scoring."""
    scores.fill_(-math.inf)
    scores[token] = 0.0

"""More answers of a model to the same prompts, and readings of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from semgrad_guard.engine.generation.evidence import Sampler
from semgrad_guard.engine.generation.generation import Codec, answered
from semgrad_guard.engine.generation.reading import Ids, Reading, likeliest, read
from semgrad_guard.engine.generation.sampling_plans import Sample, SamplingPlan
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scoring.scorer import Scorer
from semgrad_guard.records import Conversation


class Draws(Codec, Protocol):
    """What a sampler needs of a decoder."""

    def draw(
        self, prompts: Sequence[Ids], plan: SamplingPlan, *, window: int | None = None, stop: tuple[str, ...] = ()
    ) -> list[list[int]]: ...


class ModelSampler(Sampler):
    """Asks one model for further answers, and for its opinion of answers. Holds the model's lock while it runs."""

    def __init__(
        self, scorer: Scorer, decoder: Draws, *, render: Callable[[Conversation], Prompt], window: int | None
    ) -> None:
        self._scorer, self._decoder, self.render, self._window = scorer, decoder, render, window

    def drawn(
        self, prompts: Sequence[Prompt], plan: SamplingPlan, *, stop: tuple[str, ...] = ()
    ) -> list[tuple[Sample, ...]]:
        """`plan.count` answers to each prompt, not yet judged; `stop` strings end them before themselves."""
        rows = self._decoder.draw([prompt.ids for prompt in prompts], plan, window=self._window, stop=stop)
        seen = [
            answered(ids, stop, self._decoder, prompts[row // plan.count].thinking, cut=len(ids) >= plan.max_tokens)
            for row, ids in enumerate(rows)
        ]
        samples = [Sample(each.text, each.scored_ids, reasoned=each.reasoning is not None) for each in seen]
        return [tuple(samples[start : start + plan.count]) for start in range(0, len(samples), plan.count)]

    def judged(
        self, prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]], *, temperature: float = 1.0
    ) -> list[tuple[Sample, ...]]:
        """The samples with their embeddings and log-probabilities at a temperature, however they were drawn."""
        readings = self.read(prompts, [[sample.ids for sample in own] for own in samples], temperature=temperature)
        return [
            tuple(
                replace(sample, log_probs=reading.log_probs, embedding=reading.embedding)
                for sample, reading in zip(*pair, strict=True)
            )
            for pair in zip(samples, readings, strict=True)
        ]

    def read(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[Ids]], *, temperature: float = 1.0
    ) -> list[list[Reading]]:
        """What the model thinks of several answers to each prompt (see `reading.read`)."""
        return read(self._scorer, [prompt.ids for prompt in prompts], answers, temperature=temperature)

    def likeliest(self, prompt: Prompt, answer: Ids, count: int) -> list[tuple[tuple[int, float], ...]]:
        """The likeliest tokens at each place of an answer (see `reading.likeliest`)."""
        return likeliest(self._scorer, prompt.ids, answer, count)

    def fits(self, prompt: Prompt, longest: int) -> bool:
        """Whether an answer of `longest` tokens has room behind this prompt."""
        return self._window is None or len(prompt.ids) + longest <= self._window

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a piece of an answer."""
        return self._decoder.encode(text)

    def decode(self, ids: Ids) -> str:
        """The text of answer tokens."""
        return self._decoder.decode(ids)

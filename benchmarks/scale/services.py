"""How long the parts of answering take: as they were measured, or as arithmetic says. What the simulation is fed with.

Units are seconds and tokens everywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict


class Services(Protocol):
    """How long a model's thread takes for each thing that it does."""

    def join(self, prompts: Sequence[int]) -> float:
        """Reading prompts of so many tokens each, and writing each answer's first token."""
        ...

    def step(self, rows: int, width: float) -> float:
        """One more token of so many answers, whose prompts and answers are `width` tokens long on average."""
        ...

    def score(self, answered: Sequence[Question]) -> float:
        """Scoring these answers together."""
        ...


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Joined(_Plain):
    """Prompts that were read together: how many, their tokens together, and how long it took."""

    rows: int
    tokens: int
    seconds: float


class Stepped(_Plain):
    """The median of `count` steps of so many answers."""

    rows: int
    count: int
    seconds: float


class Scored(_Plain):
    """Answers that were scored together."""

    rows: int
    tokens: int
    seconds: float


class Question(_Plain):
    """How long one question and its answer are."""

    prompt: int
    answer: int


class Parts(_Plain):
    """What was measured of one estimator with so many threads, in a process that does nothing else."""

    estimator: str
    threads: int
    joins: tuple[Joined, ...]
    steps: tuple[Stepped, ...]
    scores: tuple[Scored, ...]


class Point(_Plain):
    """What was measured of a server: `clients` that each wait for `each` answers, one after the other."""

    server: str
    threads: int
    clients: int
    each: int
    answers_a_second: float
    p50: float
    p99: float


class Host(_Plain):
    """What passes through so many layers take where next to nothing is computed: Python, and calling kernels."""

    layers: int
    step: float
    score: float


class Measured(_Plain):
    """A file of measurements: of the parts (`measure.py`), and of servers (`serving.py`)."""

    machine: dict[str, str | int | float]
    host: Host
    model: str
    questions: tuple[Question, ...]
    parts: tuple[Parts, ...]
    points: tuple[Point, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Read a file.

        Raises:
            ValidationError: it is none.
        """
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def services(self, estimator: str, threads: int) -> MeasuredServices:
        """The parts of one estimator with so many threads. Prompts and steps are the same work for all of them.

        Raises:
            KeyError: it was not measured.
        """
        alike = [each for each in self.parts if each.threads == threads]
        own = [each for each in alike if each.estimator == estimator]
        if not own:
            raise KeyError(f"{estimator} with {threads} threads was not measured")
        return MeasuredServices.of(
            joins=[one for each in alike for one in each.joins],
            steps=[one for each in alike for one in each.steps],
            scores=[one for each in own for one in each.scores],
        )


@dataclass(frozen=True)
class MeasuredServices:
    """Measured times, with straight lines between them.

    A step depends on the answers in it (their width was what it usually is). Joining and scoring are a share for
    each pass, one for each row, and one for each token, by least squares with none of them negative.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    joining: tuple[float, float, float]
    scoring: tuple[float, float, float]

    @classmethod
    def of(cls, *, joins: Sequence[Joined], steps: Sequence[Stepped], scores: Sequence[Scored]) -> MeasuredServices:
        """Lines through what was measured, where something was measured more than once through the medians."""
        by_rows = _grouped((each.rows, each.seconds) for each in steps)
        return cls(
            rows=tuple(by_rows),
            seconds=tuple(statistics.median(each) for each in by_rows.values()),
            joining=_line([(each.rows, each.tokens, each.seconds) for each in joins]),
            scoring=_line([(each.rows, each.tokens, each.seconds) for each in scores]),
        )

    def join(self, prompts: Sequence[int]) -> float:
        """As in `Services`."""
        return _on(self.joining, len(prompts), sum(prompts))

    def step(self, rows: int, width: float) -> float:
        """As in `Services`; the width plays no part."""
        del width
        return float(np.interp(rows, self.rows, self.seconds))

    def score(self, answered: Sequence[Question]) -> float:
        """As in `Services`."""
        return _on(self.scoring, len(answered), sum(each.answer for each in answered))


def _line(measured: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """What a pass, a row and a token take, so that relative errors are least."""
    from scipy.optimize import nnls

    weights = np.array([1 / seconds for _, _, seconds in measured])
    table = np.array([(1.0, rows, tokens) for rows, tokens, _ in measured]) * weights[:, None]
    found, _ = nnls(table, np.ones(len(measured)))
    one, two, three = (float(each) for each in found)
    return one, two, three


def _on(line: tuple[float, float, float], rows: int, tokens: int) -> float:
    return line[0] + line[1] * rows + line[2] * tokens if rows else 0.0


def medians(steps: Sequence[tuple[int, float]], *, least: int = 3) -> tuple[Stepped, ...]:
    """Steps by the number of answers in them, where there are enough."""
    return tuple(
        Stepped(rows=rows, count=len(each), seconds=statistics.median(each))
        for rows, each in _grouped(steps).items()
        if len(each) >= least
    )


def _grouped(steps: Iterable[tuple[int, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for rows, seconds in sorted(steps):
        found.setdefault(rows, []).append(seconds)
    return found


@dataclass(frozen=True)
class Shape:
    """A decoder-only model's size: what its roofline depends on."""

    name: str
    layers: int
    width: int
    key_values: int
    """Width of a layer's keys (and of its values)."""
    layer_weights: float
    """In all layers together."""
    vocabulary: int
    bytes_a_weight: float = 2.0

    @property
    def head_weights(self) -> float:
        """Of the output head."""
        return float(self.vocabulary * self.width)


@dataclass(frozen=True)
class Accelerator:
    """What a GPU can do at most by its maker's data sheet, and which share of it is assumed to be reached."""

    name: str
    bytes_a_second: float
    flops: float
    """Operations a second in bfloat16, without sparsity."""
    memory_share: float
    compute_share: float


LLAMA_8B = Shape("8B (Llama 3's)", layers=32, width=4096, key_values=1024, layer_weights=6.98e9, vocabulary=128_256)
"""https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json"""

H100 = Accelerator("H100 SXM", bytes_a_second=3.35e12, flops=989e12, memory_share=0.7, compute_share=0.45)
"""https://www.nvidia.com/en-us/data-center/h100/: 3.35 TB/s, 989 teraFLOPS. The shares are assumptions."""


Left = Literal["states", "cache", "nothing"]
"""What writing leaves to a score: the layers' states and the KV cache; the cache alone; nothing that it can read."""


@dataclass(frozen=True)
class RooflineServices:
    """Times of a model on a GPU by arithmetic: what its bytes take or its operations, if more, and the host's part.

    `cost` names the score that is computed: unguarded, max_probability, cascade, or hybridgrad.

    HybridGrad, for each token of an answer: the replay and the backward pass through the upper half of the layers
    (a forward pass from states that were kept, and gradients of activations alone), and three products with the head
    (its output again, the seed of the backward pass, ParaGrad). The cascade: the head's part alone, for a share
    `doubts` of the answers. Maximum probability: nothing, since writing has computed it.

    That is where writing has `left` the states. Where it left the cache alone, HybridGrad's replay takes each answer
    through the lower layers as well. Where it left nothing, every score takes each prompt and each answer through all
    layers once more, those that need no gradient included (whose pass takes the host a third of what a score does).
    """

    shape: Shape
    gpu: Accelerator
    host: Host
    cost: str
    doubts: float = 0.25
    left: Left = "states"

    def join(self, prompts: Sequence[int]) -> float:
        """As in `Services`."""
        weights = self.shape.layer_weights
        operations = 2 * weights * sum(prompts) + 2 * self.shape.head_weights * len(prompts)
        return self.host.step + self._computing(weights, operations)

    def step(self, rows: int, width: float) -> float:
        """As in `Services`."""
        weights = self.shape.layer_weights + self.shape.head_weights
        keys = 2 * self.shape.layers * self.shape.key_values * width * rows
        return self.host.step + self._computing(weights + keys, 2 * weights * rows)

    def score(self, answered: Sequence[Question]) -> float:
        """As in `Services`."""
        written = sum(each.answer for each in answered)
        if self.cost == "unguarded" or not written:
            return 0.0
        layers, head = self.shape.layer_weights, self.shape.head_weights
        tokens = sum(each.prompt + each.answer for each in answered)
        if self.cost == "hybridgrad":
            passes, again = {
                "states": (1.0, 0.0),
                "cache": (1.5, layers * written),
                "nothing": (2.5, layers * written + 2 * layers * (tokens - written)),
            }[self.left]
            operations = (2 * layers + 6 * head) * written + again
            return self.host.score + self._computing(passes * layers + 3 * head, operations)
        doubts = self.doubts if self.cost == "cascade" else 0.0
        in_head = self._computing(2 * head, 4 * head * written * doubts) if doubts else 0.0
        if self.left != "nothing":
            return in_head
        operations = 2 * layers * tokens + 2 * head * written
        return self.host.score / 3 + self._computing(layers + head, operations) + in_head

    def _computing(self, numbers: float, operations: float) -> float:
        gpu = self.gpu
        memory = numbers * self.shape.bytes_a_weight / (gpu.bytes_a_second * gpu.memory_share)
        return max(memory, operations / (gpu.flops * gpu.compute_share))

"""Pairs of texts: whether two answers mean the same, by their words or by a model that the user names.

Models judge entailment (NLI) and similarity (cross-encoders).

Only safetensors are loaded. Older checkpoints on the hub hold pickles; `AutoModelForSequenceClassification` loads and
`save_pretrained(folder)` writes safetensors; save the tokenizer to the same folder. Only for checkpoints you trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semgrad_guard.engine.checkpoint import load_classifier
from semgrad_guard.engine.interruption import InterruptibleLock
from semgrad_guard.engine.scores.scorer import clean_slate
from semgrad_guard.engine.scores.twin import stoppable
from semgrad_guard.engine.text_units import normalise, token_f1
from semgrad_guard.errors import InputError, UnsupportedModelError

Pair = tuple[str, str]

_REMEMBERED = 1 << 16  # pairs whose judgement is kept; methods that compare the same answers share it


class PairModel:
    """A sequence classifier over pairs of texts. A pair is judged once, as long as it is remembered.

    `name` is the name it was loaded by. `cuts` is the end of a text that is cut where a pair is longer than the model
    can read. Thread-safe.
    """

    cuts: ClassVar[Literal["left", "right"]] = "left"
    together = 32  # pairs judged at once
    segments: bool | None = None  # whether the model sees which text a token belongs to; None: its tokenizer decides

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str) -> None:
        self.name, self._model = name, model
        self.config: Any = model.config
        self._tokenizer: Any = tokenizer
        self._stages = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
        self._known: dict[Pair, tuple[float, ...]] = {}
        self._lock = InterruptibleLock()
        self.prepare()

    def prepare(self) -> None:
        """Read what a subclass needs off the checkpoint's configuration, or refuse it."""

    def activate(self, logits: torch.Tensor) -> torch.Tensor:
        """The outputs for logits [pairs, labels]: probabilities over the labels."""
        return logits.softmax(dim=-1)

    @classmethod
    def from_pretrained(cls, name_or_path: str) -> Self:
        """Load a checkpoint from a folder or the hub onto the accelerator if there is one. No remote code.

        Raises:
            ModelNotFoundError: nothing loadable at that name or path; the message names the missing part.
            UnsupportedModelError: the checkpoint is not a classifier of the wanted kind.
        """
        model, tokenizer = load_classifier(name_or_path, dtype=torch.float32)
        tokenizer.truncation_side = cls.cuts
        place: Any = torch.accelerator.current_accelerator() or "cpu"
        return cls(model.to(place), tokenizer, name=name_or_path)  # pyright: ignore

    def judged(self, pairs: Sequence[Pair]) -> list[tuple[float, ...]]:
        """The model's output for each pair, one number per label, as `activate` leaves it."""
        with self._lock:
            fresh = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
            # Texts of a kind together: little padding.
            fresh.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
            judged: list[tuple[float, ...]] = []  # after an interruption none of it is kept
            for start in range(0, len(fresh), self.together):
                judged += self._run(fresh[start : start + self.together])
            self._known.update(zip(fresh, judged, strict=True))
            outputs = [self._known[pair] for pair in pairs]
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
            return outputs

    def _run(self, batch: Sequence[Pair]) -> list[tuple[float, ...]]:
        # RoBERTa's table of positions has two more entries than it can use.
        positions: int | None = getattr(self.config, "max_position_embeddings", None)
        stated = int(self._tokenizer.model_max_length)  # huge where the tokenizer states none
        longest = min(stated, positions - 2) if positions else stated if stated < 1 << 20 else None
        first, second = map(list, zip(*batch, strict=True))
        encoded: Any = self._tokenizer(
            first,
            second,
            padding=True,
            truncation=True,
            max_length=longest,
            return_token_type_ids=self.segments,
            return_tensors="pt",
        )
        with clean_slate(), torch.no_grad(), stoppable(self._stages):
            output: Any = self._model(**encoded.to(self._model.device))
            rows: Any = self.activate(output.logits.float())
            return [tuple(row) for row in rows.tolist()]


@dataclass(frozen=True)
class EntailmentScores:
    """How a text follows from another: three probabilities that add up to 1."""

    entailment: float
    neutral: float
    contradiction: float

    @property
    def entails(self) -> bool:
        """Whether entailment is the likeliest of the three."""
        return self.entailment >= max(self.neutral, self.contradiction)


class Entailment(PairModel):
    """A natural language inference model with labels for entailment, neutral and contradiction, in any order.

    Texts are cut at their beginning: where they are a question and an answer, the answers must be left.

    Raises:
        UnsupportedModelError: the checkpoint's `id2label` does not name the three.
    """

    def prepare(self) -> None:
        self._order = [self._label(stem) for stem in ("entail", "neutral", "contradict")]

    def probabilities(self, pairs: Sequence[Pair]) -> list[EntailmentScores]:
        """How the second text of each pair follows from the first."""
        return [EntailmentScores(*(row[label] for label in self._order)) for row in self.judged(pairs)]

    def _label(self, stem: str) -> int:
        labels: dict[int, str] = self.config.id2label
        numbers = [number for number, label in labels.items() if label.lower().startswith(stem)]
        if len(numbers) != 1:
            raise UnsupportedModelError(
                f"{self.name!r} has the labels {', '.join(labels.values())}, and exactly one should begin with "
                f"{stem!r}; take a model trained on MNLI whose config.json names entailment, neutral and contradiction "
                "in id2label"
            )
        return int(numbers[0])


class CrossEncoder(PairModel):
    """A model of the similarity of two texts with one output, such as `cross-encoder/stsb-roberta-large`.

    Raises:
        UnsupportedModelError: the checkpoint has more than one output.
    """

    def prepare(self) -> None:
        if (outputs := int(self.config.num_labels)) != 1:
            raise UnsupportedModelError(
                f"{self.name!r} has {outputs} outputs and a cross-encoder for similarity has one; "
                "take a model trained on sentence similarity, for example cross-encoder/stsb-roberta-large"
            )

    def activate(self, logits: torch.Tensor) -> torch.Tensor:
        """The logistic function, as in training."""
        return logits.sigmoid()

    def similarities(self, pairs: Sequence[Pair]) -> list[float]:
        """How alike the texts of each pair are, in [0, 1]."""
        return [row[0] for row in self.judged(pairs)]


class AnswerEquivalence(PairModel):
    """A two-label classifier of "[CLS] candidate [SEP] reference [SEP] question [SEP]"; label 1 is "equivalent".

    Source: Bulian et al., "Tomayto, tomahto. Beyond token-level answer equivalence for question answering evaluation",
    EMNLP 2022, and its port https://huggingface.co/kortukov/answer-equivalence-bem.

    Raises:
        UnsupportedModelError: the checkpoint has not two labels, or its tokenizer no separator.
    """

    cuts: ClassVar[Literal["left", "right"]] = "right"

    def prepare(self) -> None:
        labels, separator = int(self.config.num_labels), self._tokenizer.sep_token
        if labels != 2 or separator is None:
            raise UnsupportedModelError(
                f"{self.name!r} has {labels} labels and the separator {separator!r}; an answer equivalence model has "
                "two labels and a [SEP] token, as kortukov/answer-equivalence-bem has"
            )
        self._separator = str(separator)
        self.segments = int(getattr(self.config, "type_vocab_size", 0)) > 1  # whatever class of tokenizer a port has

    def probabilities(self, triples: Sequence[tuple[str, str, str]]) -> list[float]:
        """P(equivalent) in [0, 1] for each (question, reference, candidate).

        The tokenizer puts [CLS], the first [SEP] and the last one; no text may bring separators of its own.
        """
        bare = [[text.replace(self._separator, " ") for text in triple] for triple in triples]
        pairs = [(candidate, f"{reference} {self._separator} {question}") for question, reference, candidate in bare]
        return [row[1] for row in self.judged(pairs)]


class Equivalence(Protocol):
    """Compares answers to one question; symmetric in the two texts of a pair."""

    @property
    def name(self) -> str:
        """Its name in settings and calibrations."""
        ...

    def __call__(self, pairs: Sequence[Pair], question: str) -> list[bool]:
        """Whether the answers of each pair mean the same."""
        ...

    def relations(self, pairs: Sequence[Pair], question: str) -> list[EntailmentScores]:
        """How the answers of each pair relate, the mean of both directions."""
        ...


@dataclass(frozen=True)
class F1Equivalence:
    """Shares enough words: F1 above `threshold`, in [0, 1). "New York" and "New Delhi" share half of theirs."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise InputError(f"an F1 threshold lies in [0, 1), for example 0.5; it is {self.threshold!r}")

    @property
    def name(self) -> str:
        return f"token-f1>{self.threshold:g}"

    def __call__(self, pairs: Sequence[Pair], question: str) -> list[bool]:
        return [_f1(*pair) > self.threshold for pair in pairs]

    def relations(self, pairs: Sequence[Pair], question: str) -> list[EntailmentScores]:
        """F1 as the probability of entailment, the rest as that of contradiction."""
        return [EntailmentScores(share, 0.0, 1.0 - share) for share in (_f1(*pair) for pair in pairs)]


SHARED_WORDS = F1Equivalence()
"""The default where no NLI model is given."""


@dataclass(frozen=True)
class NLIEquivalence:
    """Each answer entails the other, both read after the question.

    Source: Farquhar et al., "Detecting
    hallucinations in large language models using semantic entropy", Nature 2024, and its published code.
    """

    model: Entailment

    @property
    def name(self) -> str:
        return f"nli:{self.model.name}"

    def __call__(self, pairs: Sequence[Pair], question: str) -> list[bool]:
        return [there.entails and back.entails for there, back in self._both_ways(pairs, question)]

    def relations(self, pairs: Sequence[Pair], question: str) -> list[EntailmentScores]:
        """The mean of the model's probabilities in both directions."""
        return [_mean(*scores) for scores in self._both_ways(pairs, question)]

    def _both_ways(self, pairs: Sequence[Pair], question: str) -> list[tuple[EntailmentScores, EntailmentScores]]:
        in_context = [(f"{question} {first}", f"{question} {second}") for first, second in pairs]
        scores = self.model.probabilities([*in_context, *((second, first) for first, second in in_context)])
        return list(zip(scores[: len(in_context)], scores[len(in_context) :], strict=True))


def clusters(texts: Sequence[str], question: str, equivalence: Equivalence) -> list[int]:
    """The number of each text's cluster: that of the first cluster whose first text it is equivalent to.

    Equal texts are never compared. Clusters are numbered from 0 in the order in which they appear.
    """
    distinct = list(dict.fromkeys(texts))
    pairs = [(first, second) for i, first in enumerate(distinct) for second in distinct[i + 1 :]]
    same = dict(zip(pairs, equivalence(pairs, question), strict=True))
    heads: list[str] = []
    number: dict[str, int] = {}
    for text in distinct:
        home = next((i for i, head in enumerate(heads) if same[head, text]), len(heads))
        if home == len(heads):
            heads.append(text)
        number[text] = home
    return [number[text] for text in texts]


def _f1(first: str, second: str) -> float:
    return 1.0 if normalise(first) == normalise(second) else token_f1(first, second)


def _mean(there: EntailmentScores, back: EntailmentScores) -> EntailmentScores:
    return EntailmentScores(
        (there.entailment + back.entailment) / 2,
        (there.neutral + back.neutral) / 2,
        (there.contradiction + back.contradiction) / 2,
    )

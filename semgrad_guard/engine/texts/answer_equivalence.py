"""BEM: a classifier that tells whether two answers to a question are equivalent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semgrad_guard.engine.texts.text_pairs import PairModel
from semgrad_guard.errors import UnsupportedModelError


class AnswerEquivalence(PairModel):
    """A two-label classifier of "[CLS] candidate [SEP] reference [SEP] question [SEP]"; label 1 is "equivalent".

    Source: Bulian et al., "Tomayto, tomahto. Beyond token-level answer equivalence for question answering evaluation",
    EMNLP 2022, and its port https://huggingface.co/kortukov/answer-equivalence-bem.

    Raises:
        UnsupportedModelError: the checkpoint has not two labels, or its tokenizer no separator.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str, batch_size: int = 32
    ) -> None:
        super().__init__(model, tokenizer, name=name, batch_size=batch_size)
        labels, separator = int(self.config.num_labels), tokenizer.sep_token
        if labels != 2 or separator is None:
            raise UnsupportedModelError(
                f"{name!r} has {labels} labels and the separator {separator!r}; an answer equivalence model has two "
                "labels and a [SEP] token, as kortukov/answer-equivalence-bem has"
            )
        self._separator = str(separator)
        self.segments = int(getattr(self.config, "type_vocab_size", 0)) > 1  # whatever class of tokenizer a port has

    def probabilities(self, triples: Sequence[tuple[str, str, str]]) -> list[float]:
        """P(equivalent) in [0, 1] for each (question, reference, candidate)."""
        return [row[1] for row in self.judged([self._pair(*triple) for triple in triples])]

    def activate(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities over the two labels."""
        return logits.softmax(dim=-1)

    def _pair(self, question: str, reference: str, candidate: str) -> tuple[str, str]:
        """The tokenizer puts [CLS], the first [SEP] and the last one; no text may bring separators of its own."""
        question, reference, candidate = (
            text.replace(self._separator, " ") for text in (question, reference, candidate)
        )
        return candidate, f"{reference} {self._separator} {question}"

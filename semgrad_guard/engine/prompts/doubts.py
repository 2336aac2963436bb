"""Signs that a tokenizer or its chat template is another model's: answers would be garbage, and look like answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_HALF = 0.5
"""A vocabulary is padded to a round number, never to twice its size."""


def doubts(tokenizer: Any, *, vocabulary: int, end_tokens: Sequence[int], has_template: bool) -> tuple[str, ...]:
    """Signs against this tokenizer, in whole sentences; none where there are none.

    Args:
        tokenizer: a Hugging Face tokenizer.
        vocabulary: rows of the model's output head.
        end_tokens: the ids that end an answer by the model's own configuration; empty where it names none.
        has_template: whether there is a chat template.
    """
    return tuple(_found(tokenizer, vocabulary, end_tokens, has_template))


def _found(tokenizer: Any, vocabulary: int, end_tokens: Sequence[int], has_template: bool) -> Iterator[str]:
    size, end = len(tokenizer), tokenizer.eos_token_id
    if not has_template:
        yield (
            "The model has no chat template: it is shown the bare text and may continue it instead of answering. "
            "Use an instruction-tuned model, or save the tokenizer with its chat_template."
        )
    if size > vocabulary or size < _HALF * vocabulary:
        yield f"The tokenizer has {size} tokens and the model {vocabulary}: is it another model's?"
    elif end is not None and end_tokens and end not in end_tokens:
        known = ", ".join(map(str, end_tokens))
        yield f"The tokenizer ends a text with token {end} and the model with {known}: is it another model's?"

"""Log-probabilities in OpenAI's form, from the passes of the score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semgrad_guard import Estimator, LanguageModel
from semgrad_guard.engine.generation.generation import Evidence

_WINDOW = 8
"""Tokens decoded together for the text of the last one: decoders treat the first word of a text apart."""


def openai_logprobs(
    model: LanguageModel, estimator: Estimator, evidence: Evidence, *, top: int = 0
) -> dict[str, Any] | None:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}` for the tokens of an answer.

    `top_logprobs` holds the `top` likeliest tokens at each place, the likeliest first, which takes another pass over
    prompt and answer; it is empty where `top` is 0.

    Natural logarithms, from the model's raw distribution. A token that ends inside a character has an empty text and
    no bytes; the one that completes the character has them all, so that the bytes together are the answer's. None
    where the logits were not finite.
    """
    timed = evidence.gradients(estimator.objective)
    found: Sequence[float] = () if timed is None else timed.scores.log_probs
    if len(found) != len(evidence.response_ids):
        return None
    tokens = token_texts(model, evidence.response_ids)
    others = evidence.likeliest(top) if top else ((),) * len(tokens)
    return {
        "content": [
            {**_entry(token, logprob), "top_logprobs": [_entry(token_texts(model, [i])[0], p) for i, p in likeliest]}
            for token, logprob, likeliest in zip(tokens, found, others, strict=True)
        ]
    }


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def token_texts(model: LanguageModel, ids: Sequence[int], *, special: bool = True) -> list[str]:
    """The part of each token in the text; special tokens have one only where `special` is True."""
    texts: list[str] = []
    start = whole = 0  # tokens from `start` on are decoded together; those before `whole` ended with a whole character
    for end in range(1, len(ids) + 1):
        before, after = (_decode(model, ids[start:stop], special=special) for stop in (whole, end))
        complete = end == len(ids) or not after.endswith("\ufffd")
        texts.append(after[len(before) :] if complete else "")
        if complete:
            whole = end
            start = max(start, whole - _WINDOW)
    return texts


def _decode(model: LanguageModel, ids: Sequence[int], *, special: bool) -> str:
    tokenizer: Any = model.tokenizer
    return tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)

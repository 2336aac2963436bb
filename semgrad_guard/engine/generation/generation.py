"""What comes out of a generation: the text a user sees, the tokens that carry it, and the way to its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from semgrad_guard.engine.generation.evidence import BatchScoring, Evidence
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.records import FinishReason


@dataclass(frozen=True)
class Generation:
    """One answer of the model.

    `text` is what the user sees: up to, and without, the end token or a stop string. `response_ids` are the tokens
    that carry it and exactly the tokens that are scored: the end token and what lies beyond a stop string do not
    count. Where a stop string begins inside a token, they are the tokens of the text itself. `completion_tokens`
    counts everything the model produced, `reused_tokens` those of the prompt that an earlier generation had read (see
    `Memory.prompts`). `cut` is where the answer was cut off: after so many tokens, or at this stop string; None where
    the model ended it. `evidence` is what scoring needs; while it has not been used, it holds the answer's KV cache, so
    let generations go once they are scored.
    """

    prompt: Prompt
    text: str
    response_ids: tuple[int, ...]
    finish_reason: FinishReason
    completion_tokens: int
    scoring: BatchScoring = field(repr=False, compare=False)
    row: int = 0
    reused_tokens: int = 0
    cut: int | str | None = None

    @property
    def evidence(self) -> Evidence:
        """Facts about this answer, each computed once and only when asked."""
        return Evidence(self.prompt, self.response_ids, self.scoring, self.row, self.cut)


class Codec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text; where it names special tokens, these."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; special ones show in it only if asked for."""
        ...


@dataclass(frozen=True)
class Visible:
    """What is delivered of the tokens that were produced.

    `ids` carry `text` and nothing beyond it. `cut`: the stop string that ended the text; `retokenized`: it did so
    inside a token, so that `ids` are not the first tokens produced but the delivered text's own.
    """

    text: str
    ids: tuple[int, ...]
    cut: str | None = None
    retokenized: bool = False


def visible(ids: Sequence[int], stop: Sequence[str], codec: Codec) -> Visible:
    """The text before the first stop string, and the tokens that carry it; none where the text is blank."""
    text = codec.decode(ids)
    ends = [(text.find(string), string) for string in stop if string in text]
    if not ends:
        return Visible(text, tuple(ids) if text.strip() else ())
    end, cut = min(ends)
    delivered = text[:end]
    if not delivered.strip():
        return Visible(delivered, (), cut=cut)
    count = next(n for n in range(len(ids) + 1) if codec.decode(ids[:n]).startswith(delivered))
    kept = codec.decode(ids[:count])
    if kept == delivered:
        return Visible(delivered, tuple(ids[:count]), cut=cut)
    raw = codec.decode(ids[:count], special=True)  # marks of tool calls must not get lost
    own = codec.encode(raw[: len(raw) - (len(kept) - len(delivered))])
    return Visible(delivered, own, cut=cut, retokenized=True)

"""What comes out of a generation: the text a user sees, the tokens that carry it, and the way to its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from semgrad_guard.engine.generation.evidence import BatchScoring, Evidence
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.reasoning import Reasoning, Thinking, answer_tokens
from semgrad_guard.records import FinishReason


@dataclass(frozen=True)
class Generation:
    """One answer of the model.

    `text` is what the user sees: up to, and without, the end token or a stop string. `response_ids` are the tokens
    that carry it and exactly the tokens that are scored: the end token and what lies beyond a stop string do not
    count. `reasoning` is what the model wrote before its answer; it is no part of `text`, and the answer behind it has
    no score. Where that is None, a pair of marks with nothing between them belongs to `response_ids`, not to `text`.
    Where a stop string begins inside a token, they are the tokens of the text itself. `completion_tokens`
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
    reasoning: Reasoning | None = None

    @property
    def evidence(self) -> Evidence:
        """Facts about this answer, each computed once and only when asked."""
        return replace(self.scoring.evidence[self.row], cut=self.cut)


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
    inside a token, so that `ids` are not the first tokens produced but the delivered text's own. `reasoning` is what
    was written before.
    """

    text: str
    ids: tuple[int, ...]
    cut: str | None = None
    retokenized: bool = False
    reasoning: Reasoning | None = None

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The tokens that are scored: none behind reasoning."""
        return () if self.reasoning else self.ids


def answered(
    ids: Sequence[int], stop: Sequence[str], codec: Codec, thinking: Thinking | None, *, cut: bool = False
) -> Visible:
    """The answer among the tokens produced, up to the first stop string, and the reasoning before it.

    `cut` says that a limit ended the tokens.
    """
    if thinking is None:
        return visible(ids, stop, codec)
    whole = codec.decode(ids, special=True)
    parts = thinking.parts(whole, cut=cut)
    if parts.answer == (0, len(whole)):
        return visible(ids, stop, codec)
    reasoning = thinking.reasoning(whole, parts)
    if parts.answer is None:
        whole_thought = None if reasoning is None else replace(reasoning, ids=tuple(ids))
        return Visible("", (), cut=visible(ids, stop, codec).cut, reasoning=whole_thought)
    tokens = answer_tokens(ids, whole, parts.answer, codec.decode)
    found = visible(ids[tokens.begin : tokens.end], stop, codec)
    text, before = tokens.clean(found.text), tuple(ids[: tokens.begin])
    if reasoning is None:  # nothing was thought: the marks are tokens before the answer like any other
        return replace(found, text=text, ids=(*before, *found.ids) if found.ids else ())
    return replace(found, text=text, retokenized=False, reasoning=replace(reasoning, ids=before))


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

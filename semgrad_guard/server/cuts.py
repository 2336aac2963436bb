"""`Cuts`: the part of a delivered answer that a client's `stop` and `max_tokens` leave.

Where answers may be withheld, the draft ends by the server's own limits, and the decision is about all of it. If a
client's cut changed the draft, it would change the decision: the beginning of a withheld answer may score lower than
the whole, and whether a decision changes tells whether a string occurs in it. So the cuts are made afterwards, in text
that is delivered anyway.

Why: docs/adr/0144-nothing-of-a-withheld-draft-leaves.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from semgrad_guard.errors import InputError
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import Answer

CUT = "the delivered text ends where the client's stop or max_tokens cut it; the decision is about the whole answer"
"""Why the rest of an answer is not promised."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Keep so many tokens at most, and nothing from the first of the `stop` strings on.

    Raises:
        InputError: a stop string is empty.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(self.stop):
            raise InputError("a stop string must hold at least one character")

    def __bool__(self) -> bool:
        return self.max_tokens is not None or bool(self.stop)

    def delivered(self, verdict: Verdict, answer: Answer) -> tuple[Verdict, Answer]:
        """The part of an answer that is delivered, and its verdict.

        A tool call goes out whole or not at all. `finish_reason` is OpenAI's: "length" where the limit ended the
        answer, and "stop" where a string did.
        """
        pieces = answer.pieces or ()
        text, count, finish = answer.text, len(pieces), None
        if self.max_tokens is not None and max(count, answer.completion_tokens or 0) > self.max_tokens:
            count = self.max_tokens
            text, finish = text[: sum(map(len, pieces[:count]))], "length"
        if places := [place for string in self.stop if (place := text.find(string)) >= 0]:
            text, finish = text[: min(places)], "stop"
            lengths = accumulate(map(len, pieces), initial=0)
            count = next(number for number, length in enumerate(lengths) if length >= len(text))
        if finish is None:
            return verdict, answer
        left = replace(
            answer,
            text=text,
            tool_calls=(),
            finish_reason=finish,
            completion_tokens=count,
            together=None,
            logprobs=_left_of(answer.logprobs, pieces[:count], len(text))
            if _aligned(answer.logprobs, pieces)
            else None,
        )
        return _unpromised(verdict, text) if (text, ()) != (answer.text, answer.tool_calls) else verdict, left


def _unpromised(verdict: Verdict, text: str) -> Verdict:
    changes: dict[str, Any] = {
        "text": text,
        "tool_calls": (),
        "promised": False,
        "familiar": None if verdict.familiar is None else False,
        "unfamiliar": (*verdict.unfamiliar, CUT),
    }
    return verdict.model_copy(update=changes)


def _aligned(entries: Sequence[dict[str, Any]] | None, pieces: Sequence[str]) -> bool:
    """Whether the log-probabilities are those of these tokens; a special token adds nothing to the text."""
    if entries is None or len(entries) != len(pieces):
        return False
    return all(piece in ("", entry.get("token")) for entry, piece in zip(entries, pieces, strict=True))


def _left_of(entries: Sequence[dict[str, Any]] | None, pieces: Sequence[str], length: int) -> list[dict[str, Any]]:
    """The entries of the tokens that are left. One in which a stop string begins names its text before that."""
    left = list(entries or ())[: len(pieces)]
    if (beyond := sum(map(len, pieces)) - length) > 0:
        token = pieces[-1][:-beyond]
        left[-1] = {**left[-1], "token": token, "bytes": list(token.encode())}
    return left

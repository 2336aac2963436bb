"""Answers and verdicts as they leave the server: plain data, and nothing of an answer that was withheld.

Where answers may be withheld, the draft ends by the server's own limits, and the decision is about all of it. If a
client's cut changed the draft, it would change the decision: the beginning of a withheld answer may score lower than
the whole, and whether a decision changes tells whether a string occurs in it. So a client's `stop` and `max_tokens` cut
afterwards (`Cuts`), in text that is delivered anyway.

Why: docs/decisions.md#0144
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

from semgrad_guard.engine.text_units import Span
from semgrad_guard.errors import InputError
from semgrad_guard.records import METADATA_KEY, FieldVerdict, SentenceVerdict, ToolCall, Verdict

ACTION_HEADER = "x-semgrad-guard-action"
ENFORCED_HEADER = "x-semgrad-guard-enforced"
"""Present where the action is advice, and the answer was delivered in any case."""
ID_HEADER = "x-semgrad-guard-decision-id"
KEY = METADATA_KEY
SENTENCE_KEY = f"{KEY}_sentence"
"""The verdict on a sentence that leaves while its answer is being written."""

WITHHELD = "the answer is not let through"
_PARTLY = "sentences that are not let through are left out"
_NULL = "null is in the place of values that are not let through"
"""The only reasons that a client gets."""
_OF_ANY_DRAFT = frozenset(
    (
        *("schema", "digest", "action", "enforced", "promised", "decision_id", "escalated"),
        *("estimator", "settings", "threshold", "calibration_id", "alpha", "requested_alpha"),
        *("upstream", "model", "revision", "fingerprint", "prompt_template"),
    )
)
"""The fields about the model, the policy and the delivered text: they are the same whatever the draft was."""
_WITHHELD_FIELDS: Mapping[str, Any] = {
    "status": "unscored",
    "unfamiliar": [],
    "sentences": [],
    "calls": [],
    "fields": [],
    "scored_tokens": 0,
    "reason": WITHHELD,
}
"""The other fields of a withheld answer, where they are not None."""
_OF_WITHHELD_SENTENCES: Mapping[str, Any] = {
    "uncertainty": None,
    "compared": None,
    "confidence": None,
    "scores": {},
    "tokens": 0,
    "reason": None,
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer in plain data, written by the engine, an upstream or a target.

    `logprobs` are entries in OpenAI's form, None where the request wants none. `completion_tokens` is None where the
    other server does not count them; `together` counts those of all answers to the request, where it counts no single
    answer. `pieces` are the text that each token adds, where a client's cuts are still to be made. `reasoning` is the
    text that another server wrote before the answer: None for no reasoning, "" where its text is not known.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    logprobs: list[dict[str, Any]] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    together: int | None = None
    pieces: tuple[str, ...] | None = None
    reasoning: str | None = None


def arguments_in(text: str | None) -> dict[str, Any] | None:
    """The arguments of a call, from their JSON; None where it is not an object."""
    try:
        found: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def tool_call_fields(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form."""
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id or "", "type": "function", "function": {"name": call.name, "arguments": arguments}}


def public_record(verdict: Verdict) -> dict[str, Any]:
    """A verdict as clients get it.

    The record of a withheld answer holds the action, the threshold, and the decision's id; its score and the reason are
    in the decision log. Of a part, withheld sentences show where they are left out, and not how many they are. Whether
    the scores have drifted is about all answers, withheld ones too: the operator finds it in the log and the metrics.
    """
    record = verdict.metadata()
    record["details"]["drift"] = None
    if verdict.escalated is not None:
        record["escalated"] = public_record(verdict.escalated)
    if verdict.shows_draft:
        return record
    public = {**_of_any_draft(record), "details": _of_any_draft(record["details"])}
    if not verdict.is_part:
        return public
    if verdict.has_nulls:
        fields = [public_field(one) for one in verdict.fields]
        details = {**public["details"], "fields": fields}
        return {**public, "status": verdict.status, "reason": _NULL, "details": details}
    tokens = sum(one.tokens for one in verdict.sentences if one.action == "deliver")
    sentences = list[dict[str, Any]]()
    for one, before in zip(verdict.sentences, (None, *verdict.sentences), strict=False):
        if one.action == "deliver":
            sentences.append(public_sentence(one))
        elif before is None or before.action == "deliver":
            sentences.append({**public_sentence(one), **_OF_WITHHELD_SENTENCES})
    details = {**public["details"], "scored_tokens": tokens}
    return {**public, "status": verdict.status, "reason": _PARTLY, "sentences": sentences, "details": details}


def _of_any_draft(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if name in _OF_ANY_DRAFT else _WITHHELD_FIELDS.get(name) for name, value in fields.items()}


def public_sentence(sentence: SentenceVerdict) -> dict[str, Any]:
    """A sentence's verdict as clients get it; the number of the one that it leans on would count withheld ones."""
    return sentence.model_dump(mode="json") | {"leans_on": None}


def public_field(field: FieldVerdict) -> dict[str, Any]:
    """A value's verdict as clients get it: of a withheld one its place alone."""
    hidden = {"uncertainty": None, "confidence": None} if field.action == "null" else {}
    return field.model_dump(mode="json") | hidden


def part_of(verdict: Verdict, answer: Answer, ranges: Sequence[Span]) -> Answer:
    """The delivered part of an answer: these ranges of it, or the values of its structure that are let through.

    Nothing else that was written with it is there.
    """
    if verdict.has_nulls:
        pairs = zip(answer.tool_calls, verdict.tool_calls, strict=True)
        calls = tuple(replace(call, arguments=own.arguments) for call, own in pairs)
        ended = "tool_calls" if calls else "stop"
        # How many tokens were written would tell the length of what null stands for.
        return Answer(text=verdict.text, tool_calls=calls, finish_reason=ended, completion_tokens=0)
    return Answer(
        text=verdict.text,
        finish_reason="stop",  # "length" would tell, with the tokens that are counted, how many were withheld
        completion_tokens=sum(one.tokens for one in verdict.sentences if one.action == "deliver"),
        pieces=None if answer.pieces is None else pieces_of(answer.pieces, ranges),
    )


def pieces_of(pieces: Sequence[str], ranges: Sequence[Span]) -> tuple[str, ...]:
    """The tokens' texts within these ranges, as many as the same text has where nothing else is left out.

    A token that has no text of its own, as it ends inside a character, belongs to the place where it is.
    """
    begins = accumulate(map(len, pieces), initial=0)
    return tuple(
        "".join(piece[max(low - begin, 0) : max(high - begin, 0)] for low, high in ranges)
        for begin, piece in zip(begins, pieces, strict=False)
        if any(low < begin + len(piece) and begin < high if piece else low <= begin < high for low, high in ranges)
    )


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
            raise InputError("a stop string must hold at least one character").about("stop")

    def __bool__(self) -> bool:
        return self.max_tokens is not None or bool(self.stop)

    def may_end(self, limit: int) -> bool:
        """Whether an answer of up to so many tokens may be cut."""
        return bool(self.stop) or (self.max_tokens is not None and self.max_tokens < limit)

    def delivered(self, verdict: Verdict, answer: Answer, ranges: Sequence[Span] = ()) -> tuple[Verdict, Answer]:
        """What is delivered of an answer, or of these ranges of it, and its verdict.

        A tool call goes out whole or not at all. `finish_reason` is OpenAI's: "length" where the limit ended the
        answer, and "stop" where a string did.
        """
        answer = part_of(verdict, answer, ranges) if verdict.is_part else answer
        text, pieces, finish = answer.text, answer.pieces or (), None
        count = len(pieces)
        if self.max_tokens is not None and max(count, answer.completion_tokens or 0) > self.max_tokens:
            count = self.max_tokens
            text, finish = text[: sum(map(len, pieces[:count]))], "length"
        if places := [place for string in self.stop if (place := text.find(string)) >= 0]:
            text, finish = text[: min(places)], "stop"
            lengths = accumulate(map(len, pieces), initial=0)
            count = next((number for number, length in enumerate(lengths) if length >= len(text)), count)
        if finish is None:
            return verdict, answer
        left = replace(
            answer,
            text=text,
            tool_calls=(),
            finish_reason=finish,
            completion_tokens=count,
            together=None,
            logprobs=_left_of(answer.logprobs, pieces, count, len(text)),
        )
        return _unpromised(verdict, text) if (text, ()) != (answer.text, answer.tool_calls) else verdict, left


def _unpromised(verdict: Verdict, text: str) -> Verdict:
    length = len(text)
    sentences = (
        one.model_copy(update={"start": min(one.start, length), "end": min(one.end, length), "promised": False})
        for one in verdict.sentences
    )
    return verdict.revised(
        text=text,
        sentences=tuple(sentences),
        tool_calls=(),
        promised=False,
        familiar=None if verdict.details.familiar is None else False,
        unfamiliar=(*verdict.details.unfamiliar, CUT),
    )


def _left_of(
    entries: Sequence[dict[str, Any]] | None, pieces: Sequence[str], tokens: int | None, length: int
) -> list[dict[str, Any]] | None:
    """The log-probabilities of the tokens that are left; None where they are not those of these pieces.

    A special token adds nothing to the text. The entry of a token in which a stop string begins names its text before
    that.
    """
    if entries is None or len(entries) != len(pieces):
        return None
    if not all(piece in ("", entry.get("token")) for entry, piece in zip(entries, pieces, strict=True)):
        return None
    left, pieces = list(entries[:tokens]), pieces[:tokens]
    if (beyond := sum(map(len, pieces)) - length) > 0:
        token = pieces[-1][:-beyond]
        left[-1] = {**left[-1], "token": token, "bytes": list(token.encode())}
    return left

"""The contents of frameworks' messages: verdicts in metadata, reasoning, ids of calls, and the user's question.

A verdict has one spelling in metadata; it is written and read back here. Reasoning is recognised by the names that
servers and frameworks use.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, overload
from uuid import uuid4

from pydantic import ValidationError

from semgrad_guard.errors import InputError
from semgrad_guard.guard import unscored
from semgrad_guard.records import METADATA_KEY, PromptForm, Verdict, digest_of


def verdict_of_record(record: Any, text: str, *, whole: bool = True) -> Verdict:
    """The verdict that `Verdict.metadata()` was made from; `text` is the delivered text, which the record leaves out.

    A record that was made for another text does not count: the answer is then unscored. Where `whole` is
    False, the text is a piece of a stream, whose last one carries the record of all of it.

    Raises:
        InputError: it is of another schema, or damaged.
    """
    try:
        verdict = Verdict.model_validate(_with_text(record, text))
    except (ValidationError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"the {METADATA_KEY!r} metadata cannot be read ({error}); was it written by another version?"
        ) from error
    if not whole or record.get("digest", digest_of(text)) == digest_of(text):
        return verdict
    return unscored(text, reason="the record that came with it was made for another text", model=verdict.model)


def _with_text(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A record with the text that `Verdict.metadata()` left out."""
    fields = dict(record)
    fields["schema_version"] = fields.pop("schema", None)
    fields.pop("digest", None)
    if fields.get("escalated") is not None:
        own = max((sentence["end"] for sentence in fields.get("sentences") or ()), default=0)
        fields["escalated"] = _with_text(fields["escalated"], text[own:].lstrip("\n") if own else text)
    return {**fields, "text": text}


BLOCKS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})
"""Types of content blocks that hold reasoning."""

_NAMES = (
    *("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details", "thinking_content"),
    *("thought", "thoughts", "thought_summary", "reasoning_text", "reasoning_summary", "reasoning_blocks"),
)
_COUNTS = (
    *("reasoning_tokens", "reasoning", "thoughts_token_count", "thinking_tokens", "thought_tokens", "thoughts_tokens"),
    *("reasoning_token_count", "reasoningTokens"),
)
_USAGE = (
    "usage",
    "token_usage",
    "usage_metadata",
    "completion_tokens_details",
    "output_token_details",
    "output_tokens_details",
    "completionTokensDetails",
    "details",
    "provider_specific_fields",
    "additional_kwargs",
)


def reasoning_of(*records: object) -> str | None:
    """The text of the reasoning that a record holds; "" where only its existence is known, None without a sign."""
    for record in (cast("Mapping[str, Any]", given) for given in records if isinstance(given, Mapping)):
        texts = (record.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
        if text := next((text for text in texts if isinstance(text, str) and text), None):
            return text
    return "" if tells_reasoning(*records) else None


def tells_reasoning(*records: object) -> bool:
    """Whether one of the records (a message's further fields, its metadata, its usage) holds reasoning."""
    for record in (cast("Mapping[str, Any]", given) for given in records if isinstance(given, Mapping)):
        counts = (record.get(name) for name in _COUNTS)
        if (
            any(_holds(record.get(name)) for name in _NAMES)
            or any(isinstance(count, int | float) and count > 0 for count in counts)
            or tells_reasoning(*(record.get(name) for name in _USAGE))
        ):
            return True
    return False


def _holds(value: object) -> bool:
    """Whether a field holds reasoning: text, parts, or an item of OpenAI's; settings of reasoning are not."""
    if isinstance(value, Mapping):
        item = cast("Mapping[str, Any]", value)
        return item.get("type") == "reasoning" or any(item.get(name) for name in ("content", "text"))
    return isinstance(value, str | list) and value not in ("", [])


@overload
def short_id(call_id: str) -> str: ...
@overload
def short_id(call_id: None) -> None: ...
@overload
def short_id(call_id: str | None) -> str | None: ...
def short_id(call_id: str | None) -> str | None:
    """An id of nine letters or digits: Mistral's templates refuse any other, to most it is all the same."""
    if call_id is None or re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def new_id() -> str:
    """An id for a call to which the model gave none."""
    return uuid4().hex[:9]


def as_asked(form: PromptForm, question: str | None, *, prepared: bool) -> PromptForm:
    """A prompt's form, and whether its question may differ from the user's.

    It may where the user's words (`question`, None where they are unknown) are not in it, and where another call of a
    model came before in the same run (`prepared`): its text may be in the prompt, in any words.
    """
    literal = question is None or _plain(question) in _plain(form.text)
    return replace(form, rewritten=not literal or prepared)


def _plain(text: str) -> str:
    return " ".join(text.split())

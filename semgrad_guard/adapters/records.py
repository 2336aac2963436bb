"""Verdicts in the metadata of frameworks' messages and responses: one spelling, written and read back here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from semgrad_guard.errors import InputError
from semgrad_guard.guard import unscored
from semgrad_guard.records import METADATA_KEY, Verdict, digest_of


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
        fields["escalated"] = _with_text(fields["escalated"], text)
    return {**fields, "text": text}

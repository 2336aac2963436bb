"""The two forms of prompt that the commands use, each with the name that a calibration is bound to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.data import Question
from semgrad_guard.records import Message

Form = Literal["chat", "context"]


def conversation(question: str, context: str | None = None, *, system: str | None = None) -> list[Message]:
    """A user turn with the question, after its context if there is one, and a system message before it on request."""
    asked = question if context is None else f"Context: {context}\n\nQuestion: {question}"
    turns = [Message("user", asked)]
    return turns if system is None else [Message("system", system), *turns]


def form_of(rows: Sequence[Question]) -> Form:
    """The one form that these questions' prompts have.

    Raises:
        InputError: some questions have a context and some have none: their scores do not compare.
    """
    contexts = sum(row.context is not None for row in rows)
    if contexts not in (0, len(rows)):
        raise InputError(
            f"{contexts} of the {len(rows)} questions have a context and the others none; their uncertainties do not "
            "compare. Put them into two files and calibrate each form of prompt by itself."
        )
    return "context" if contexts else "chat"


def prompt_name(form: Form = "chat", *, system: str | None = None) -> str:
    """What a calibration calls such prompts: another system message is another name."""
    return form if system is None else f"{form}+system-{hashlib.sha256(system.encode()).hexdigest()[:8]}"

"""The forms of prompt that the commands use, each with the name that a calibration is bound to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.records import Message, in_context

Form = Literal["chat", "context"]
Wording = Literal["plain", "paper"]
"""The question as it stands, or after the paper's instruction to answer in few words."""

PAPER_PROMPT = "Please directly answer the following question with one or few words:\n{query}"
"""The paper's template for question answering (appendix, "Prompt Templates")."""


def conversation(
    question: str, context: str | None = None, *, system: str | None = None, wording: Wording = "plain"
) -> list[Message]:
    """A user turn with the question, before its context if there is one, and a system message before it on request.

    The turn names the bare question, which methods that compare or ask again see without the instruction.
    """
    asked = in_context(question, context)
    if wording == "paper":
        asked = PAPER_PROMPT.replace("{query}", asked)
    turns = [Message("user", asked, question=question, context=context)]
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


def prompt_name(form: Form = "chat", *, system: str | None = None, wording: Wording = "plain") -> str:
    """What a calibration calls such prompts: another system message or wording is another name."""
    name = form if wording == "plain" else f"{wording}-{form}"
    return name if system is None else f"{name}+system-{hashlib.sha256(system.encode()).hexdigest()[:8]}"

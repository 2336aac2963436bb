"""The forms of prompt that the commands use, each with the name that a calibration is bound to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from semgrad_guard.errors import InputError, PromptTooLongError
from semgrad_guard.questions.data import Question
from semgrad_guard.records import Message, PromptForm, in_context

Form = Literal["chat", "context"]
Wording = Literal["plain", "paper"]
"""The plain question, or the paper's instruction to answer in few words and the question."""

PAPER_PROMPT = "Please directly answer the following question with one or few words:\n{query}"
"""The paper's template for question answering (appendix, "Prompt Templates")."""

_PIECE = re.compile(r"\{\{|\}\}|\{(?:question|context)\}")
"""The parts of a template that have a meaning, from left to right: a brace, or a place."""


@dataclass(frozen=True)
class Phrasing:
    """How a question is put to the model; plain data.

    Args:
        system: a system message before every question.
        wording: the plain question, or the paper's instruction and the question.
        prompt: a template of the user's turn, with {question} in it and, for questions about a passage, {context};
            braces that are meant as such are doubled, {{ and }}, as in Python and LangChain (`require` checks it).
    """

    system: str | None = None
    wording: Wording = "plain"
    prompt: str | None = None

    def conversation(self, row: Question) -> list[Message]:
        """The messages for a question: its turn, with the passage if there is one.

        The turn names the bare question, for methods that compare questions or paraphrase them without the instruction.
        """
        turns = [] if self.system is None else [Message("system", self.system)]
        return [*turns, Message("user", self._worded(row), question=row.question, context=row.context)]

    def name(self, rows: Sequence[Question] = ()) -> str:
        """The name of such prompts in a calibration; it depends on system message, wording and template.

        Raises:
            InputError: some of the questions have a context and some have none.
        """
        form = form_of(rows)
        name = form if self.wording == "plain" else f"{self.wording}-{form}"
        parts = (("system", self.system), ("prompt", self.prompt))
        digests = [(kind, hashlib.sha256(text.encode()).hexdigest()) for kind, text in parts if text is not None]
        return "+".join([name, *(f"{kind}-{digest[:8]}" for kind, digest in digests)])

    def require(self, rows: Sequence[Question]) -> None:
        """Refuse a template that does not go with the questions.

        Raises:
            InputError: as for `require_prompt`, or the questions have two forms.
        """
        form = form_of(rows)
        if self.prompt is not None:
            require_prompt(self.prompt, form)

    def forms(
        self, rows: Iterable[Question], rendered: Callable[[list[Message]], PromptForm | None]
    ) -> list[PromptForm | None]:
        """The forms of the questions' prompts as a model sees them; `rendered` is its own.

        None is a prompt that exceeds the context window by far, and so was never sent.
        """

        def form(row: Question) -> PromptForm | None:
            try:
                return rendered(self.conversation(row))
            except PromptTooLongError:
                return None

        return [form(row) for row in rows]

    def _worded(self, row: Question) -> str:
        if self.prompt is None:
            turn = in_context(row.question, row.context)
        else:  # its places are filled in one pass: inserted text is not searched for places
            given = {"{question}": row.question, "{context}": row.context or "", "{{": "{", "}}": "}"}
            turn = _PIECE.sub(lambda piece: given[piece.group()], self.prompt)
        return PAPER_PROMPT.replace("{query}", turn) if self.wording == "paper" else turn


def require_prompt(prompt: str, form: Form) -> None:
    """Refuse a template that does not go with the form of the questions.

    Raises:
        InputError: it has no place for the question, or one for a context where there is none, or the other way round;
            or a brace in it is neither part of a place nor doubled: if it were sent, a misspelt place would be a
            promise about other prompts than those that were meant.
    """
    places = set(_PIECE.findall(prompt))
    if stray := next((part for part in _PIECE.split(prompt) if "{" in part or "}" in part), ""):
        shown = re.search(r"\{[^{}]*\}|[{}]", stray)
        raise InputError(
            f"the prompt has {'' if shown is None else shown.group()[:60]} in it, which is not a place: there are "
            "{question} and {context}; double a brace that is meant as such: {{ or }}"
        )
    if "{question}" not in places:
        raise InputError("the prompt has no {question} in it: write it where the question is to stand")
    if ("{context}" in places) != (form == "context"):
        raise InputError(
            "the questions have a context and the prompt has no {context} in it: write it where the context is to stand"
            if form == "context"
            else "the prompt has a {context} in it and the questions have none: say where it is (--context of ask, "
            "--column context=NAME of the other commands)"
        )


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

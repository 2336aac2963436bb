"""The forms of prompt that the commands use, each with the name that a calibration is bound to."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from semgrad_guard.errors import InputError, PromptTooLongError
from semgrad_guard.evaluation.questions.data import Question
from semgrad_guard.records import Message, PromptForm, in_context

Form = Literal["chat", "context"]
Wording = Literal["plain", "paper"]
"""The question as it stands, or after the paper's instruction to answer in few words."""

PAPER_PROMPT = "Please directly answer the following question with one or few words:\n{query}"
"""The paper's template for question answering (appendix, "Prompt Templates")."""

_PIECE = re.compile(r"\{\{|\}\}|\{(?:question|context)\}")
"""What has a meaning in a template, from left to right: a brace, or a place."""


class Rendered(Protocol):
    """A rendered prompt."""

    @property
    def form(self) -> PromptForm:
        """What it looks like."""
        ...


def conversation(
    question: str,
    context: str | None = None,
    *,
    system: str | None = None,
    wording: Wording = "plain",
    prompt: str | None = None,
    examples: Sequence[Question] = (),
) -> list[Message]:
    """A user turn with the question, before its context if there is one, and a system message before it on request.

    `examples` are questions with answers (the first reference; an abstention where none is right): turns before it,
    worded in the same way.

    `prompt` is a template of the user's turn, with {question} in it and, if it is about a passage, {context}; braces
    that are meant as such are doubled, {{ and }}, as in Python and LangChain (`require_prompt` checks it). The turn
    names the bare question, which methods that compare or ask again see without the instruction.
    """

    def worded(question: str, context: str | None) -> str:
        asked = in_context(question, context) if prompt is None else _filled(prompt, question, context)
        return PAPER_PROMPT.replace("{query}", asked) if wording == "paper" else asked

    shown = [
        Message(role, text)
        for each in examples
        for role, text in (("user", worded(each.question, each.context)), ("assistant", _shown_answer(each)))
    ]
    turns = [*shown, Message("user", worded(question, context), question=question, context=context)]
    return turns if system is None else [Message("system", system), *turns]


@dataclass(frozen=True)
class Phrasing:
    """How a question is put to the model: what `conversation` and `prompt_name` take. Plain data."""

    system: str | None = None
    wording: Wording = "plain"
    prompt: str | None = None
    examples: Sequence[Question] = ()

    def conversation(self, row: Question) -> list[Message]:
        """The messages that the model is asked."""
        return conversation(row.question, row.context, **self._given())

    def name(self, row: Question) -> str:
        """What a calibration calls such prompts."""
        return prompt_name(form_of([row]), **self._given())

    def require(self, rows: Sequence[Question]) -> None:
        """Refuse a template or examples that do not go with the questions.

        Raises:
            InputError: as `require_prompt` and `require_examples` say.
        """
        if self.prompt is not None:
            require_prompt(self.prompt, form_of(rows))
        require_examples(self.examples, rows)

    def settings(self) -> dict[str, Any]:
        """What a record of texts that were scored so is compared by: plain JSON types."""
        return {**self._given(), "examples": [each.model_dump() for each in self.examples]}

    def _given(self) -> dict[str, Any]:
        return {"system": self.system, "wording": self.wording, "prompt": self.prompt, "examples": self.examples}


def require_examples(examples: Sequence[Question], rows: Sequence[Question]) -> Sequence[Question]:
    """The examples themselves.

    Raises:
        InputError: one of them is among the questions, so its answer would be given away, or they have a context and
            the questions none, or the other way round.
    """
    asked = {row.key for row in rows}
    if shared := [each.question for each in examples if each.key in asked]:
        raise InputError(
            f"{len(shared)} of the {len(examples)} few-shot examples are among the questions (the first: "
            f"{shared[0][:80]!r}), which gives their answers away; take other examples, or leave these questions out"
        )
    if examples and form_of(examples) != form_of(rows):
        raise InputError("the few-shot examples and the questions must both have a context, or both have none")
    return examples


def require_prompt(prompt: str, form: Form) -> str:
    """The template itself.

    Raises:
        InputError: it has no place for the question, or one for a context where there is none, or the other way round;
            or a brace in it is neither part of a place nor doubled: sent as it stands, a misspelt place is a promise
            about other prompts than those that were meant.
    """
    places = set(_PIECE.findall(prompt))
    if stray := next((part for part in _PIECE.split(prompt) if "{" in part or "}" in part), ""):
        shown = re.search(r"\{[^{}]*\}|[{}]", stray)
        raise InputError(
            f"the prompt has {'' if shown is None else shown.group()[:60]} in it, which is no place: there are "
            "{question} and {context}; double a brace that is meant as such: {{ or }}"
        )
    if "{question}" not in places:
        raise InputError("the prompt has no {question} in it: write it where the question is to stand")
    if ("{context}" in places) != (form == "context"):
        raise InputError(
            "the questions have a context and the prompt has no {context} in it: write it where the context is to stand"
            if form == "context"
            else "the prompt has a {context} in it and the questions have none: say where it is (--context of ask, "
            "--context-field of the other commands)"
        )
    return prompt


def prompt_forms(
    rows: Iterable[Question],
    render: Callable[[list[Message]], Rendered],
    *,
    system: str | None,
    wording: Wording = "plain",
    prompt: str | None = None,
    examples: Sequence[Question] = (),
) -> list[PromptForm | None]:
    """What the questions' prompts look like to a model; `render` is its own (`LanguageModel.render`).

    None stands for a prompt that exceeds the context window by far, and so was never sent.
    """

    def form(row: Question) -> PromptForm | None:
        try:
            turns = conversation(
                row.question, row.context, system=system, wording=wording, prompt=prompt, examples=examples
            )
            return render(turns).form
        except PromptTooLongError:
            return None

    return [form(row) for row in rows]


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


def prompt_name(
    form: Form = "chat",
    *,
    system: str | None = None,
    wording: Wording = "plain",
    prompt: str | None = None,
    examples: Sequence[Question] = (),
) -> str:
    """What a calibration calls such prompts: another system message, wording, template or example is another name."""
    name = form if wording == "plain" else f"{wording}-{form}"
    shown = [[each.question, each.context, _shown_answer(each)] for each in examples]
    parts = (("system", system), ("prompt", prompt), ("examples", json.dumps(shown) if shown else None))
    return "+".join([name, *(f"{kind}-{_short(text)}" for kind, text in parts if text is not None)])


def _shown_answer(example: Question) -> str:
    return example.answers[0] if example.answers else "I don't know."


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _filled(prompt: str, question: str, context: str | None) -> str:
    """The template with its places filled at once: what is put in is not searched for places."""
    given = {"{question}": question, "{context}": context or "", "{{": "{", "}}": "}"}
    return _PIECE.sub(lambda piece: given[piece.group()], prompt)

"""Slots: places in prompts where a name or a date stands, declared by the text around them ("You help {user}.").

In a declared place any value is familiar, and its words and length do not count. A value has at most four words and
forty characters in one line; each word is a number, is capitalised, has no letter case or, between two others, is a
particle ("van"); a value of one word may be written in any way (`otto7`). Anything else in a slot is text like any
other: an injected passage, or an instruction, makes a prompt as unfamiliar as it does elsewhere. A capitalised command
of few words ("Answer Always Yes") looks like a name; a program that fills slots with words of its users should check
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from semgrad_guard.errors import InputError
from semgrad_guard.records import PromptForm

_MOST_WORDS, _MOST_CHARACTERS, _PARTICLE, _MOST_ABBREVIATED = 4, 40, 3, 2
_PLACE = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"[^\W_]+")
_SENTENCE = re.compile(r"([^\W_]+)[.:] +[^\W\d_]")
"""A word at which a sentence, or a label, ends, and not an abbreviation ("J. Smith")."""
_END_OF_TEXT = re.compile(r"[\n<\[]")
"""The line's end, or a template's mark."""
_MARKS = frozenset(" _-/,.:'\u2019")
SLOT_TOKENS = 32
"""By how many tokens a slot's value may change the length of a prompt."""


def read_slots(slots: Iterable[str]) -> tuple[str, ...]:
    """The declared slots, checked: text of one line, and one {name} after it.

    Raises:
        InputError: a slot holds no place, several, or nothing before it.
    """
    given = (slots,) if isinstance(slots, str) else tuple(slots)
    for slot in given:
        if len(_PLACE.findall(slot)) != 1 or not _WORD.search(_PLACE.split(slot)[0]) or "\n" in slot:
            raise InputError(
                "a slot is a piece of one line of the prompt with one place behind its beginning, such as "
                f"'You help {{user}}.' or 'Today is {{today}}', not {slot!r}"
            )
    return given


def without_values(form: PromptForm, slots: Sequence[str]) -> PromptForm:
    """The form with the places in the values' stead, at the first occurrence of each slot."""
    text, turn = form.text, form.user_text
    for slot in slots:
        text, turn = _emptied(text, slot), _emptied(turn, slot)
    return replace(form, text=text, user_text=turn)


def _emptied(text: str, slot: str) -> str:
    before, place, after = _PLACE.split(slot)
    start = text.find(before) + len(before)
    if start < len(before):
        return text
    end = _END_OF_TEXT.search(text, start)
    rest = text[start : end.start() if end else len(text)]
    ends = [found.start() for found in re.finditer(re.escape(after), rest)] if after.strip() else [len(rest)]
    value = next((rest[:at] for at in reversed(ends) if _is_value(rest[:at].strip())), None)
    return text if value is None else f"{text[:start]}{{{place}}}{text[start + len(value) :]}"


def _is_value(text: str) -> bool:
    if _PLACE.fullmatch(text):
        return True
    words = _WORD.findall(text)
    if not 1 <= len(words) <= _MOST_WORDS or len(text) > _MOST_CHARACTERS or not set(_WORD.sub("", text)) <= _MARKS:
        return False
    if any(len(word) > _MOST_ABBREVIATED for word in _SENTENCE.findall(text)):
        return False
    lower = [number for number, word in enumerate(words) if word[0].islower()]
    particles = [0 < number < len(words) - 1 and len(words[number]) <= _PARTICLE for number in lower]
    return len(words) == 1 or all(particles)

"""The choices of a question, and the one that a number or a letter means."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from semgrad_guard.questions.cells import KNOWN, FaultError, literal, shown

COLUMNS, MARKS, _BEFORE = (KNOWN["choices"][name] for name in ("columns", "marks", "before"))
_ENDS = ("abcdefghij", "123456789")
_LABELLED = re.compile(r"\(?([A-Ja-j])[).:]\s*(\S.*)", re.DOTALL)
_MARK = re.compile(r"\(?([A-Za-z]|\d+)[).:]?")
_LETTER = re.compile(r"\(?([A-Ja-j1-9])(?:[).:]?|[).:]\s.*)", re.DOTALL)
_LISTED = re.compile(r"(?:^|[\s(])([A-Ja-j]|[1-9](?=[).]))[).:]\s")
_MARKS = re.compile(r"[A-J](?:\s*[,;&/]\s*[A-J])+")


@dataclass(frozen=True)
class Choices:
    """Texts by label ("A", "B", ... where the data names none), and the columns that hold them.

    Numbers count `from_zero` where the data is known to: MMLU's `choices`.
    """

    texts: Mapping[str, str]
    columns: Sequence[str]
    from_zero: bool = False

    def meant(self, value: Any, column: str) -> str | None:
        """The text of the choice that a value names; None where the value is an answer by itself.

        Raises:
            FaultError: it names none, or may name two.
        """
        text, of_columns = str(value).strip(), len(self.columns) > 1
        if of_columns and text.lower() in map(str.lower, self.columns):
            text = text[-1]
        mark, labelled = _MARK.fullmatch(text), _LABELLED.fullmatch(text)
        if of_columns and not mark:
            return None  # columns A and B may be something else
        if _MARKS.fullmatch(text):
            raise several(column, text)
        wanted = {text.casefold(), labelled[2].casefold() if labelled else ""}
        found = {choice for choice in self.texts.values() if choice.casefold() in wanted and not isinstance(value, int)}
        if mark:
            label = mark[1].upper()
            found |= {choice for known, choice in self.texts.items() if known == label}
            if label.isdecimal() and self.from_zero:
                found |= {*[*self.texts.values()][int(label) : int(label) + 1]}
            if of_columns and not found and label.isdecimal() and int(label) > len(self.columns):
                return None
        if len(found) != 1:
            raise FaultError(
                f'has {shown(text):.60} in "{column}", and which of its {", ".join(self.columns)} that is cannot be '
                "told: write its text"
            )
        return found.pop()


def require_no_letter(text: str, column: str, question: str) -> None:
    """Refuse the letter or number of a choice that the question's own text lists."""
    mark = _LETTER.fullmatch(text.strip())
    listed = {label.upper() for label in _LISTED.findall(question)}
    if mark and mark[1].upper() in listed and (listed >= {"A", "B"} or listed >= {"1", "2"}):
        raise FaultError(
            f'has {shown(text)} in "{column}", a choice that the question lists: write its text, or '
            f"{shown({'text': text})} if the letter is the answer"
        )


def several(column: str, text: str) -> FaultError:
    """The fault of a column that names more than one choice."""
    return FaultError(f'has several choices in "{column}", {text}: give the texts of the right ones')


def choices_of(record: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> Choices | None:
    """The choices of a record, whose `names` are given by their plain spelling; None where it has none.

    Raises:
        FaultError: there are some that cannot be read.
    """
    for before, ends in itertools.product(_BEFORE, _ENDS):
        columns = [names[before + end][0] for end in ends if before + end in names]
        if len(columns) > 1 and {before + ends[0], before + ends[1]} <= {*names}:
            return Choices({column[-1].upper(): str(record[column]) for column in columns}, columns)
    for column in COLUMNS:
        for name in names.get(column, ()):
            if held := literal(record[name]):
                from_zero = column == "choices" and isinstance(held, list)
                return Choices(_by_label(held, name), [name], from_zero)
    return None


def _by_label(held: Any, name: str) -> dict[str, str]:
    """Choices as a list of texts (perhaps with letters before them), or of objects; as an object; or ARC's."""
    labels: Sequence[Any] = string.ascii_uppercase
    texts: list[Any] = cast("list[Any]", held) if isinstance(held, list) else [None]
    if isinstance(held, dict):
        own = cast("dict[str, Any]", held)
        labels, texts = [*own], [*own.values()]
        if isinstance(own.get("text"), list):
            labels, texts = own.get("label", string.ascii_uppercase), own["text"]
    elif all(isinstance(choice, dict) and {"label", "text"} <= choice.keys() for choice in texts):
        labels, texts = [choice["label"] for choice in texts], [choice["text"] for choice in texts]
    if not all(isinstance(text, str | int | float) for text in texts):
        raise FaultError(f'has "{name}" that cannot be read: write them as a JSON list, ["...", "..."]')
    parts = [part for text in texts if (part := _LABELLED.fullmatch(str(text)))]
    if [part[1].upper() for part in parts] == [*labels][: len(texts)]:
        return {part[1].upper(): part[2].strip() for part in parts}
    return {str(label).upper(): str(text) for label, text in zip(labels, texts, strict=False)}

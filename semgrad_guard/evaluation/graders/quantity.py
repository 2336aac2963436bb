"""Does an answer give a quantity? Numbers with their units, which pint compares."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from semgrad_guard.evaluation.graders.assertion import stance
from semgrad_guard.evaluation.graders.question import Question, akin
from semgrad_guard.evaluation.graders.reading import MONTHS, Text, Word, read, words_of

_NO_UNITS = words_of("in a at as are am is an or and of us do so be bar point hand")
"""Words that pint takes for units and texts do not."""
_TEMPERATURE = re.compile(r"(?:degrees? )?(c|f)(?:elsius|entigrade|ahrenheit)?")
_CURRENCIES = ("dollar", "euro", "yen", "cent", "franc", "rupee", "crown")
_EVENTS = (
    words_of("born birth begin began begun start built erected construct founded establish open"),
    words_of("die died death end ended fall fell closed destroy demolish abolish"),
)
_LONGEST, _ABBREVIATED = 4, 3
_EQUAL, _CLOSE = 0.001, 0.01
_YEARS = range(1000, 2101)


@dataclass(frozen=True)
class Quantity:
    """A number at a place of a text, with the unit behind it if there is one; `end` is behind both."""

    number: str
    unit: str | None
    start: int
    end: int

    @property
    def is_year(self) -> bool:
        """It can be a year."""
        return self.unit is None and self.number.isdigit() and int(self.number) in _YEARS


def whole_quantity(reference: str) -> Quantity | None:
    """The quantity that a reference consists of; None for any other."""
    text = read(re.sub(r"(?i)^(?:(?:about|around|for|in|an?|the) )+", "", reference))
    found = _quantity_at(text, 0) if text.words and text.words[0].is_number else None
    return found if found and found.end == len(text.words) else None


def gives_quantity(question: Question, answer: Text, wanted: Quantity, references: Sequence[str]) -> bool | None:
    """Whether the answer gives this quantity, and no other that answers the question as well."""
    numbers = [_quantity_at(answer, i) for i, word in enumerate(answer.words) if word.is_number]
    numbers = [number for number in numbers if _could_answer(question, answer, number, wanted)]
    same = {number: _same(number, wanted) for number in numbers}
    stances = {stance(answer, number.start, number.end) for number in numbers if same[number] is not False}
    if stances <= {"denied", "apart"}:
        return False
    counted = [n for n in numbers if (n.unit and wanted.unit) or {*answer.forms[n.end : n.end + 2]} & question.content]
    sentences = {n: answer.forms[slice(*answer.sentence(n.start))] for n in numbers}
    about = [n for n in counted or numbers if question.share(sentences[n]) == 1] or counted or numbers
    certain = all(same[n] for n in numbers if n in about or "answer" in sentences[n])
    dated = {*MONTHS} & {form for reference in references for form in read(reference).forms}
    other_day = dated and {*MONTHS} & {*answer.forms[max(about[0].start - 3, 0) : about[0].end + 2]}
    converted = any(n.unit not in (None, wanted.unit) and _some({wanted.unit or ""}, question.content) for n in about)
    return True if certain and stances == {"asserted"} and not other_day and not converted else None


def _quantity_at(text: Text, start: int) -> Quantity:
    """The number at a place, with the longest unit behind it."""
    for end in range(min(len(text.words), start + 1 + _LONGEST), start + 1, -1):
        words = text.words[start + 1 : end]
        if all(word.gap.strip() in ("", "/", "-") for word in words) and (unit := _unit(words)):
            return Quantity(text.forms[start], unit, start, end)
    return Quantity(text.forms[start], None, start, start + 1)


def _could_answer(question: Question, answer: Text, number: Quantity, wanted: Quantity) -> bool:
    """Not the question's own number, or another number of another kind or of another event."""
    before = answer.forms[answer.sentence(number.start)[0] : number.start]
    events = [event for form in before[::-1] for event in _EVENTS if _some(event, [form])]
    wanted_events = [event for event in _EVENTS if _some(event, question.content)]
    if events and len(wanted_events) == 1 and events[0] not in wanted_events:
        return False
    if number.number == wanted.number:
        return wanted.is_year or not {*MONTHS} & {*answer.forms[max(number.start - 1, 0) : number.end + 1]}
    units = number.unit and wanted.unit
    comparable = not units or _registry().Unit(number.unit).is_compatible_with(wanted.unit)
    return comparable and number.number not in question.words.forms and number.is_year == wanted.is_year


def _some(words: Collection[str], forms: Collection[str]) -> bool:
    return any(akin(word, form) for word in words for form in forms)


def _same(one: Quantity, wanted: Quantity) -> bool | None:
    """Whether they are equal, where a number without a unit is compared with any; None where a guess would be needed.

    Of two units up to 0.1 % apart; up to 1 % is a guess. A time in another unit is mostly about something else, and a
    rate can be the quantity of each time.
    """
    if one.unit == wanted.unit or not one.unit or not wanted.unit:
        short, long = sorted((one.number, wanted.number), key=lambda number: len(number.partition(".")[2]))
        rounded = f"{float(long):.{len(short.partition('.')[2])}f}"
        return one.number == wanted.number or (rounded == short and len(short.replace(".", "")) > 2 and "." in long)
    units = _registry()
    given, goal = (units.Quantity(float(quantity.number), quantity.unit) for quantity in (one, wanted))
    if not given.is_compatible_with(goal):
        return None if one.number == wanted.number else False
    apart = abs(given.to(goal.units).magnitude - goal.magnitude)
    if apart > max(_CLOSE * abs(goal.magnitude), 1e-9):
        return False
    return True if apart <= max(_EQUAL * abs(goal.magnitude), 1e-9) and not goal.check("[time]") else None


@lru_cache(maxsize=1)
def _registry() -> Any:
    import pint

    units = cast("Any", pint.UnitRegistry)(autoconvert_offset_to_baseunit=True)
    for name in _CURRENCIES:
        units.define(f"{name} = [{name}]")
    return units


@lru_cache(maxsize=4096)
def _unit(words: tuple[Word, ...]) -> str | None:
    """pint's name of the unit that these words are; None for other words."""
    from pint import PintError

    if {words[0].form, words[-1].form} & _NO_UNITS:
        return None
    names = [word.raw if word.raw[:1].isalpha() else word.form for word in words]
    if found := _TEMPERATURE.fullmatch(" ".join(names).lower()):
        return f"degree_{'Celsius' if found[1] == 'c' else 'Fahrenheit'}"
    if not all(re.fullmatch(r"[a-zA-Zµ]+[23²³]?", name) for name in names):
        return None
    parts = [name if len(name) <= _ABBREVIATED else name.lower() for name in names]
    expression = "".join(f"{word.gap}{part}" for word, part in zip(words, parts, strict=True)).strip()
    try:
        return str(_registry().parse_units(expression))
    except (PintError, TypeError, ValueError):
        return None

"""Does an answer give a quantity? Numbers with their units, which pint compares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from semgrad_guard.evaluation.graders.assertion import stance
from semgrad_guard.evaluation.graders.question import SMALL, Question, akin
from semgrad_guard.evaluation.graders.reading import MONTHS, Text, Word, read, words_of

_NO_UNITS = words_of("in a at as are am is an or and of us do so be bar point hand")
"""Words that pint takes for units and texts do not."""
_TEMPERATURE = re.compile(r"(?:degrees? )?(c|f)(?:elsius|entigrade|ahrenheit)?")
_CURRENCIES = ("dollar", "euro", "yen", "cent", "franc", "rupee", "crown")
_UNIT_WANTED = re.compile(r"(?i)\bin (?:degrees )?(?:kilo|met|mile|feet|foot|celsius|fahrenheit|gram|pound|inch)")
_EVENTS = (
    words_of("born birth begin began begun start built erected construct founded establish open"),
    words_of("die died death end ended fall fell closed destroy demolish abolish"),
)
_LONGEST, _ABBREVIATED, _DIGITS = 4, 3, 3
_ROUGHLY, _CLOSELY, _EXACTLY = 0.01, 0.001, 1e-9
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
    text = read(reference)
    start = next(
        (i for i, form in enumerate(text.forms) if form not in ("about", "around", "for", "in", "a", "the")), 0
    )
    if not text.words or not text.words[start].is_number:
        return None
    found = _quantity_at(text, start)
    return found if found.end == len(text.words) else None


def gives_quantity(question: Question, answer: Text, wanted: Quantity, references: Sequence[str]) -> bool | None:
    """Whether the answer gives this quantity, and no other that answers the question as well."""
    numbers = [_quantity_at(answer, i) for i, word in enumerate(answer.words) if word.is_number]
    numbers = [number for number in numbers if _could_answer(question, answer, number, wanted)]
    same = {number: _same(number, wanted) for number in numbers}
    equal = [number for number in numbers if same[number] is not False]
    stances = {stance(answer, number.start, number.end) for number in equal}
    if not {"asserted", "open"} & stances:
        return False
    counted = [
        number
        for number in numbers
        if (number.unit and wanted.unit) or {*answer.forms[number.end : number.end + 2]} & question.content
    ]
    sentences = {number: answer.forms[slice(*answer.sentence(number.start))] for number in numbers}
    stated = [number for number in numbers if "answer" in sentences[number]]
    about = [number for number in counted or numbers if question.share(sentences[number]) == 1]
    fitting = sorted({*stated, *(about or counted or numbers)}, key=lambda number: number.start)
    given = fitting[0]
    converted = given.unit != wanted.unit and given.unit and _UNIT_WANTED.search(question.text)
    dated = {*MONTHS} & {form for reference in references for form in read(reference).forms}
    other_day = dated and {*MONTHS} & {*answer.forms[max(given.start - 3, 0) : given.end + 2]}
    certain = all(same[number] for number in fitting) and stances == {"asserted"}
    return True if certain and not converted and not other_day else None


def _quantity_at(text: Text, start: int) -> Quantity:
    """The number at a place, with the longest unit behind it."""
    for end in range(min(len(text.words), start + 1 + _LONGEST), start + 1, -1):
        words = text.words[start + 1 : end]
        if all(word.gap.strip() in ("", "/", "-") for word in words) and (unit := _unit(words)):
            return Quantity(text.forms[start], unit, start, end)
    return Quantity(text.forms[start], None, start, start + 1)


def _could_answer(question: Question, answer: Text, number: Quantity, wanted: Quantity) -> bool:
    """Not the question's own number, a pronoun, another kind of quantity, or of another event."""
    word, after = answer.words[number.start], answer.words[number.end : number.end + 1]
    same = number.number == wanted.number
    foreign = not same and (number.number in question.words.forms or word.raw.lower() == "one")
    other_kind = number.unit and wanted.unit and not _comparable(number.unit, wanted.unit)
    of_things = wanted.unit and not number.unit and after and after[0].gap == " " and after[0].form not in SMALL
    near = answer.forms[max(number.start - 1, 0) : number.end + 1]
    day = not wanted.is_year and {*MONTHS} & {*near}
    year = number.is_year != wanted.is_year and "," not in word.raw and (not same or near[0] == "in")
    events = [event for event in _EVENTS if any(akin(form, word) for form in question.content for word in event)]
    before = answer.forms[answer.sentence(number.start)[0] : number.start][::-1]
    event = next((event for form in before for event in _EVENTS if any(akin(form, word) for word in event)), None)
    return not (
        foreign or other_kind or of_things or day or year or (len(events) == 1 and event not in (None, events[0]))
    )


def _same(one: Quantity, wanted: Quantity) -> bool | None:
    """Whether they are equal, where a number without a unit is compared with any; None where a guess would be needed.

    Of two units, as far apart as rounding to the last digit of the coarser number explains, up to 1 %; 0.1 % always is
    near enough. A time in another unit is mostly about something else, and a rate can be the quantity of each time.
    """
    if one.unit == wanted.unit or not one.unit or not wanted.unit:
        return _equal(one.number, wanted.number)
    units = _registry()
    given, goal = (units.Quantity(float(quantity.number), quantity.unit) for quantity in (one, wanted))
    if not given.is_compatible_with(goal):
        return None if one.number == wanted.number else False
    value, target = given.to(goal.units).magnitude, goal.magnitude
    coarser = units.Quantity(float(one.number) + _step(one.number), one.unit).to(goal.units).magnitude - value
    rounding = max(coarser, _step(wanted.number)) / 2
    near = abs(value - target) <= max(min(rounding, _ROUGHLY * abs(target)), _CLOSELY * abs(target), _EXACTLY)
    return near and (None if goal.check("[time]") else True)


def _equal(one: str, other: str) -> bool:
    """Equal, or equal once the longer one is rounded to the decimals of the shorter, which has three digits or more."""
    short, long = sorted((one, other), key=lambda number: len(number.partition(".")[2]))
    decimals = len(short.partition(".")[2])
    if "." not in long or len(short.replace(".", "").lstrip("0")) < _DIGITS:
        return one == other
    return abs(round(float(long), decimals) - float(short)) < 10.0 ** -(decimals + 2)


def _step(number: str) -> float:
    """One in the last place."""
    return 10.0 ** -len(number.partition(".")[2])


def _comparable(unit: str, other: str) -> bool:
    """Two units of one kind; of a rate, its quantity."""
    pairs = ((unit, other), (unit.partition(" / ")[0], other.partition(" / ")[0]))
    return any(_registry().Unit(one).is_compatible_with(two) for one, two in pairs)


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

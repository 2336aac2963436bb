"""Does an answer state a number? The first that fits the question counts: another number elsewhere is no answer."""

from __future__ import annotations

from collections.abc import Sequence

from semgrad_guard.evaluation.graders.asked import Asked
from semgrad_guard.evaluation.graders.assertion import asserted
from semgrad_guard.evaluation.graders.measures import is_convertible, same_quantity
from semgrad_guard.evaluation.graders.reading import Reading
from semgrad_guard.evaluation.graders.word_forms import MONTHS, UNITS, words_of

_YEARS = range(1000, 2101)
_BEHIND = 3
_DIGITS = 3
_EVENTS = (
    words_of("born birth begin began begun start started built erected constructed founded established opened"),
    words_of("die died death end ended fall fell fallen close closed destroyed demolished abolished"),
)
_UNTIL = MONTHS | words_of("to until till through and in on of")
_CENTURY = 100
_APART = 8
_CLAIMS = words_of("is are was were = equal equals has have of")


def says_quantity(asked: Asked, answer: Reading, wanted: Sequence[str], dates: Sequence[Sequence[str]]) -> bool:
    """Whether the answer states the number `wanted[0]`, with the unit behind it if it names one.

    `dates` are references with a month: a year alone is then too little beside another day.
    """
    number, units = wanted[0], _telling(wanted[1:])
    numbers = [
        i
        for i in _numbers(answer)
        if (_counts(answer, i, number) and answer.forms[i] not in asked.reading.forms) or answer.forms[i] == number
    ]
    numbers = [
        i
        for i in numbers
        if not (answer.forms[i] in asked.reading.forms and asked.repeated(answer, (i, i + 1)))
        and not _of_another_event(asked, answer, i)
    ]
    counted = [i for i in numbers if (units or asked.counted) & _behind(answer, i)]
    about = asked.content - {"many", "much"}
    restating = [i for i in counted if about and about <= set(answer.forms[slice(*answer.sentence(i))])]
    numbers = restating or numbers
    convertible = units if not asked.content & UNITS else frozenset[str]()  # who asks for kilometres wants these
    converted = {i: unit for i in numbers if (unit := _in_another_unit(answer, i, convertible))}
    first = next(iter(restating or counted or converted or numbers), None)
    if first is None or not asserted(answer, first, first + 1) or _is_range(answer, first):
        return False
    if other := converted.get(first):
        return same_quantity(answer.forms[first], other, number, *units) and not _claims_other(
            asked, answer, numbers, first
        )
    if not _equal(answer.forms[first], number) or not _unit_fits(answer, first, units):
        return False
    if _is_year(number) and dates and any(word in MONTHS for word in answer.forms[max(0, first - 3) : first + 3]):
        return any(set(date) <= set(answer.forms[max(0, first - 4) : first + 4]) for date in dates)
    return not _claims_other(asked, answer, numbers, first)


def year_spans(reading: Reading) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where years stand from one to another, and which: "1939-45", "from 1939 to 1945", "begun 1939 and ended 1945"."""
    found: list[tuple[tuple[int, int], tuple[int, int]]] = []
    near = ((i, k) for i in range(len(reading.words)) for k in range(i + 1, min(i + _APART + 1, len(reading.words))))
    for start, end in near:
        first, last, between = reading.forms[start], reading.forms[end], reading.forms[start + 1 : end]
        dash = end == start + 1 and reading.words[end].gap.strip() in ("-", "–", "—")
        if dash and len(last) == 2:
            last = first[:2] + last
        if not (_is_year(first) and _is_year(last) and int(first) < int(last)):
            continue
        bounds = start > 0 and reading.forms[start - 1] == "between"
        joined = "and" not in between or bounds or _EVENTS[1] & {*between}
        known = all(word in _UNTIL | _EVENTS[1] or (word.isdigit() and int(word) < _CENTURY) for word in between)
        if dash or (between and joined and known):
            found.append(((start - bounds, end + 1), (int(first), int(last))))
    return found


def _equal(one: str, other: str) -> bool:
    """Equal, or equal once the longer one is rounded to the decimals of the shorter, which has three digits or more."""
    short, long = sorted((one, other), key=lambda number: len(number.partition(".")[2]))
    decimals = len(short.partition(".")[2])
    if one == other or "." not in long or len(short.replace(".", "").lstrip("0")) < _DIGITS:
        return one == other
    return abs(round(float(long), decimals) - float(short)) < 10.0 ** -(decimals + 2)


def _telling(units: Sequence[str]) -> frozenset[str]:
    """The units without "degree" where another word says which."""
    found = frozenset(units) & UNITS
    return found - {"degree"} if len(found) > 1 else found


def _numbers(answer: Reading) -> list[int]:
    """Where numbers stand, those aside that number a list."""
    return [
        i
        for i, word in enumerate(answer.words)
        if word.is_number and not ("\n" in word.gap and answer.gap_after(i)[:2] in (". ", ") "))
    ]


def _counts(answer: Reading, i: int, number: str) -> bool:
    """A number that could be meant: no pronoun "one", and no year where none is looked for."""
    if answer.words[i].raw.lower() == "one":
        return number == "1"
    written_out = "," in answer.words[i].raw
    return (
        _is_year(answer.forms[i]) and not written_out
        if _is_year(number)
        else not _is_year(answer.forms[i]) or written_out
    )


def _is_year(number: str) -> bool:
    return number.isdigit() and int(number) in _YEARS


def _unit_fits(answer: Reading, i: int, units: frozenset[str]) -> bool:
    """Where the reference has a unit and another stands behind the number, it is another quantity."""
    near = set(answer.forms[i + 1 : i + 3]) & UNITS - {"degree"} | set(answer.forms[i + 1 : i + 2]) & MONTHS
    return not units or not near or bool(units & near)


def _in_another_unit(answer: Reading, i: int, units: frozenset[str]) -> str | None:
    """The unit behind the number, where it is another of the same kind as the reference's only one."""
    unit = next((unit for unit in answer.forms[i + 1 : i + 3] if unit in UNITS - {"degree"}), None)
    return unit if unit and len(units) == 1 and is_convertible(unit, *units) else None


def _of_another_event(asked: Asked, answer: Reading, i: int) -> bool:
    """The question asks for an end and this dates a beginning ("built in 1961 and fell in 1989"), or the other way."""
    wanted = [event for event in _EVENTS if event & asked.content]
    said = next(
        (w for w in answer.forms[answer.sentence(i)[0] : i][::-1] if any(w in event for event in _EVENTS)), None
    )
    return len(wanted) == 1 and said is not None and said not in wanted[0]


def _behind(answer: Reading, i: int) -> set[str]:
    """The words behind a number, up to the next one."""
    words = answer.words[i + 1 : i + 1 + _BEHIND]
    return {word.form for word in words[: next((k for k, word in enumerate(words) if word.is_number), _BEHIND)]}


def _is_range(answer: Reading, i: int) -> bool:
    """One end of "12 to 24 weeks", "3 or 4", "8-10"."""
    forms = answer.forms
    for here, there in ((i, i + 2), (i - 2, i)):
        if (
            here >= 0
            and there < len(forms)
            and forms[here + 1] in ("to", "or")
            and answer.words[here if here != i else there].is_number
        ):
            return forms[here] != forms[there]
    after = i + 1 < len(forms) and answer.words[i + 1].is_number and answer.words[i + 1].gap.strip() in ("-", "–")
    return after or (answer.words[i].gap.strip() in ("-", "–") and i > 0 and answer.words[i - 1].is_number)


def _claims_other(asked: Asked, answer: Reading, numbers: Sequence[int], first: int) -> bool:
    """An earlier sentence gives another number as the answer, or a later one says that the answer is another."""
    for i in numbers:
        if i == first or answer.forms[i] == answer.forms[first] or answer.sentence_of[i] == answer.sentence_of[first]:
            continue
        restated = bool(asked.content) and asked.content <= set(answer.forms[answer.sentence(i)[0] : i])
        if answer.forms[i - 1] in _CLAIMS and (restated or "answer" in answer.forms[max(0, i - 8) : i]):
            return True
        same = set(answer.forms[i + 1 : i + 2]) & set(answer.forms[first + 1 : first + 2]) - {"of", "and", "to", "in"}
        if same and i < first:
            return True
    return False

"""An answer read as words: where they stand, which sentence and clause they are in, and numbers spelled as digits."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from semgrad_guard.engine.texts.words import with_points
from semgrad_guard.evaluation.graders.word_forms import (
    CARDINALS,
    MONTH_NAMES,
    MONTHS,
    SCALES,
    form,
    is_number,
    plain,
    roman,
    words_of,
)

ARTICLES = frozenset({"a", "an", "the"})

_WORD = re.compile(
    r"\d[\d,]*(?:\.\d+)?(?:st|nd|rd|th)?(?![^\W\d_])|(?:[A-Z]\.){2,}|[ap]\.m\b\.?|[^\W_]+(?:['’][^\W_]+)*['’]?|[%$€£¥°&]"
)
_UNIT_AT_NUMBER = re.compile(r"(?<=\d)()(?=(?:[kmc]?m|[km]?g|m?l|[kMGT]B|ft|h|s|hr|min|mph)\b)")
_ISO_DATE = re.compile(r"\b(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])\b")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:[ '’\u00a0\u2009\u202f]\d{3})+(?![.,]?\d)")
_SIGN = re.compile(r"[ (=:*][-−–]$")
_FULL_HOUR = re.compile(r"(?<=\d):00(?![\d:])")
_RATE = re.compile(r"(?<![^\W\d_])(km|m|mi|ft)/(?=(?:h|hr|s|min)\b)")
_PER_HOUR = re.compile(r"(?<![^\W\d_])(k|m)ph\b")
_ABBREVIATED = words_of("dr mr mrs ms prof st mt approx ca vs jr sr jan feb mar apr jun jul aug sep sept oct nov dec")
_END = re.compile(r"[.!?。]+|\n\s*\n|;")
_REACH = 40
_MONEY = frozenset("$€£¥")


@dataclass(frozen=True)
class Word:
    """A word as it stands (`raw`), its form, and what stands between it and the word before."""

    raw: str
    form: str
    gap: str

    @property
    def is_capital(self) -> bool:
        """It begins with a capital letter."""
        return self.raw[:1].isupper()

    @property
    def is_number(self) -> bool:
        """It is a number in digits."""
        return is_number(self.form)


@dataclass(frozen=True)
class Reading:
    """A text's words; `tail` is what stands behind the last one."""

    words: tuple[Word, ...]
    tail: str

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """The words' forms."""
        return tuple(word.form for word in self.words)

    @cached_property
    def sentence_of(self) -> tuple[int, ...]:
        """The number of the sentence that each word is in."""
        numbers: list[int] = []
        for index, word in enumerate(self.words):
            before = numbers[-1] if numbers else 0
            numbers.append(before + int(index > 0 and _ends(self.words[index - 1], word)))
        return tuple(numbers)

    def sentence(self, index: int) -> tuple[int, int]:
        """Where the sentence of this word begins, and where it ends (exclusive)."""
        number = self.sentence_of[index]
        return bisect_left(self.sentence_of, number), bisect_right(self.sentence_of, number)

    def around(self, start: int, end: int) -> tuple[int, int]:
        """The sentence of a stretch, as far as it matters: a text without full stops is one sentence, too."""
        first, last = self.sentence(start)
        return max(first, start - _REACH), min(last, end + _REACH)

    def gap_after(self, index: int) -> str:
        """What stands between this word and the next."""
        return self.words[index + 1].gap if index + 1 < len(self.words) else self.tail

    def plain(self, start: int, end: int) -> str:
        """A stretch of words in lower case without punctuation, apostrophes included."""
        return " ".join(plain(word.raw).replace("’", "").replace("'", "") for word in self.words[start:end])


@lru_cache(maxsize=4096)
def read(text: str) -> Reading:
    """Read a text."""
    text = _UNIT_AT_NUMBER.sub(r"\1 ", _rates_written_out(_one_spelling_of_numbers(text)))
    words: list[Word] = []
    at = 0
    for found in _WORD.finditer(text):
        raw = found.group()
        raw = raw.replace(".", "") if re.fullmatch(r"(?:[A-Z]\.){2,}|[ap]\.m\.?", raw) else raw.rstrip("'’")
        after_number = bool(words) and (words[-1].is_number or words[-1].form in ("degree", "per"))
        gap, said = text[at : found.start()], form(raw, after_number=after_number)
        words.append(Word(raw, f"-{said}" if is_number(said) and _is_minus(gap, words) else said, gap))
        at = found.end()
    return Reading(tuple(_days(_money_behind(_numerals(_numbers_joined(words))))), text[at:])


def _is_minus(gap: str, before: Sequence[Word]) -> bool:
    """A sign stands before the number ("-5", "minus 5"): no bullet, no dash, and no number to take it from."""
    if gap.isspace() and before:
        taken_from = len(before) > 1 and before[-2].is_number
        return before[-1].form in ("minus", "negative") and not taken_from
    after_number = bool(before) and before[-1].is_number and not set(gap) & set("=:")
    return bool(_SIGN.search(gap if before else f" {gap}")) and "\n" not in gap and not after_number


def _one_spelling_of_numbers(text: str) -> str:
    """Dates as in "1989-11-09", thousands apart ("8 849"), commas ("2,54") and full hours as mostly written."""
    text = _ISO_DATE.sub(lambda of: f"{int(of[3])} {MONTH_NAMES[int(of[2]) - 1].title()} {of[1]}", with_points(text))
    return _FULL_HOUR.sub("", _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text))


def _rates_written_out(text: str) -> str:
    """ "km/h" and "kph" as "km per h"."""
    return _RATE.sub(r"\1 per ", _PER_HOUR.sub(lambda of: {"k": "km", "m": "mi"}[of[1]] + " per h", text))


def _ends(before: Word, word: Word) -> bool:
    """A sentence ends between these two words; not behind an abbreviation or an initial."""
    if not _END.search(word.gap):
        return False
    abbreviated = plain(before.raw) in _ABBREVIATED or (len(before.raw) == 1 and before.is_capital and word.is_capital)
    return not (abbreviated and word.gap.strip() == ".")


def _numbers_joined(words: Sequence[Word]) -> list[Word]:
    """Numbers that are several words as one: "twenty-five", "three hundred and six", "3.2 million"."""
    joined: list[Word] = []
    index = 0
    while index < len(words):
        value, used = _value(words, index)
        if used > 1:
            text = str(int(value)) if value == int(value) else str(value)
            raw = " ".join(word.raw for word in words[index : index + used])
            joined.append(Word(raw, text, words[index].gap))
        else:
            joined.append(words[index])
        index += max(used, 1)
    return joined


def _value(words: Sequence[Word], start: int) -> tuple[float, int]:
    """The number that begins at a word, and how many words it takes (0: none)."""
    total, part, index = 0.0, 0.0, start
    while index < len(words) and (index == start or not words[index].gap.strip(" -‑\n")):
        word = plain(words[index].raw)
        scale = SCALES.get(word.removesuffix("s"))
        if scale and index > start:
            part *= scale
            total, part = (total, part) if scale == SCALES["hundred"] else (total + part, 0.0)
        elif words[index].is_number and index == start:
            part = float(words[index].form)
            if word not in CARDINALS and not _scaled(words, index + 1):
                return part, 1
        elif word in CARDINALS and _fits(part, CARDINALS[word]):
            part += CARDINALS[word]
        elif not (word == "and" and index > start and part >= SCALES["hundred"] and _continues(words, index + 1)):
            break
        index += 1
    return total + part, index - start


def _fits(part: float, value: int) -> bool:
    """A numeral may follow what was read: a unit behind tens, anything below a hundred behind hundreds."""
    ten, hundred = 10, 100
    return part == 0 or (part % hundred == 0 and value < hundred) or (part % ten == 0 and value < ten <= part % hundred)


def _scaled(words: Sequence[Word], index: int) -> bool:
    return index < len(words) and plain(words[index].raw) in SCALES and not words[index].gap.strip()


def _continues(words: Sequence[Word], index: int) -> bool:
    return index < len(words) and plain(words[index].raw) in CARDINALS


def _numerals(words: Sequence[Word]) -> list[Word]:
    """Roman numerals as ordinals, those of one letter behind a name only: "Henry VIII" is "Henry the Eighth"."""
    return [
        Word(word.raw, f"{number}th", word.gap)
        if (number := roman(word.raw)) and (len(word.raw) > 1 or (i and words[i - 1].is_capital and word.gap == " "))
        else word
        for i, word in enumerate(words)
    ]


def _days(words: Sequence[Word]) -> list[Word]:
    """Days as plain numbers: the "28th" before or behind a month is "28"."""
    return [
        Word(word.raw, word.form.removesuffix("th"), word.gap)
        if word.form[:1].isdigit() and {each.form for each in words[max(0, i - 2) : i + 3]} & MONTHS
        else word
        for i, word in enumerate(words)
    ]


def _money_behind(words: Sequence[Word]) -> list[Word]:
    """Signs of money behind their number, as they are said: "$24" is "24 dollar"."""
    turned = list(words)
    for index in range(len(turned) - 1):
        sign, number = turned[index], turned[index + 1]
        if sign.raw in _MONEY and number.is_number and not number.gap:
            turned[index] = Word(number.raw, number.form, sign.gap)
            turned[index + 1] = Word(sign.raw, sign.form, "")
    return turned

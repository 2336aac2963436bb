"""The forms under which words of an answer and a reference are the same: case, diacritics, plurals, numbers, units."""

from __future__ import annotations

import re
import unicodedata
from difflib import SequenceMatcher


def words_of(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


_LETTERS = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ð": "d", "æ": "ae", "œ": "oe", "þ": "th", "ı": "i"})

_SOUNDS = str.maketrans("vwcqzd", "ffkkst")

_BELOW_TWENTY = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
CARDINALS = {
    **{word: value for value, word in enumerate(_BELOW_TWENTY.split())},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), start=2)},
}
SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_ORDINALS = {
    "first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12,
    **{f"{word}th": value for word, value in CARDINALS.items() if value in (4, 6, 7, 10, 11, *range(13, 20))},
    **{f"{word[:-1]}ieth": value for word, value in CARDINALS.items() if value >= 20},
}  # fmt: skip

_MONTHS = "january february march april may june july august september october november december"
MONTH_NAMES = tuple(_MONTHS.split())
MONTHS = frozenset(MONTH_NAMES)

_SAME = {
    **{month[:3]: month for month in MONTH_NAMES}, "sept": "september",
    "km": "kilometer", "kilometre": "kilometer", "m": "meter", "metre": "meter", "cm": "centimeter",
    "centimetre": "centimeter", "mm": "millimeter", "millimetre": "millimeter", "kg": "kilogram", "g": "gram",
    "gramme": "gram", "mg": "milligram", "l": "liter", "litre": "liter", "ml": "milliliter", "millilitre": "milliliter",
    "mi": "mile", "ft": "foot", "feet": "foot", "lb": "pound", "hr": "hour", "h": "hour", "min": "minute",
    "sec": "second", "s": "second", "c": "celsius", "f": "fahrenheit", "centigrade": "celsius", "percentage": "percent",
    "°": "degree", "%": "percent", "$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "&": "and", "usd": "dollar",
    "gb": "gigabyte", "mb": "megabyte",
    "men": "man", "women": "woman", "children": "child", "teeth": "tooth", "geese": "goose", "mice": "mouse",
    "people": "person", "leaves": "leaf", "wolves": "wolf", "knives": "knife", "lives": "life", "halves": "half",
    "mitochondrion": "mitochondria", "bacterium": "bacteria", "nucleus": "nuclei",
    "grey": "gray", "centre": "center", "theatre": "theater", "bce": "bc", "ce": "ad",
    "st": "saint", "mt": "mountain", "mount": "mountain",
    "novelist": "writer", "author": "writer", "riyal": "rial", "usa": "us",
    "storey": "story", "storeys": "story",
}  # fmt: skip
"""One spelling for words that are written in several ways; both sides go through it."""

UNITS = words_of(
    """kilometer meter centimeter millimeter kilogram gram milligram ton tonne liter milliliter mile foot inch yard
    pound ounce hour minute second day night week month year decade century degree celsius fahrenheit kelvin
    percent dollar euro yen cent gigabyte megabyte acre hectare volt watt hertz"""
)
"""What a number may count, under its one spelling."""

_ONLY_AFTER_A_NUMBER = words_of("""m g l h s c f mi min sec""")
"""Abbreviations that mean a unit behind a number and something else everywhere else."""

_BRITISH = re.compile(r"(?<=[a-z]{3})(?:(i)s(?=(?:e|ed|er|ing|ation)$)|(o)ur(?=(?:ed|ing|ful)?$))")
"""Endings that British and American writers spell differently: organise, colour."""
_ROMAN = re.compile(r"X{0,3}(?:IX|IV|V?I{0,3})")

_FUZZY_FROM = 7
_SOUNDS_NEEDED, _ALIKE = 4, 0.7


def plain(text: str) -> str:
    """Lower case without diacritics: "Skłodowska-Curie" is "sklodowska-curie", "CO₂" is "co2"."""
    decomposed = unicodedata.normalize("NFKD", text.casefold().translate(_LETTERS))
    return "".join(character for character in decomposed if not unicodedata.combining(character))


def form(raw: str, *, after_number: bool = False) -> str:
    """The form of one word: a number in digits, a unit or a variant under one spelling, a plural as its singular."""
    word = plain(raw).replace("’", "'")
    word = re.sub(r"'s$|'$", "", word).replace("'", "")
    if (number := _number(word)) is not None:
        return number
    if word in _ONLY_AFTER_A_NUMBER and not after_number:
        return word
    one = singular(word)
    return _SAME.get(word) or _SAME.get(one) or _BRITISH.sub(lambda end: "iz" if end[1] else "or", one)


def _number(word: str) -> str | None:
    """A number as plain digits ("1,000" is "1000", "3.50" is "3.5", "16th" and "sixteenth" are "16th"); else None."""
    if re.fullmatch(r"\d[\d,]*(\.\d+)?", word):
        digits = word.replace(",", "")
        whole, _, part = digits.partition(".")
        part = part.rstrip("0")
        return f"{whole.lstrip('0') or '0'}{'.' + part if part else ''}"
    if found := re.fullmatch(r"(\d+)(st|nd|rd|th)", word):
        return f"{int(found.group(1))}th"
    if word in CARDINALS:
        return str(CARDINALS[word])
    return f"{_ORDINALS[word]}th" if word in _ORDINALS else None


def is_number(form_of_a_word: str) -> bool:
    """Digits, perhaps with a sign and a decimal point."""
    digits = form_of_a_word.removeprefix("-")
    return digits[:1].isdigit() and digits.replace(".", "", 1).isdigit()


def roman(raw: str) -> int | None:
    """The number that a Roman numeral below forty stands for; None where it is none."""
    if not raw or not _ROMAN.fullmatch(raw):
        return None
    values = [{"I": 1, "V": 5, "X": 10}[letter] for letter in raw]
    return sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True))


def singular(word: str) -> str:
    """The word without the ending of an English plural."""
    if len(word) <= 3 or word.endswith(("ss", "us", "is")) or not word.endswith("s"):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "shes", "ches", "xes", "zes")):
        return word[:-2]
    return word[:-1]


def same_word(one: str, other: str) -> bool:
    """Equal forms; of long words with the same beginning, one may have one letter more ("Belgrad", "Belgrade").

    A changed letter makes another word (nitrate, nitrite), and numbers are never alike.
    """
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    if len(short) < _FUZZY_FROM or len(long) != len(short) + 1 or one[0] != other[0] or not (one + other).isalpha():
        return False
    return not long.endswith("s") and any(long[:i] + long[i + 1 :] == short for i in range(1, len(long)))


def transliterates(one: str, other: str) -> bool:
    """Two spellings of one name: other vowels between the same consonants, of which there are four or more.

    Not a word and one that is made of it, such as a country and its language.
    """
    if one[:1] != other[:1] or one.startswith(other) or other.startswith(one):
        return False
    if SequenceMatcher(None, one, other).ratio() < _ALIKE:
        return False
    return len(_consonants(one)) >= _SOUNDS_NEEDED and _consonants(one) == _consonants(other)


def _consonants(name: str) -> str:
    """A name's consonants, those that sound alike under one letter, doubled letters once."""
    return re.sub(r"[aeiouy]", "", re.sub(r"(.)\1+", r"\1", name.replace("ph", "f").translate(_SOUNDS)))

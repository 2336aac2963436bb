"""A text as words: one form for the spellings of a word, numbers in digits, and the sentences that they are in. A
question is read, and where an answer to it has a reference: its words in a row or in one sentence, a surname.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from semgrad_guard.engine.words import with_points


def words_of(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


ARTICLES = words_of("a an the")
_MONTHS = "january february march april may june july august september october november december"
MONTHS = tuple(_MONTHS.split())
_ONE_TO_NINETEEN = """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen"""
_ROUND_NUMBERS = "twenty thirty forty fifty sixty seventy eighty ninety"
_BELOW_TWENTY, _TENS = ["zero", *_ONE_TO_NINETEEN.split()], _ROUND_NUMBERS.split()
_CARDINALS = {
    **{word: value for value, word in enumerate(_BELOW_TWENTY)},
    **{word: 10 * value for value, word in enumerate(_TENS, start=2)},
}
_SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_NUMBER = rf"\d[\d,]*(?:\.\d+)?|{'|'.join(_CARDINALS)}"
_ORDINALS = {
    **{f"{word.removesuffix('y')}{'ie' * word.endswith('y')}th": n for word, n in _CARDINALS.items()},
    "first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12,
}  # fmt: skip
_VARIANTS = {
    **{month[:3]: month for month in MONTHS}, "sept": "september",
    "men": "man", "women": "woman", "children": "child", "teeth": "tooth", "geese": "goose",
    "mice": "mouse", "feet": "foot", "people": "person", "leaves": "leaf", "wolves": "wolf", "knives": "knife",
    "grey": "gray", "centre": "center", "theatre": "theater", "bce": "bc", "ce": "ad", "st": "saint", "mt": "mount",
    "usa": "us", "%": "percent", "&": "and", "$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "°": "degree",
}  # fmt: skip
_LETTERS = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ð": "d", "æ": "ae", "œ": "oe", "þ": "th", "ı": "i", "’": "'"})
_BRITISH = re.compile(r"(?<=[a-z]{3})(?:(i)s(?=(?:e|ed|er|ing|ation)$)|(o)ur(?=(?:ed|ing|ful)?$))")
_ROMAN = re.compile(r"X{0,3}(?:IX|IV|V?I{0,3})")

_WORD = re.compile(
    r"\d[\d,]*(?:\.\d+)?(?:st|nd|rd|th)?(?![^\W\d_])|(?:[A-Z]\.){2,}|[ap]\.m\b\.?|[^\W_]+(?:['’][^\W_]+)*['’]?|[%$€£¥°&]"
)
_ONE_SPELLING: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(r"\b(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])\b"),
        lambda of: f"{int(of[3])} {MONTHS[int(of[2]) - 1].title()} {of[1]}",
    ),
    (re.compile(r"(?:(?<=\n)[ \t]*\d+|\A1(?=.*\n))[.)] (?=\S)"), "- "),
    (re.compile(r"\b(\d\d)(\d\d)[-–](\d\d)\b(?!-)"), r"\1\2–\1\3"),
    (
        re.compile(r"(?<![\d.,])\d{1,3}(?:[ '’\u00a0\u2009\u202f]\d{3})+(?![.,]?\d)"),
        lambda of: re.sub(r"\D", "", of[0]),
    ),
    (re.compile(r"(?<=\d):00(?![\d:])"), ""),
    (re.compile(r"([$€£¥])(\d[\d.,]*\d|\d)((?: (?:thousand|[mb]illion))?)"), r"\2\3 \1"),
    (re.compile(r"(?<=\d)(?=(?:[kmc]?m|[km]?g|m?l|[kMGT]B|[kMG]?[Wh]|ft|hr|s|min|[mk]ph|[CF])\b)"), " "),
    (re.compile(r"\b(?:minus|negative) (?=\d)"), "-"),
    (re.compile(rf"(?i)\b({'|'.join(_TENS)})[- ]({'|'.join(_BELOW_TWENTY[1:10])})\b"), lambda of: _sum(of[1], of[2])),
    (re.compile(rf"(?i)\b({_NUMBER})[ -]({'|'.join(_SCALES)})\b"), lambda of: _sum(of[1], scale=of[2])),
    (
        re.compile(rf"(?i)\b(\d+00) (?:and )?(\d\d?|{'|'.join(_CARDINALS)})\b(?! ?[\d,.-]*\d)"),
        lambda of: _sum(of[1], of[2]),
    ),
)
"""One spelling of dates, items of a list, spans of years, thousands, full hours, money, units and signs."""
_SIGN = re.compile(r"(?:^|[ (=:*])[-−–]$")
_END = re.compile(r"[.!?。]+|\n\s*\n|;")
_ABBREVIATED = words_of("dr mr mrs ms prof st mt approx ca vs jr sr jan feb mar apr jun jul aug sep sept oct nov dec")


@dataclass(frozen=True)
class Word:
    """A word as written (`raw`), its form, and the text between it and the word before."""

    raw: str
    form: str
    gap: str

    @property
    def is_capital(self) -> bool:
        """It begins with a capital letter."""
        return self.raw[:1].isupper()

    @property
    def is_number(self) -> bool:
        """It is a number in digits, perhaps with a sign and a decimal point."""
        return bool(re.fullmatch(r"-?\d+(\.\d+)?", self.form))


@dataclass(frozen=True)
class Text:
    """The words of a text; `tail` is the text after the last one."""

    words: tuple[Word, ...]
    tail: str

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """The words' forms."""
        return tuple(word.form for word in self.words)

    @cached_property
    def sentences(self) -> tuple[tuple[int, int], ...]:
        """The first word of each sentence, and the end of its words."""
        cuts = [i for i in range(1, len(self.words)) if _ends(self.words[i - 1], self.words[i])]
        return tuple(zip([0, *cuts], [*cuts, len(self.words)], strict=True))

    def sentence(self, index: int) -> tuple[int, int]:
        """The sentence that a word is in."""
        return next(span for span in self.sentences if span[0] <= index < span[1])

    def gap_after(self, index: int) -> str:
        """The text between this word and the next."""
        return self.words[index + 1].gap if index + 1 < len(self.words) else self.tail

    def written(self, start: int, end: int) -> str:
        """A stretch of the text."""
        return "".join(word.gap + word.raw for word in self.words[max(start, 0) : end])

    def plain(self, start: int, end: int) -> str:
        """Words in lower case without punctuation and apostrophes."""
        return " ".join(_plain(word.raw).replace("'", "") for word in self.words[max(start, 0) : end])


@lru_cache(maxsize=4096)
def read(text: str) -> Text:
    """Read a text."""
    text = with_points(text)
    for pattern, spelling in _ONE_SPELLING:
        text = pattern.sub(spelling, text)
    words: list[Word] = []
    at = 0
    for found in _WORD.finditer(text):
        raw, gap = found.group().rstrip("'’"), text[at : found.start()]
        if re.fullmatch(r"(?:[A-Z]\.){2,}|[ap]\.m\.?", raw):
            raw = raw.replace(".", "")
        before = words[-1] if words else None
        word = Word(raw, _form(raw, after_name=before is not None and before.is_capital and gap == " "), gap)
        if (
            word.is_number
            and _SIGN.search(gap)
            and "\n" not in gap
            and not (before and before.is_number and "=" not in gap)
        ):
            word = Word(raw, f"-{word.form}", gap)  # a sign: no bullet, no dash, and no number to take it from
        words.append(word)
        at = found.end()
    return Text(tuple(words), text[at:])


def same_word(one: str, other: str) -> bool:
    """Equal forms; a number is equal to its ordinal ("World War 2", "the Second World War")."""
    return one == other or (one[:1].isdigit() and one.removesuffix("th") == other.removesuffix("th"))


def _sum(*numbers: str, scale: str = "") -> str:
    """Numbers in words or digits, added up and put into digits: "twenty-five", "3.2 million", "300 and six"."""
    words = [number.lower().replace(",", "") for number in numbers]
    total = sum(float(_CARDINALS.get(word, word)) for word in words)
    return f"{total * _SCALES.get(scale.lower(), 1):.6f}".rstrip("0").rstrip(".")


def _form(raw: str, *, after_name: bool) -> str:
    """A number in digits, a variant under one spelling, a plural as its singular, a Roman numeral as an ordinal."""
    if raw and _ROMAN.fullmatch(raw) and (len(raw) > 1 or after_name):
        values = [{"I": 1, "V": 5, "X": 10}[letter] for letter in raw]
        return f"{sum(-a if a < b else a for a, b in zip(values, [*values[1:], 0], strict=True))}th"
    word = re.sub(r"'s$|'", "", _plain(raw))
    if re.fullmatch(r"\d[\d,]*(\.\d+)?", word):
        whole, _, part = word.replace(",", "").partition(".")
        return f"{whole.lstrip('0') or '0'}.{part.rstrip('0')}".rstrip(".")
    if found := re.fullmatch(r"(\d+)(?:st|nd|rd|th)", word):
        return f"{int(found[1])}th"
    if word in _CARDINALS:
        return str(_CARDINALS[word])
    if word in _ORDINALS:
        return f"{_ORDINALS[word]}th"
    one = re.sub(r"(?<=..)ies$", "y", word) if len(word) > 4 else word
    one = re.sub(r"(?<=ss|sh|ch|.x|.z)es$|(?<=..[^sui])s$", "", one)
    variant = _VARIANTS.get(word) or _VARIANTS.get(one)
    return variant or _BRITISH.sub(lambda end: "iz" if end[1] else "or", one)


def _plain(word: str) -> str:
    """Lower case without diacritics: "Skłodowska" is "sklodowska", "CO₂" is "co2"."""
    decomposed = unicodedata.normalize("NFKD", word.casefold().translate(_LETTERS))
    return "".join(character for character in decomposed if not unicodedata.combining(character))


def _ends(before: Word, word: Word) -> bool:
    """A sentence ends between these two words; not behind an abbreviation or an initial."""
    abbreviated = _plain(before.raw) in _ABBREVIATED or (len(before.raw) == 1 and before.is_capital and word.is_capital)
    return bool(_END.search(word.gap)) and not (abbreviated and word.gap.strip() == ".")


_SMALL = """what which who whom whose when where why how is are was were do does did can could the a an of in on at to
    for by from with and or it its i you me my tell give name please there has have had be been that this these their
    his her he she they we them our us as not many much into"""
SMALL = frozenset(read(_SMALL).forms)
"""The forms of words that carry no meaning of their own."""
_OPTION = re.compile(r"(?:^|[\s(])([A-H])[).:]\s*(.+?)(?=[\s,;(]+[A-H][).:]|[.?]\s|[.?]?$)", re.DOTALL)
_CHOICE = re.compile(r"((?:[^,:?]+, )*)([^,:?]+?),? or ([^?.,]+)")
_TITLES = words_of("mr mrs miss ms dr sir lady lord president king queen saint then so and by but since because")
_PASSED_OVER = ARTICLES | words_of(
    """in on at for by to from with of and because so every up until about around under over out our my his her its
    their your"""
)
"""Words that the answer can have or lack within a reference."""
_STEM = 4

Span = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """A question's text."""

    text: str

    @cached_property
    def options(self) -> dict[str, str]:
        """The lettered options: "A) Madrid B) Rome"."""
        found = {letter: text.strip(" ,;()") for letter, text in _OPTION.findall(self.text)}
        return found if len(found) > 1 and "A" in found else {}

    @cached_property
    def words(self) -> Text:
        """Its words, without lettered options."""
        return read(_OPTION.sub(" ", self.text) if self.options else self.text)

    @cached_property
    def alternatives(self) -> list[tuple[str, ...]]:
        """The forms of the alternatives that it offers: "Jupiter or Mars", "apple, carrot or pear", or its options."""
        if self.options:
            return [forms_of(option) for option in self.options.values()]
        found = _CHOICE.search(self.text)
        if found is None:
            return []
        last = forms_of(found[3])
        before = [part for part in found[1].split(", ") if part and not re.match(r"(?i)(?:\w+ )?wh|how", part)]
        return [last, *(forms_of(part)[-len(last) :] for part in (*before, found[2]))]

    @cached_property
    def content(self) -> frozenset[str]:
        """The forms of its words that carry meaning, without those of its alternatives."""
        return frozenset(self.words.forms).difference(SMALL, *self.alternatives)

    def share(self, forms: Collection[str]) -> float:
        """The share of its content in a stretch of words, endings aside; 1 where it has none."""
        held = sum(any(akin(word, form) for form in forms) for word in self.content)
        return held / len(self.content) if self.content else 1.0


def akin(one: str, other: str) -> bool:
    """Equal, or two words that begin alike: "die", "died"; "Germany", "German"."""
    return one == other or (min(len(one), len(other)) >= _STEM and one[:_STEM] == other[:_STEM])


@lru_cache(maxsize=4096)
def forms_of(reference: str) -> tuple[str, ...]:
    """The forms of a reference without articles and prepositions."""
    forms = read(reference).forms
    return tuple(form for form in forms if form not in _PASSED_OVER) or forms


def mentions(question: Question, answer: Text, reference: str) -> list[Span]:
    """The stretches of the answer that have the reference; those that only repeat the question are left out."""
    name, wanted = read(reference).words, forms_of(reference)
    if not wanted:
        return []
    found = [span for span in _in_a_row(answer, wanted) if _is_same(question, answer, span, name[-1])]
    content = [form for form in wanted if form not in SMALL]
    if not found and len(content) > (1 if {*MONTHS} & {*wanted} else 2):
        found = list(_in_one_sentence(answer, content))
    if not found and len(name) > 1 and name[-1].is_capital and re.search(r"\b[Ww]h(?:o|om|ose)\b", question.text):
        found = list(_surname(answer, name))
    rest = [form for form in wanted if form not in question.content]
    if not found and 0 < len(rest) < len(wanted):  # the "Pacific", where the question is about an ocean
        found = [span for span in _in_a_row(answer, rest) if ends_a_phrase(answer, span[1])]
    initials = "".join(word.raw[0] for word in name if word.is_capital)
    if not found and len(initials) > 1:  # the "USA", "JFK"
        found = list(_in_a_row(answer, read(initials).forms))
    return [span for span in found if not _repeated(question, answer, span)]


def ends_a_phrase(answer: Text, end: int) -> bool:
    """The words before `end` are not the beginning of a longer name of something."""
    return end == len(answer.words) or bool(answer.words[end].gap.strip(" -")) or answer.forms[end] in SMALL


def _repeated(question: Question, answer: Text, span: Span) -> bool:
    """The question has these words with one of their neighbours, and offers no alternatives."""
    start, end = span
    theirs = " ".join(("", *question.words.forms, ""))
    around = (answer.forms[max(start - 1, 0) : end], answer.forms[start : end + 1])
    return not question.alternatives and any(
        " ".join(("", *part, "")) in theirs
        for part in around
        if len(part) > end - start and not ARTICLES & {part[0], part[-1]}
    )


def _in_a_row(answer: Text, wanted: Sequence[str]) -> Iterator[Span]:
    """Stretches with these words in a row, articles and prepositions aside."""
    places = [i for i, form in enumerate(answer.forms) if form not in _PASSED_OVER or form in wanted]
    for first in range(len(places) - len(wanted) + 1):
        row = places[first : first + len(wanted)]
        if all(same_word(answer.forms[i], word) for i, word in zip(row, wanted, strict=True)):
            yield row[0], row[-1] + 1


def _is_same(question: Question, answer: Text, span: Span, wanted: Word) -> bool:
    """Not another word of the same form: "us" for "US", "mouses" for "mice", "Persians" for "Persian"."""
    last = answer.words[span[1] - 1].raw
    if len(wanted.raw) <= 2 and wanted.is_capital:
        return last == wanted.raw and (last[1:].isupper() or ends_a_phrase(answer, span[1]))
    plural = last.lower().endswith("s") and not re.search(r"['’]", last) and not wanted.raw.lower().endswith("s")
    strict = wanted.is_capital or wanted.form in question.words.forms
    return not (plural and strict) and not (wanted.raw.isupper() and last.islower())


def _in_one_sentence(answer: Text, content: Sequence[str]) -> Iterator[Span]:
    """The stretch of one sentence with all of these words, in any order."""
    for first, last in answer.sentences:
        held = {i: word for i in range(first, last) for word in content if same_word(word, answer.forms[i])}
        if {*held.values()} >= {*content}:
            yield min(held), max(held) + 1


def _surname(answer: Text, name: Sequence[Word]) -> Iterator[Span]:
    """The last word of a person's name, where no other first name is before it."""
    own = {word.form for word in name if word.is_capital}
    for i, word in enumerate(answer.words):
        start = i
        while start > 0 and answer.words[start - 1].is_capital and answer.words[start].gap.strip() in ("", "."):
            start -= 1
        first = next((part.form for part in answer.words[start:i] if part.form not in _TITLES), name[0].form)
        initial = first[0] == name[0].form[0] and 1 in (len(first), len(name[0].form))
        if word.is_capital and word.form == name[-1].form and (first in own or initial):
            yield start, i + 1

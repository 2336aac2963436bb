"""The reference in the answer, asserted: a grader by words for models that answer in sentences.

Chat models put the answer into a sentence ("The capital of Mongolia is Ulaanbaatar, which ..."), where equal or shared
words miss it. An answer is right if it equals a reference, or if a sentence about the question asserts one; wrong if it
mentions none, or denies it; and without a verdict wherever this grader would have to guess. How a sentence takes the
words that it mentions, it tells by English phrases.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from semgrad_guard.calibration.binding import GRADER_VERSIONS
from semgrad_guard.engine.text_units import normalise, with_points
from semgrad_guard.files import table_of
from semgrad_guard.grading.grader import AnswerToGrade, WordGrader, abstains

_ENGLISH: dict[str, dict[str, str]] = table_of("semgrad_guard.grading", "contains.toml")


def _words_in(name: str) -> list[str]:
    """A list of words of the English phrases."""
    return _ENGLISH["words"][name].split()


_MONTHS = _words_in("months")
_SMALL, _UNITS, _REFERRING = (frozenset(_words_in(name)) for name in ("small", "units", "referring"))
_DOUBTS, _DOUBTS_AFTER, _RELATIONS = (frozenset(_words_in(name)) for name in ("doubts", "doubts_after", "relations"))
_COPULAS = frozenset(("is", "are", "was", "were"))
_YES, _NO = ("yes", "true"), ("no", "false")
_LETTERED = re.compile(r"(?:^|[\s(])([A-H])[).:]\s*(.+?)(?=[\s,;(]+[A-H][).:]|[.?]\s|[.?]?$)", re.DOTALL)
"""One of a question's options: "A) Madrid B) Rome"."""
_EITHER = re.compile(r"(\w+),? or (?:(?:an?|the|in|on|at) )*(\w+)")
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
_FEW_ITEMS, _FEW_WORDS, _NEAR = 2, 5, 7
"""A list of more items offers several answers; a sentence with so few further words is a phrase that answers; a mention
so near to the beginning is what a pronoun there is said to be."""
_MOST, _ALL = 0.5, 0.75
"""Shares of a question's words that a sentence repeats."""

_NEGATED, _DENIED_AFTER, _TAKEN_BACK, _OPENING, _DENIES, _TURNED = (
    re.compile(_ENGLISH["patterns"][name].replace("<not>", _ENGLISH["patterns"]["not"]).replace("\n", ""))
    for name in ("negated", "denied_after", "taken_back", "opening", "denies", "turned")
)


@dataclass(frozen=True)
class Contains(WordGrader):
    """Right is an answer of which one sentence asserts a reference; the rest of it is not checked.

    Words count under one form: case, diacritics, plurals, articles, numbers in words or digits. A reference that
    is denied is wrong. There is no verdict where it is doubted, compared, one of several offered, mentioned in
    part, next to another number, or in a sentence about something else. How often it errs: docs/evaluate.md. Nor is
    there one on a sentence of an answer that names no reference: it may tell another fact.
    """

    @property
    def name(self) -> str:
        return f"contains@{GRADER_VERSIONS['contains']}"

    def agrees(self, answer: AnswerToGrade) -> bool | None:
        """Whether the text, as an answer to the question, asserts one of the references; None: no verdict."""
        options = dict(_LETTERED.findall(answer.question))
        given = [reference for reference in answer.references if reference.strip()]
        given += [options[letter] for reference in given if (letter := reference.strip(" .()").upper()) in options]
        if normalise(answer.text) in {normalise(reference) for reference in given}:
            return True
        question = _Question.of(answer.question)
        sentences = read(answer.text)
        own = frozenset(form for reference in given for form in _forms(reference))
        verdicts = [_verdict(question, sentences, reference, own) for reference in given]
        if True in verdicts:
            return None if len(_ITEM.findall(answer.text)) > _FEW_ITEMS else True
        return None if None in verdicts or (answer.sentence and "absent" in verdicts) else False


Verdict = bool | Literal["absent"] | None


@dataclass(frozen=True)
class _Mention:
    """The words of a reference in an answer to this question: words[start:end] of the sentence at `place`."""

    question: _Question
    sentences: Sequence[Words]
    place: int
    start: int
    end: int

    @property
    def words(self) -> Words:
        """The sentence."""
        return self.sentences[self.place]

    @property
    def stance(self) -> Literal["asserted", "denied", "open"]:
        """How the sentence takes the words."""
        words, start = self.words, self.start
        clause = next((i for i in range(start, 0, -1) if re.search("[,:—]", words[i].gap)), 0)
        before, after = _plain_text(words[clause:start]), _plain_text(words[self.end :])
        if _NEGATED.search(before) or _DENIED_AFTER.match(after):
            return "denied"
        doubts = (_DOUBTS - self.question.forms) & {*_plain_text(words[:start]).split()}
        related = (_RELATIONS - self.question.forms) & {*before.split()[-5:]}
        extremes = {form for form in self.question.forms if form.endswith("est")}  # and "the smallest" is another one
        is_other = extremes and any(word.form.endswith("est") for word in words[:start] if word.form not in extremes)
        is_turned = _DOUBTS_AFTER & {*after.split()} or _TURNED.match(after)
        return "open" if doubts or related or is_other or is_turned else "asserted"

    def is_certain(self, own: frozenset[str]) -> bool:
        """The sentence answers with these words, and with no other; `own` are the words of all references."""
        before, after = self.sentences[: self.place], self.sentences[self.place + 1 :]
        is_undone = bool(after) and _TAKEN_BACK.match(_plain_text(after[0])) is not None
        refused = any(abstains(" ".join(word.raw for word in sentence)) for sentence in before)
        return self._is_about() and not self._has_rival(own) and not is_undone and not refused

    def _is_about(self) -> bool:
        """The sentence repeats some of the question, refers to it, or has few other words; after another one about it
        it continues with a pronoun, or repeats most.
        """
        others = _of(self.words[: self.start]) | _of(self.words[self.end :])
        share = self.question.share(others)
        if any(self.question.share(_of(sentence)) for sentence in self.sentences[: self.place]):
            return share >= _MOST or "answer" in others or (self.words[0].form in _REFERRING and self.start <= _NEAR)
        is_phrase = len(others) <= _FEW_WORDS and not others & _COPULAS
        return share > 0 or bool(others & _REFERRING) or is_phrase

    def _has_rival(self, own: frozenset[str]) -> bool:
        """Another answer stands next to it, or a longer name holds it: "Jane Austen's brother", "A spider"."""
        words, start, end = self.words, self.start, self.end
        last, behind = words[end - 1].raw, words[end : end + 1]
        is_letter = len(last) == 1 and last.isalpha()
        if last.endswith(("'s", "’s")) or (is_letter and behind and not behind[0].gap.strip()):
            return True
        others = _of(words[:start]) | _of(words[end:])
        if "or" in _of(words[max(start - 3, 0) : start]) | _of(words[end : end + 3]):
            return True
        if (others - own) & self.question.alternatives:
            return True
        if any(word.is_number for word in words[start:end]):
            return self._has_rival_number(own)
        names = [
            word for word in words[end : end + 2] if word.is_capital and word.form not in self.question.forms | own
        ]
        is_list = len(names) == 2 and all("," in name.gap for name in names)
        if behind and behind[0].is_capital:
            is_list |= "/" in behind[0].gap or "and" in _of(words[end + 1 : end + 3])
        return words[start].is_capital and (is_list or any(self._is_rival_name(i, own) for i in range(start)))

    def _is_rival_name(self, i: int, own: frozenset[str]) -> bool:
        """A word before the mention is a name by itself, with a comma or a small word behind it."""
        word, following = self.words[i], self.words[i + 1 : self.start + 1]
        is_other = word.is_capital and word.form not in _SMALL and not _akin(word.form, own)
        apart = following[0].form in _SMALL or any(one.gap.strip(" -") for one in following)
        return is_other and apart and not self.question.share({word.form})

    def _has_rival_number(self, own: frozenset[str]) -> bool:
        """Another number of the same kind stands in the sentence, or any in another one that answers the question."""
        counted = next(_counted(self.words, i) for i in range(self.start, self.end) if self.words[i].is_number)
        same = next((kind for kind in (own, self.question.content) if counted in kind), None)
        for place, sentence in enumerate(self.sentences):
            is_other = place != self.place
            if is_other and "answer" not in _of(sentence) and self.question.share(_of(sentence)) < _ALL:
                continue
            for i, word in enumerate(sentence):
                if word.is_number and word.form not in own | self.question.forms and "(" not in word.gap:
                    its = _counted(sentence, i)
                    if same is None or its in same or (is_other and not its):
                        return True
        return False


def _verdict(question: _Question, sentences: Sequence[Words], reference: str, own: frozenset[str]) -> Verdict:
    """Whether an answer asserts one of its references, whose words are `own`; None: no verdict."""
    bare = reference.strip(" .!'\"()").lower()
    if bare in _YES + _NO:
        affirmed = _affirms(question, sentences)
        return None if affirmed is None else affirmed == (bare in _YES)
    wanted = [form for form in _forms(reference) if form not in _SMALL] or _forms(reference)
    if not wanted:
        return None  # no word: "+"
    found = _found(question, sentences, lambda words: _mentions(words, wanted, reference))
    if not found and question.forms & {"who", "whom", "whose"}:
        found = _found(question, sentences, lambda words: _surname(words, reference))
    if not found:
        return None if _is_told_otherwise(question, sentences, reference, wanted) else "absent"
    stances = [mention.stance for mention in found]
    if {*stances} == {"denied"}:
        return False
    is_word = not wanted[0][:1].isdigit()
    only_repeats = (
        is_word
        and not question.alternatives
        and any([*_mentions(words, wanted, reference)] for words in question.sentences)
    )
    if only_repeats or "denied" in stances:
        return None
    asserted = (mention for mention, stance in zip(found, stances, strict=True) if stance == "asserted")
    return True if any(mention.is_certain(own) for mention in asserted) else None


def _found(question: _Question, sentences: Sequence[Words], spans: Callable[[Words], Iterable[Span]]) -> list[_Mention]:
    return [
        _Mention(question, sentences, place, *span) for place, words in enumerate(sentences) for span in spans(words)
    ]


def _is_told_otherwise(question: _Question, sentences: Sequence[Words], reference: str, wanted: Sequence[str]) -> bool:
    """A part of the reference is there, its initials, or a quantity in another unit."""
    initials = "".join(part[0] for part in reference.split() if part[:1].isupper())
    units = _UNITS & {*wanted}
    for words in sentences:
        shortened = len(initials) > 1 and any(word.raw.startswith(initials) for word in words)
        others = {_counted(words, i) for i, word in enumerate(words) if word.is_number} & _UNITS - units
        if shortened or (units and others) or (_of(words) & {*wanted}) - question.forms:
            return True
    return False


def _counted(words: Words, number: int) -> str:
    """The form of the word behind a number: its unit, or what it counts; "" at the end."""
    return words[number + 1].form if number + 1 < len(words) else ""


def _affirms(question: _Question, sentences: Sequence[Words]) -> bool | None:
    """Whether an answer affirms a question of yes or no, by its first word and a sentence that repeats the question."""
    answers: set[bool] = set()
    for number, words in enumerate(sentences[:2]):
        sentence = _plain_text(words)
        if number == 0 and (opening := _OPENING.match(sentence)):
            answers.add(bool(opening[1]))
        if all(_akin(form, _of(words)) for form in question.content):
            main, *rest = re.split(r"\b(?:but|however|although)\b", sentence)
            if any(re.search(rf"\bnot (?:an? |the )?(?:{'|'.join(question.content)})\b", part) for part in rest):
                return None
            answers.add(not _DENIES.search(main))
    return answers.pop() if len(answers) == 1 else None


_ONES, _TENS = _words_in("ones"), _words_in("tens")
_NUMBERS = {word: n for n, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, start=2)}
_SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_LETTERS = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ð": "d", "æ": "ae", "œ": "oe", "ı": "i", "’": "'"})
_VARIANTS = _ENGLISH["variants"] | {month[:3]: month for month in _MONTHS}
_ONE_SPELLING = (
    (re.compile(r"(?<=\d),(?=\d{3}\b)"), ""),
    (re.compile(r"([$€£¥])(\d+(?:\.\d+)?)"), r"\2 \1"),
    (re.compile(r"(?<=\d)(?=(?:[kc]?m|k?g|min|h|ft|[CF])\b)"), " "),
)
_SUM = re.compile(rf"(?i)\b({'|'.join(_TENS)})[- ]({'|'.join(_ONES[1:10])})\b")
_SCALED = re.compile(rf"(?i)\b(\d+(?:\.\d+)?|{'|'.join(_NUMBERS)})[ -]({'|'.join(_SCALES)})\b")
_WORD = re.compile(r"-?\d+(?:\.\d+)?(?:st|nd|rd|th)?|(?:[A-Z]\.){2,}|[^\W_]+(?:['’][^\W_]+)*|[%$€£¥°?]")
_END = re.compile(r"(?<![A-Z]\.)(?<!\b[DM]r\.)(?<!Mrs\.)(?<!\bSt\.)(?<=[.!?])[\"')*]*\s+|\n+|;\s")


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
        """It is a number in digits."""
        return self.form.lstrip("-")[:1].isdigit()


Words = tuple[Word, ...]
Span = tuple[int, int]


@lru_cache(maxsize=4096)
def read(text: str) -> tuple[Words, ...]:
    """The sentences of a text, as words, numbers in digits."""
    text = with_points(text)
    for pattern, spelling in _ONE_SPELLING:
        text = pattern.sub(spelling, text)
    text = _SUM.sub(lambda of: str(_NUMBERS[of[1].lower()] + _NUMBERS[of[2].lower()]), text)
    text = _SCALED.sub(lambda of: f"{float(_NUMBERS.get(of[1].lower(), of[1])) * _SCALES[of[2].lower()]:.0f}", text)
    return tuple(words for sentence in _END.split(text) if (words := tuple(_words(sentence))))


def _words(sentence: str) -> Iterator[Word]:
    at = 0
    for found in _WORD.finditer(sentence):
        yield Word(found.group(), _form(found.group()), sentence[at : found.start()])
        at = found.end()


def _form(raw: str) -> str:
    """One form for the spellings of a word: no case, diacritics and plural; numbers in digits."""
    word = _plain(raw).removesuffix("'s").replace(".", "" if not raw[-1].isdigit() else ".")
    if word.lstrip("-")[:1].isdigit():
        bare = re.sub(r"(?<=\d)(?:st|nd|rd|th)$", "", word)
        return bare.rstrip("0").rstrip(".") if "." in bare else bare.lstrip("0") or "0"
    if word in _NUMBERS:
        return str(_NUMBERS[word])
    one = re.sub(r"(?<=..)ies$", "y", word) if len(word) > 4 else word
    one = re.sub(r"(?<=ss|sh|ch|.x|.z)es$|(?<=..[^sui])s$", "", one)
    return _VARIANTS.get(word) or _VARIANTS.get(one) or one


def _plain(word: str) -> str:
    """Lower case without diacritics: "Skłodowska" is "sklodowska"."""
    decomposed = unicodedata.normalize("NFKD", word.casefold().translate(_LETTERS))
    return "".join(character for character in decomposed if not unicodedata.combining(character))


def _plain_text(words: Words) -> str:
    return " ".join(_plain(word.raw).replace("'", "") for word in words)


def _forms(text: str) -> list[str]:
    return [word.form for words in read(text) for word in words]


@dataclass(frozen=True)
class _Question:
    """The forms of a question's words, of those that carry meaning, and of the alternatives that it offers."""

    sentences: tuple[Words, ...]
    forms: frozenset[str]
    content: frozenset[str]
    alternatives: frozenset[str]

    @classmethod
    def of(cls, text: str) -> _Question:
        options = " ".join(option for _, option in _LETTERED.findall(text))
        bare = _LETTERED.sub(" ", text) if options else text
        forms = frozenset(_forms(bare))
        if either := None if options else _EITHER.search(text):
            options = " ".join(either.groups())
        return cls(read(bare), forms, forms - _SMALL, frozenset(_forms(options)) - _SMALL)

    def share(self, forms: Iterable[str]) -> float:
        """The share of its words with a meaning that are among these, endings aside; 1 without any, 0 of no text."""
        held = [*forms]
        return (
            sum(_akin(word, held) for word in self.content) / len(self.content)
            if self.content
            else float(bool(self.forms))
        )


def _of(words: Words) -> set[str]:
    """The forms of a sentence."""
    return {word.form for word in words}


def _akin(word: str, forms: Collection[str]) -> bool:
    """A word, or another that begins like it: "die", "died"; "Germany", "German"."""
    return word in forms or (len(word) >= 4 and any(form[:4] == word[:4] for form in forms))


def _mentions(words: Words, wanted: Sequence[str], reference: str) -> Iterator[Span]:
    """The stretches of a sentence that have these words in a row; of a long reference or a date, in any order."""
    places = [i for i, word in enumerate(words) if word.form not in _SMALL or word.form in wanted]
    found = False
    for first in range(len(places) - len(wanted) + 1):
        row = places[first : first + len(wanted)]
        if [words[i].form for i in row] == [*wanted] and _is_same(words[row[-1]].raw, reference):
            yield row[0], row[-1] + 1
            found = True
    held = [i for i in places if words[i].form in wanted]
    if not found and (len(wanted) > 2 or {*_MONTHS} & {*wanted}) and {words[i].form for i in held} >= {*wanted}:
        yield held[0], held[-1] + 1


def _is_same(raw: str, reference: str) -> bool:
    """Not another word of the same form: "us" for "US", "Persians" for "Persian"."""
    last = (reference.split() or [""])[-1].strip(".,!?'\"()")
    if len(last) <= 2 and last[:1].isupper():
        return raw == last
    return not (last.isupper() and raw.islower()) and not (
        last[:1].isupper() and raw.endswith("s") and not last.endswith("s") and "'" not in raw
    )


def _surname(words: Words, name: str) -> Iterator[Span]:
    """The last word of a person's name, where no first name is before it."""
    last = name.split()[-1]
    for i, word in enumerate(words):
        if word.raw == last and last.istitle() and not (i and words[i - 1].is_capital):
            yield i, i + 1

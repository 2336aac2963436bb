"""The reference in the answer, asserted: a grader by words for models that answer in sentences.

Chat models put the answer into a sentence ("The capital of Mongolia is Ulaanbaatar, which ..."), where equal or shared
words miss it. An answer is right if one sentence about the question asserts a reference, wrong if it has none or denies
it, and without a verdict where this grader would have to guess. How a sentence takes the words that it mentions, it
tells by English phrases. Quantities are numbers with their units, which pint compares.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from semgrad_guard.calibration.binding import GRADER_VERSIONS
from semgrad_guard.engine.words import normalise
from semgrad_guard.grading.abstention import abstains
from semgrad_guard.grading.grader import AnswerToGrade, WordGrader
from semgrad_guard.grading.mentions import (
    ARTICLES,
    MONTHS,
    SMALL,
    Question,
    Span,
    Text,
    Word,
    akin,
    ends_a_phrase,
    forms_of,
    mentions,
    read,
    words_of,
)

_YES, _NO = ("yes", "true"), ("no", "false")
_COPULAS = words_of("is are was were has had")
_REFERRING = words_of("it this he she they there answer these those his her their its")
_PREFERRING = words_of("than not but though although followed")
_ASIDES = words_of("unlike followed together alongside which who and as with since when")
_ITEM = re.compile(r"(?:^|\n|:)\s*[-*•] +\W*$")
_COVERED, _NEAR, _SHORT, _ITEMS = 0.25, 3, 5, 3


@dataclass(frozen=True)
class Contains(WordGrader):
    """Right is an answer of which one sentence asserts a reference; the rest of it is not checked.

    Words count under one form: case, diacritics, plurals, articles, numbers in words or digits, units. A reference that
    is denied or only repeated from the question is wrong. There is no verdict where it is doubted, compared, one of
    several offered, an aside, spelled in another way, or in a sentence about something else. How often it errs:
    docs/evaluate.md. Nor is there one on a sentence of an answer that names no reference: it may tell another fact.
    """

    @property
    def name(self) -> str:
        return f"contains@{GRADER_VERSIONS['contains']}"

    def agrees(self, answer: AnswerToGrade) -> bool | None:
        """Whether the text, as an answer to the question, asserts one of the references; None: no verdict."""
        question, text = Question(answer.question), read(answer.text)
        given = [reference for reference in answer.references if reference.strip()]
        letters = [reference.strip(" .()").upper() for reference in given]
        given += [question.options[letter] for letter in letters if letter in question.options]
        if not answer.text.strip():
            return False
        if normalise(answer.text) in {normalise(reference) for reference in given}:
            return True
        verdicts = [_asserts(question, text, reference, given) for reference in given]
        if answer.sentence and not any(mentions(question, text, reference) for reference in given):
            return True if True in verdicts else None
        return True if True in verdicts else None if None in verdicts else False


def _asserts(question: Question, answer: Text, reference: str, references: Sequence[str]) -> bool | None:
    bare = reference.strip(" .!'\"()").lower()
    if bare in _YES + _NO:
        affirmed = affirms(question, answer)
        return None if affirmed is None else affirmed == (bare in _YES)
    if (wanted := whole_quantity(reference)) is not None:
        return gives_quantity(question, answer, wanted, references)
    spans = mentions(question, answer, reference)
    stances = [stance(answer, *span) for span in spans]
    if {*stances} <= {"denied", "apart"}:
        return False
    asserted = [span for span, taken in zip(spans, stances, strict=True) if taken == "asserted"]
    certain = [span for span in asserted if _is_about(question, answer, span)]
    if not certain or "denied" in stances or _is_one_of_several(question, answer, certain[0], references):
        return None
    return None if _comes_after_another(question, answer, certain[0], references) else True


def _is_about(question: Question, answer: Text, span: Span) -> bool:
    """The sentence is about the question: it repeats some of it, refers to it, or has few other words."""
    first, last = answer.sentence(span[0])
    others = [*answer.forms[first : span[0]], *answer.forms[span[1] : last]]
    near = {*answer.forms[first : first + _NEAR], *answer.forms[max(span[0] - _NEAR, first) : span[0]]}
    refers = near & _REFERRING or "it" in answer.forms[span[1] : last]
    is_phrase = not {*others} - SMALL or (len(others) <= _SHORT and not {*others} & _COPULAS)
    return bool(refers or is_phrase or question.share(others) >= _COVERED)


def _is_one_of_several(question: Question, answer: Text, span: Span, references: Sequence[str]) -> bool:
    """One of several that the answer or the question offers: "Paris or Lyon", one of three items of a list."""
    (start, end), (first, last) = span, answer.sentence(span[0])
    own = {form for reference in references for form in forms_of(reference)}
    rivals = {form for forms in question.alternatives if not own & {*forms} for form in forms} - SMALL
    found = [i for i in range(first, last) if answer.forms[i] in rivals]
    if found:
        return found[0] < start or not _PREFERRING & {*answer.forms[end : found[0]]}
    sides = (answer.forms[max(start - 3, 0) : start][::-1], answer.forms[end : end + 3])
    around = [[form for form in side if form not in ARTICLES] for side in sides]
    items = [i for i, word in enumerate(answer.words) if _ITEM.search(word.gap)]
    in_item = len(items) >= _ITEMS and start in items
    return in_item or any(words[:1] == ["or"] and not own & {*words[1:2]} for words in around)


def _comes_after_another(question: Question, answer: Text, span: Span, references: Sequence[str]) -> bool:
    """The sentence answers with another before it ("Sydney is, with Canberra next"), or it owns another."""
    if answer.words[span[1] - 1].raw.endswith(("'s", "’s")) and not ends_a_phrase(answer, span[1]):
        return True  # "Jane Austen's brother"
    first = answer.sentence(span[0])[0]
    start = clause_start(answer, first, span[0])
    own = {form for reference in references for form in forms_of(reference)} | question.content | SMALL
    others = any(not any(akin(form, word) for word in own) for form in answer.forms[first:start])
    aside = answer.forms[start] in _ASIDES and question.share(answer.forms[start : span[0]]) == 0
    return (others and aside) or any(
        word.is_capital
        and not any(akin(word.form, form) for form in own)
        and ends_a_phrase(answer, i + 1)
        and stance(answer, i, i + 1) == "asserted"
        for i, word in enumerate(answer.words[first + 1 : span[0] - 1], start=first + 1)
        if answer.words[span[0]].is_capital
    )


Stance = Literal["asserted", "denied", "apart", "open"]

_NOT = (
    r"(?:not|never|neither|nor|no|isnt|arent|wasnt|werent|aint|cannot|cant|couldnt|doesnt|dont|didnt|wont|wouldnt|"
    r"hasnt|havent|hardly|without|nobody|none|anything but|unable)"
)
_TURNS = """but however though although yet rather instead actually because since so and while whereas which who that is
    are was were"""
_OPINION = "(?:think|believe|say|call|sure|certain|mean)"
_NEGATED = re.compile(
    rf"\b{_NOT}\b(?! (?:only|just|merely|doubt|other|to mention)\b)"
    rf"(?: {_OPINION}(?: (?!but|however|because)\w+)*|(?: (?!(?:{'|'.join(_TURNS.split())})\b)\w+){{0,5}})$"
    r"|\b(?:rather than|instead of)$"
)
"""A negation before the mention, and between them no word that turns to something else."""
_UNTRUE = r"(?:wrong|incorrect|false|never|untrue|a myth|a mistake|a misconception)"
_DENIED_AFTER = re.compile(
    rf"(?:\w+ ){{0,4}}?(?:is|are|was|were|be|has|have|had) (?:\w+ )?(?:not(?! (?:only|just|merely)\b)|{_UNTRUE})\b"
    rf"|(?:isnt|arent|wasnt|werent|cannot be|cant be|{_UNTRUE})\b"
)
_DENIED_NEXT = re.compile(
    rf"(?:(?:that|this|it) (?:is|was)|thats|its) (?:not (?:so|true|right)|{_UNTRUE})\b|(?:wait|correction)\b"
)
_DOUBTING = words_of(
    """if whether maybe perhaps possibly either guess unless until before could may might some many others misconception
    myth mistakenly wrongly incorrectly confused mistaken doubt said used longer formerly previously least false mistake
    contrary after since most think believe say call"""
)
"""A doubt, an opinion of others or another time: no assertion of the words after it."""
_CONCEDING = words_of("while although though whereas even unlike")
_RELATING = words_of(
    """related similar compared close closer next adjacent ahead north south east west away different distinct opposed
    bordered surrounded influenced followed preceded replaced near outside above below than borders bordering against
    behind beat defeated inspired replacing versus vs except"""
)
"""A comparison or a relation, which tells nothing of the words after it."""
_DOUBTED_AFTER = words_of("mistaken mistakenly wrongly confused thought believed considered initially")
_OPENING = re.compile(
    r"(?:the (?:\w+ )?answer (?:\w+ )*?is )?(?:(yes|yeah|correct|true|certainly|indeed|of course)|no|incorrect|false)"
    r"\b(?! not| doubt)"
)
_DENIES = re.compile(
    rf"\bno longer\b|\b(?!nor?\b|none\b)(?:{_NOT}|false|incorrect|myth|misconception)\b(?! (?:only|just)\b)"
)
_PRONOUNS = words_of("it they he she that this")
_FAR, _READ, _ABOUT, _AGAIN, _BY_PRONOUN = 5, 4, 0.6, 0.75, 0.3


def stance(text: Text, start: int, end: int) -> Stance:
    """How the sentence of these words takes them; the next sentence can deny them, too."""
    first, last = text.sentence(start)
    begin = clause_start(text, first, start)
    stop = next((i for i in range(end, last) if re.search(r"[,:()—]", text.words[i].gap)), last)
    clause = re.sub(r"\bno other (?:\w+ )?than\b|\b(?:i|we) (?:think|believe)\b", "", text.plain(begin, start)).strip()
    before, after = clause.split(), text.plain(end, last)
    if (
        _NEGATED.search(clause)
        or _DENIED_AFTER.match(text.plain(end, stop))
        or _DENIED_NEXT.match(text.plain(last, last + _FAR))
    ):
        return "denied"
    if _RELATING & {*re.split(r"\b(?:is|are|was|were)\b", clause)[-1].split()[-_FAR:]}:
        return "apart"
    doubted = _DOUBTING & {*before[-_FAR:]} or _CONCEDING & {*before[:1]} or _DOUBTED_AFTER & {*after.split()}
    abstained = any(abstains(text.written(*sentence)) for sentence in text.sentences if sentence[1] <= start)
    return "open" if doubted or abstained or "?" in text.gap_after(last - 1) else "asserted"


def clause_start(text: Text, first: int, start: int) -> int:
    """Where the clause of a word begins: behind a comma, a colon, a dash, or a word that turns."""
    for i in range(start, first, -1):
        if re.search(r"[,:—]| - ", text.words[i].gap):
            return i
        if i < start and text.words[i].form in ("but", "however", "yet"):
            return i + 1
    return first


def affirms(question: Question, answer: Text) -> bool | None:
    """Whether the answer affirms a question of yes or no; None: its first sentences about it do neither, or both."""
    names = {word.form for word in question.words.words[1:] if word.is_capital}
    whole = question.words.plain(0, len(question.words.words))
    found: list[bool] = []
    for first, last in answer.sentences[:_READ]:
        sentence, forms = answer.plain(first, last), answer.forms[first:last]
        if opening := _OPENING.match(sentence):
            found.append(bool(opening[1]))
        if question.share(forms) + _BY_PRONOUN * bool({*forms[:1]} & _PRONOUNS) < (_AGAIN if found else _ABOUT):
            continue
        main, *rest = re.split(r"\b(?:(?<!anything )but|however|although)\b", sentence)
        taken_back = any(re.search(rf"\bnot (?:an? |the )?(?:{'|'.join(question.content)})\b", part) for part in rest)
        if taken_back or not names <= {*forms}:
            return None
        found.append(bool(_DENIES.search(main)) == bool(_DENIES.search(whole)))
    return found[0] if len({*found[:2]}) == 1 else None


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

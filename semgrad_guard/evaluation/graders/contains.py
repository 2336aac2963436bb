"""The reference found in the answer, asserted: a grader by words for models that answer in sentences.

Chat models put the answer into a sentence ("The capital of Mongolia is Ulaanbaatar, which ..."), where equal words and
shared words miss it. This grader looks for a reference among the answer's words and asks whether the answer asserts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from semgrad_guard.engine.texts.words import normalise
from semgrad_guard.evaluation.graders.asked import Asked, ask
from semgrad_guard.evaluation.graders.assertion import asserted, denied
from semgrad_guard.evaluation.graders.base import AnswerToGrade, WordGrader
from semgrad_guard.evaluation.graders.quantity import says_quantity, year_spans
from semgrad_guard.evaluation.graders.reading import ARTICLES, Reading, Word, read
from semgrad_guard.evaluation.graders.rivals import claims_another, offered_with_others, other_of_its_kind, said_aside
from semgrad_guard.evaluation.graders.short_answers import says_letter, says_symbol, says_yes
from semgrad_guard.evaluation.graders.word_forms import (
    MONTHS,
    UNITS,
    form,
    is_number,
    same_word,
    transliterates,
    words_of,
)

_LEADING = words_of(
    """in on at for by to from with of because so every up until about around under over out our my his her its
    their your"""
)
_FILLERS = words_of("of in on at to and or is are was were that this it its his her their with from by for as be")
_TITLES = words_of("mr mrs miss ms dr sir lady lord president king queen saint then so and by but since because")
_RELATIONS = words_of("""brother sister wife husband father mother son daughter friend rival student teacher successor
    predecessor contemporary colleague assistant""")
_PREFERRING = words_of("than not but whereas while though although followed")
_JOINED_FROM = 8
_LONG = 6
_MENTIONS = 20
_LONG_RECALL = 0.75
_SHORT = 5
_INITIALS = 3
_LIKE_WORDS = words_of("us it who in is or no as at me he so go am to if")


@dataclass(frozen=True)
class Contains(WordGrader):
    """Right is an answer that asserts one of the references, in whatever sentence.

    Words count under one form: case, diacritics, plurals, articles, numbers in words or digits, usual units, months.
    A reference that is denied, doubted, only compared with, one of several offered, or only repeated from the question
    is none; nor is one to which the answer adds another claim of its kind. Numbers, letters, yes and no are looked for
    as what they are: a "4" in a year or an "a" in a sentence is no answer. How often it errs: docs/evaluate.md.
    """

    @property
    def name(self) -> str:
        return "contains"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text, as an answer to the question, asserts one of the references."""
        return says(answer.question, answer.text, answer.references)


def says(question: str, text: str, references: Sequence[str]) -> bool:
    """Whether the text, as an answer to the question, asserts one of the references."""
    given = [reference for reference in references if reference.strip()]
    if not text.strip():
        return False
    if normalise(text) in {normalise(reference) for reference in given}:
        return True
    asked, answer = ask(question), read(text)
    return any(_says(asked, answer, reference, given) for reference in given)


def _says(asked: Asked, answer: Reading, reference: str, references: Sequence[str]) -> bool:
    wanted = _reference_words(reference)
    if (verdict := says_yes(asked, answer, reference)) is not None:
        return verdict
    if (letter := says_letter(asked, answer, reference, says)) is not None:
        return letter
    if (symbol := says_symbol(answer, reference)) is not None:
        return symbol
    if wanted and _is_quantity(wanted):
        return says_quantity(asked, answer, wanted, _dates(references))
    return _says_phrase(asked, answer, reference, references)


def _says_phrase(asked: Asked, answer: Reading, reference: str, references: Sequence[str]) -> bool:
    found = list(islice(_mentions(asked, answer, reference), _MENTIONS))
    if asked.choice_against(_reference_words(reference)):
        return _chosen(asked, answer, reference, found)
    found = [span for span in found if not asked.repeated(answer, span)]
    if not found or any(denied(answer, *span) for span in found):
        return False
    known = tuple(_reference_words(each) for each in references)
    said = [
        span
        for span in found
        if asserted(answer, *span)
        and not offered_with_others(asked, answer, span, known)
        and not said_aside(asked, answer, span)
    ]
    return (
        bool(said)
        and not other_of_its_kind(answer, said[0], _reference_words(reference))
        and not claims_another(asked, answer, known, found)
    )


def _chosen(asked: Asked, answer: Reading, reference: str, found: Sequence[tuple[int, int]]) -> bool:
    """Of the alternatives in the question, the answer takes this one: alone, or before "than", "not" or the like."""
    others = [span for other in asked.choice_against(_reference_words(reference)) for span in _spans(answer, other)]
    for span in found:
        number = answer.sentence_of[span[0]]
        rivals = [other for other in others if answer.sentence_of[other[0]] <= number]
        if not asserted(answer, *span):
            continue
        if not rivals:
            first, last = answer.sentence(span[0])
            about = asked.beside_the_choice & set(answer.forms[first:last])
            if about or last - first <= _SHORT:
                return True
            continue
        between = answer.forms[span[1] : rivals[0][0]] if rivals[0][0] >= span[1] else ()
        return bool(_PREFERRING.intersection(between)) and "both" not in answer.forms
    return False


def _mentions(asked: Asked, answer: Reading, reference: str) -> Iterator[tuple[int, int]]:
    """Where the answer has the reference's words: in a row, in any order if that says the same, or the surname."""
    wanted = _reference_words(reference)
    if not wanted:
        return
    if asked.holds_variant(reference, wanted):
        yield from (
            s for s in _spans(answer, wanted) if answer.plain(*s).split()[-1] in read(reference).plain(0, 99).split()
        )
        return
    spans = [span for span in _spans(answer, wanted) if _as_answer(answer, span, reference)]
    spans = spans or [span for span in _joined(answer, wanted) if _as_answer(answer, span, reference)]
    spans = spans or list(_numbered(answer, wanted))
    content = [word for word in wanted if word not in _FILLERS]
    if not spans and len(content) > 1 and (len(content) > 2 or set(wanted) & {"and", "or"} or set(wanted) & MONTHS):
        spans = list(_together(answer, content))
    if not spans and asked.is_about_a_person:
        spans = list(_surname(answer, reference))
    spans = (
        spans or list(_without_its_kind(asked, answer, reference)) or list(_transliterated(asked, answer, reference))
    )
    yield from spans or list(_by_initials(asked, answer, reference)) or _from_year_to_year(answer, reference)


def _from_year_to_year(answer: Reading, reference: str) -> Iterator[tuple[int, int]]:
    """The years of a reference that is nothing else than from one to another."""
    wanted = read(reference)
    years = [of for (start, end), of in year_spans(wanted) if end == len(wanted.words) and start <= 1]
    yield from (span for span, of in year_spans(answer) if of in years)


def _spans(answer: Reading, wanted: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Stretches with these words in a row, articles aside."""
    for start, first in enumerate(answer.forms):
        if not same_word(first, wanted[0]):
            continue
        at, matched = start, 0
        while at < len(answer.forms) and matched < len(wanted):
            if same_word(answer.forms[at], wanted[matched]):
                matched += 1
            elif answer.forms[at] not in ARTICLES:
                break
            at += 1
        if matched == len(wanted):
            yield start, at


def _joined(answer: Reading, wanted: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Stretches with these letters, whatever the gaps: "papillomavirus", "papilloma virus"."""
    letters = "".join(wanted)
    if len(letters) < _JOINED_FROM:
        return
    for start in range(len(answer.forms)):
        for end in range(start + 1, min(start + len(wanted) + 1, len(answer.forms)) + 1):
            if "".join(answer.forms[start:end]) == letters:
                yield start, end


def _numbered(answer: Reading, wanted: Sequence[str]) -> Iterator[tuple[int, int]]:
    """A name with its number said the other way: "World War 2" for "World War II"."""
    turned = [
        f"{word}th" if word.isdigit() else word.removesuffix("th") if word[0].isdigit() else word for word in wanted
    ]
    if len(wanted) > 1 and turned != list(wanted):
        yield from _spans(answer, turned)


def _as_answer(answer: Reading, span: tuple[int, int], reference: str) -> bool:
    """Not another word in the same form: the plural of a name (Persians), or a genitive (Bach's son)."""
    last, wanted = answer.words[span[1] - 1], read(reference).words[-1]
    if wanted.raw.isupper() and last.raw.islower() and last.form in _LIKE_WORDS:  # the "US" is not "us"
        return False
    if last.raw.lower().endswith(("'s", "’s")) and _RELATIONS & set(answer.forms[span[1] : span[1] + 2]):
        return False
    if wanted.is_capital:
        plural = last.raw.lower().endswith("s") and not wanted.raw.lower().endswith("s")
        return not (plural and "'" not in last.raw and "’" not in last.raw) or last.form != wanted.form
    return not last.raw.lower().endswith(("'s", "’s")) or wanted.raw.lower().endswith(("'s", "’s"))


def _together(answer: Reading, content: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Stretches of one sentence with all of these words, in any order; of many words, with most of them."""
    needed = len(content) if len(content) < _LONG else round(_LONG_RECALL * len(content))
    room = 3 * len(content) + 2
    for start in range(len(answer.forms)):
        if not any(same_word(answer.forms[start], word) for word in content):
            continue
        last = min(answer.sentence(start)[1], start + room)
        held = [i for i in range(start, last) if any(same_word(answer.forms[i], word) for word in content)]
        if len({word for i in held for word in content if same_word(answer.forms[i], word)}) >= needed:
            yield start, held[-1] + 1
            return


def _surname(answer: Reading, reference: str) -> Iterator[tuple[int, int]]:
    """The last word of a person's name, where no other first name stands before it."""
    name = read(reference).words
    if len(name) < 2 or not all(word.is_capital for word in (name[0], name[-1])):
        return
    own = {word.form for word in name if word.is_capital}
    for index, word in enumerate(answer.words):
        same = word.form == name[-1].form or transliterates(word.form, name[-1].form)
        if word.is_capital and same and _as_answer(answer, (index, index + 1), reference):
            given = _given_names(answer, index)
            if (
                not given
                or _is_short_for(given[0], name[0])
                or own & {each.form for each in given if len(each.form) > 1}
            ):
                yield index, index + 1


def _given_names(answer: Reading, surname: int) -> list[Word]:
    """The first names and initials before a surname, titles aside."""
    first = surname
    while first > 0 and answer.words[first - 1].is_capital:
        gap = answer.words[first].gap.strip()
        if gap and not (gap == "." and _is_initial(answer.words[first - 1])):
            break
        first -= 1
    return [word for word in answer.words[first:surname] if word.form not in _TITLES]


def _is_short_for(one: Word, other: Word) -> bool:
    """One of the two is an initial of the other: "J. K." and "Joanne"."""
    return one.form[0] == other.form[0] and (_is_initial(one) or _is_initial(other))


def _is_initial(word: Word) -> bool:
    return len(word.raw) <= _INITIALS and word.raw.isupper()


def _without_its_kind(asked: Asked, answer: Reading, reference: str) -> Iterator[tuple[int, int]]:
    """A reference without what the question asks for: the "Pacific", where it asks which ocean.

    Words that are no name must end there: "thermal insulation" is no thermal energy.
    """
    name = [word for word in read(reference).words if word.form not in ARTICLES]
    rest = [word.form for word in name if word.form not in asked.content]
    if rest and len(rest) < len(name):
        is_name = all(word.is_capital for word in name)
        for start, end in _spans(answer, rest):
            if answer.words[start].is_capital if is_name else _ends_a_phrase(answer, end):
                yield start, end


def _ends_a_phrase(answer: Reading, end: int) -> bool:
    """Whether what stands before `end` is not the beginning of a longer name of something."""
    return end == len(answer.words) or bool(answer.words[end].gap.strip()) or answer.forms[end] in _FILLERS


def _by_initials(asked: Asked, answer: Reading, reference: str) -> Iterator[tuple[int, int]]:
    """ "USA" for the "United States", "JFK" for "John F. Kennedy", and the other way round.

    What the question says itself ("What does NATO stand for?") is no answer.
    """
    name = read(reference).words
    wanted = name[0].form if len(name) == 1 and name[0].raw.isupper() else _initials(name)
    for start, word in enumerate(answer.words) if wanted else ():
        for end in range(start + 1, start + 2 if len(name) > 1 else min(start + _LONG, len(answer.words)) + 1):
            part = answer.words[start:end]
            said = word.form if end == start + 1 and word.raw.isupper() else _initials(part)
            if said == wanted and not {each.form for each in part if each.is_capital} & {*asked.reading.forms}:
                yield start, end


def _initials(words: Sequence[Word]) -> str | None:
    """The form of the first letters of two or more words with capitals; between them may stand "of the"."""
    capitals = [word for word in words if word.is_capital]
    small = [word for word in words if not word.is_capital and word.form not in _FILLERS | ARTICLES]
    if len(capitals) <= 1 or small or not words[-1].is_capital:
        return None
    return form("".join(word.raw[0] for word in capitals))


def _transliterated(asked: Asked, answer: Reading, reference: str) -> Iterator[tuple[int, int]]:
    """A name of one word in another spelling: "Ulan Bator" for "Ulaanbaatar". (Brazil, asked about, is no Brasilia.)"""
    name = [word for word in read(reference).words if word.form not in ARTICLES]
    if len(name) != 1 or not name[0].is_capital:
        return
    for start, word in enumerate(answer.words):
        for end in range(start + 1, min(start + 3, len(answer.words)) + 1) if word.is_capital else ():
            joined = "".join(answer.forms[start:end])
            if (
                answer.words[end - 1].is_capital
                and joined not in asked.content
                and transliterates(joined, name[0].form)
            ):
                yield start, end


@lru_cache(maxsize=4096)
def _reference_words(reference: str) -> tuple[str, ...]:
    """The forms of a reference without articles, and without a preposition before the rest."""
    forms = [word for word in read(reference).forms if word not in ARTICLES]
    while len(forms) > 1 and forms[0] in _LEADING:
        forms = forms[1:]
    return tuple(forms) or read(reference).forms


def _is_quantity(wanted: Sequence[str]) -> bool:
    """A number alone, or with a unit behind it."""
    return is_number(wanted[0]) and all(word in UNITS or word in ("square", "cubic", "per") for word in wanted[1:])


def _dates(references: Sequence[str]) -> list[tuple[str, ...]]:
    return [words for each in references if set(words := _reference_words(each)) & MONTHS]

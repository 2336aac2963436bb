"""How a sentence takes the words that it mentions: it asserts, denies or doubts them. By English phrases."""

from __future__ import annotations

import re
from typing import Literal

from semgrad_guard.evaluation.graders.abstention import abstains
from semgrad_guard.evaluation.graders.question import Question
from semgrad_guard.evaluation.graders.reading import Text, words_of

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

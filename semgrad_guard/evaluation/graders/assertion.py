"""How a sentence takes the words that it mentions: it asserts, denies, compares or doubts them. By English phrases."""

from __future__ import annotations

import re
from typing import Literal

from semgrad_guard.evaluation.graders.question import Question
from semgrad_guard.evaluation.graders.reading import Text, words_of

Stance = Literal["asserted", "denied", "apart", "open"]


def _any(phrases: str) -> str:
    """A group of alternatives from phrases with commas between; each can hold further groups."""
    return "(?:" + "|".join(phrase.strip() for phrase in phrases.split(",")) + ")"


NOT = _any("""not, never, neither, nor, no, isnt, arent, wasnt, werent, aint, cannot, cant, couldnt, doesnt, dont,
    didnt, wont, wouldnt, hasnt, havent, hardly, without, nobody, none, anything but, unable""")
_BE = _any("is, are, was, were, be, has, have, had, seems, sounds")
_UNTRUE = _any("wrong, incorrect, false, never, untrue, a myth, a mistake, a misconception")
_TURN = _any("""but, however, though, although, yet, rather, instead, actually, because, since, so, and, while, whereas,
    which, who, that, is, are, was, were""")
_CONCEDING = ("while", "although", "though", "whereas")
_OPINION = _any("think, believe, say, call, sure, certain, mean")
_NEGATED = re.compile(
    rf"\b{NOT}\b(?! (?:only|just|merely|doubt|other|to mention)\b)"
    rf"(?: {_OPINION}(?: (?!but|however|because)\w+)*|(?: (?!{_TURN}\b)\w+){{0,5}})$"
)
"""A negation before the mention, and between them no word that turns to something else."""
_INSTEAD = re.compile(
    r"\b(?:rather than|instead of|opposed to|except(?: for)?|apart from|far from|excluding)(?: \w+){0,2}$"
    r"|\b(?:(?:wrong|mistake) to|(?:false|wrong|untrue|not true) that|contrary to)\b"
)
_DENIED_AFTER = re.compile(
    rf"(?:\w+ ){{0,4}}?{_BE} (?:\w+ )?(?:not(?! (?:only|just|merely)\b)|{_UNTRUE})\b"
    rf"|(?:isnt|arent|wasnt|werent|cannot be|cant be|{_UNTRUE})\b"
)
_SO = _any("so, true, correct, right, the case")
_DENIED_NEXT = re.compile(rf"(?:(?:that|this|it) (?:is|was)|thats|its) (?:(?:not|no longer) {_SO}|{_UNTRUE})\b")

_RELATED = _any("related, similar, compared, comparable, close, closer, next, adjacent, equal, opposed, according")
_PLACED = _any("ahead, north, south, east, west, away, far, km, miles, derived, different, distinct")
_BESIDE = _any("bordered, surrounded, influenced, followed, preceded, replaced")
_APART = re.compile(
    rf"\b(?:{_RELATED} to|{_PLACED} (?:of|from)|{_BESIDE}(?: by)?|near|outside|above|below|than|borders|bordering"
    r"|includes?|against|behind|defeated|beat|inspired|replacing|unlike|versus|vs|between)"
    r"(?: (?!(?:is|are|was|were)\b)\w+){0,3}$"
)
"""A comparison or a relation before the mention, which tells nothing of the question's matter itself."""

_OPEN = re.compile(
    r"\b(?:if|whether|maybe|perhaps|possibly|either|guess|unless|until|before|(?:could|may|might) be)(?: \w+){0,4}$"
    rf"|(?<!\bi)(?<!\bwe) {_OPINION}s?(?: that)?(?: \w+){{0,3}}$|\b(?:some|many|most|others) \w+(?: that)?(?: it is)?$"
    r"|\b(?:misconception|myth|mistakenly|wrongly|incorrectly|confused?|mistaken|doubt|said that|used to be|no longer"
    rf"|formerly|previously|at (?:least|most))\b|\b(?:after|since)$|^(?:even )?(?:{'|'.join(_CONCEDING)}|unlike)\b"
)
"""Doubt, the opinion of others, another time, or a concession before the mention."""
_OPEN_AFTER = re.compile(
    rf"(?:\w+ ){{0,3}}?{_BE} (?:\w+ )?(?:mistaken|mistakenly|wrongly|confused|thought|believed|considered|assumed)\b"
    r"|(?:would have|at first|initially|originally)\b"
    r"|.*\bbut (?:(?:\w+ ){0,6}?(?:its|it is|it was|it would be|that is|thats)|in fact|actually)\b"
)
_CORRECTED = re.compile(
    r"(?:\w+ ){0,6}?(?:wait (?:no|actually|sorry|it)|correction|scratch that|i meant|no its|no it is)\b"
)
_REFUSED = re.compile(
    r"\b(?:(?:not|dont|cannot|cant|didnt|unable to|impossible to) (?:\w+ )?(?:know|say|tell|answer|determine|find"
    r"|mention|specify|state|provide)|unsure|no idea|not sure (?:if|whether)|no(?:t enough| such)? information"
    r"|not (?:have|mentioned|specified|stated|given)|(?:is|are|was|were|remains?) (?:unknown|unclear)|sorry)\b"
)
_NEXT = 12

_OPENING = re.compile(
    r"(?:the (?:\w+ )?answer (?:\w+ )*?is )?(?:(yes|yeah|correct|true|certainly|indeed|of course)\b(?! not)"
    r"|(?:no|incorrect|false)\b(?! doubt)|(?:\w+ ){0,2}not(?: at all)?$)"
)
_DENIES = re.compile(
    rf"\b(?!nor?\b|none\b)(?:{NOT}|false|incorrect|myth|misconception|fail(?:s|ed)?)\b(?! (?:only|just)\b)"
)
_VERB = re.compile(
    r"\b(?:(?:is|are|was|were|do|does|did|can|could|has|have|had|will|would|should)(?:nt| not)?|cannot)$"
)
_PRONOUNS = words_of("it they he she that this")
_READ, _ABOUT, _AGAIN, _BY_PRONOUN, _SHORT = 4, 0.6, 0.75, 0.3, 4


def stance(text: Text, start: int, end: int) -> Stance:
    """How the sentence of these words takes them; the next sentence can deny them, too."""
    first, last = text.sentence(start)
    clause = re.sub(r"\bno other (?:\w+ )?than\b", "", text.plain(_clause_start(text, first, start), start)).strip()
    stop = next((i for i in range(end, last) if re.search(r"[,:()—]", text.words[i].gap)), last)
    if (
        _NEGATED.search(clause)
        or _INSTEAD.search(clause)
        or _DENIED_AFTER.match(text.plain(end, stop))
        or _DENIED_NEXT.match(text.plain(last, last + _NEXT))
    ):
        return "denied"
    if _APART.search(clause):
        return "apart"
    after = text.plain(end, last)
    doubted = _OPEN.search(clause) or _OPEN_AFTER.match(after) or "?" in text.gap_after(last - 1)
    changed = clause.endswith("from") and after.startswith("to ")
    corrected = changed or _CORRECTED.match(text.plain(end, end + _NEXT))
    return "open" if doubted or corrected or _refused(text.plain(0, start)) else "asserted"


def _clause_start(text: Text, first: int, start: int) -> int:
    """Where the clause of a word begins: behind a conjunction, a colon, or a comma that continues no list."""
    for i in range(start, first, -1):
        word = text.words[i]
        concedes = word.form in _CONCEDING and (word.form != "while" or "," in word.gap)
        if i < start and (concedes or word.form in ("but", "however", "yet")):
            return i + (not concedes)
        pause = "," in word.gap or "—" in word.gap or " - " in word.gap
        negated = re.search(r"\b(?:neither|not|no|nor|except|unlike) (?:\w+ )?\w+$", text.plain(i - 3, i))
        listed = word.form in ("or", "nor", "and") or (word.is_capital and negated)
        if ":" in word.gap or (pause and not listed):
            return i
    return first


def _refused(before: str) -> bool:
    """The answer has refused before, and has not turned since."""
    found = list(_REFUSED.finditer(before))
    since = before[found[-1].end() :] if found else ""
    return bool(found) and not re.search(r"\b(?:but|however|although|though|nevertheless|still|actually)\b", since)


def affirms(question: Question, answer: Text) -> bool | None:
    """Whether the answer affirms a question of yes or no; None: its first sentences about it do neither, or both."""
    names = {word.form for word in question.words.words[1:] if word.is_capital}
    found: list[bool] = []
    for first, last in answer.sentences[:_READ]:
        sentence, forms = answer.plain(first, last), answer.forms[first:last]
        if opening := _OPENING.match(sentence):
            found.append(bool(opening[1]))
        by_pronoun = forms[:1] and forms[0] in _PRONOUNS
        share = question.share(forms) + _BY_PRONOUN * bool(by_pronoun)
        short = by_pronoun and not found and last - first <= _SHORT and _VERB.search(sentence)  # "They can."
        if not (short or share >= (_AGAIN if found else _ABOUT)) or "?" in answer.gap_after(last - 1):
            continue
        main, *rest = re.split(r"\b(?:(?<!anything )but|however|although)\b", sentence)
        taken_back = any(re.search(rf"\bnot (?:an? |the )?(?:{'|'.join(question.content)})\b", part) for part in rest)
        if taken_back or not (short or names <= {*forms}):
            return None
        found.append(
            bool(_DENIES.search(main)) == bool(_DENIES.search(question.words.plain(0, len(question.words.words))))
        )
    return found[0] if len({*found[:2]}) == 1 else None

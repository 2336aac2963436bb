"""Yes and no, lettered options and symbols: references so short that they stand in any text by chance."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from semgrad_guard.evaluation.graders.asked import Asked
from semgrad_guard.evaluation.graders.assertion import asserted
from semgrad_guard.evaluation.graders.reading import Reading
from semgrad_guard.evaluation.graders.word_forms import words_of

_OPENING = r"^(?:the (?:short |correct )?answer (?:to (?:this|your|the) (?:[\w ]+ )?question )?is )?"
_YES = re.compile(_OPENING + r"(?:yes|yeah|yep|correct|true|certainly|indeed|absolutely|of course)\b")
_NO = re.compile(_OPENING + r"(?:no|nope|incorrect|false|not)\b")
_VERB = re.compile(
    r"\b(?:is|are|was|were|do|does|did|can|could|has|have|had|will|would|should|must)(?:nt| not)?$|\bcannot$"
)
_DENIES = re.compile(
    r"\b(?:not|isnt|arent|wasnt|werent|doesnt|dont|didnt|cannot|cant|couldnt|hasnt|havent|never|unable|false|incorrect|myth|misconception)\b"
)
_PRONOUNS = words_of("it they he she")
_SENTENCES_READ = 4
_SHORT = 4
_RESTATED = 0.6
_FULLY = 0.75
_CUES = words_of("is are as symbol option letter grade answer vitamin choice type called group")

Says = Callable[[str, str, Sequence[str]], bool]


def says_yes(asked: Asked, answer: Reading, reference: str) -> bool | None:
    """Where the reference is yes or no, whether the answer comes to it; None for other references.

    An answer without the word counts by its first sentence about the matter: denied or not.
    """
    wanted = reference.strip(" .!'\"").lower()
    if wanted not in ("yes", "no", "true", "false"):
        return None
    found = _polarity(asked, answer)
    return found is not None and found == (wanted in ("yes", "true"))


def _polarity(asked: Asked, answer: Reading) -> bool | None:
    found: list[bool] = []
    explicit: list[bool] = []
    at = 0
    for _ in range(_SENTENCES_READ):
        if at >= len(answer.words):
            break
        start, end = answer.sentence(at)
        at = end
        said = answer.plain(start, end)
        held = len(asked.content & set(answer.forms[start:end])) + (answer.forms[start] in _PRONOUNS)
        restated = held >= _RESTATED * len(asked.content)
        if _YES.match(said) or _NO.match(said):
            found.append(bool(_YES.match(said)))
            explicit.append(found[-1])
        elif end - start <= _SHORT and _VERB.search(said):  # "They can.", "It does not."
            found.append(not _DENIES.search(said))
        if restated and asked.content and "?" not in answer.gap_after(end - 1):
            affirmed = _affirms(asked, answer, start, end)
            found.append(affirmed)
            full = len(asked.content & set(answer.forms[start:end])) >= _FULLY * len(asked.content)
            explicit += [affirmed] * (full and bool(explicit))
    return None if set(explicit) == {True, False} else next(iter(found), None)


def _affirms(asked: Asked, answer: Reading, start: int, end: int) -> bool:
    """The sentence says it without a denial up to its "but" (and the question has no denial of its own)."""
    said = answer.plain(start, end)
    if _names_another(asked, answer, start, end):
        return False
    main, *rest = re.split(r"\b(?:but|however|although)\b", said)
    denied = bool(_DENIES.search(main))
    if rest and any(
        re.search(rf"\bnot (?:an? |the )?{re.escape(word)}\b", rest[0]) and word not in main for word in asked.content
    ):
        denied = True
    return denied == bool(_DENIES.search(asked.reading.plain(0, len(asked.reading.words))))


def _names_another(asked: Asked, answer: Reading, start: int, end: int) -> bool:
    """In the place of a name of the question stands another: "Is Sydney the capital?" "The capital is Canberra."."""
    missing = [word for word in asked.reading.words[1:] if word.is_capital and word.form not in answer.forms[start:end]]
    place = next((i for i in range(start + 1, end) if answer.forms[i - 1] in ("is", "are", "was", "were")), None)
    return bool(missing) and place is not None and answer.words[place].is_capital


def says_letter(asked: Asked, answer: Reading, reference: str, says: Says) -> bool | None:
    """Where the reference is one of the question's lettered options, whether the answer takes it; else None."""
    wanted = reference.strip(" .()").upper()
    if wanted not in asked.options:
        return None
    options = asked.options
    for i, word in enumerate(answer.words):
        marked = answer.gap_after(i)[:1] in (")", ".", ":", '"', "'") or i + 1 == len(answer.words)
        cued = i > 0 and answer.forms[i - 1] in _CUES
        if word.raw in options and (marked or (cued and word.raw != "A")):
            rest = " ".join(
                each.raw for each in answer.words[i + 1 : answer.sentence(i)[1] if i + 1 < len(answer.words) else i + 1]
            )
            contrary = any(says("", rest, [text]) for letter, text in options.items() if letter != wanted)
            return word.raw == wanted and asserted(answer, i, i + 1) and not contrary
    text = " ".join(each.gap + each.raw for each in answer.words)
    return says("", text, [options[wanted]]) and not any(
        says("", text, [other]) for letter, other in options.items() if letter != wanted
    )


def says_symbol(answer: Reading, reference: str) -> bool | None:
    """Where the reference is a symbol of one or two letters (not "UK"), whether the answer gives it as one; else None.

    Its case counts, and it stands behind a word like "is", between marks, or alone.
    """
    wanted = reference.strip()
    if not (wanted.isalpha() and wanted.isascii() and len(wanted) <= 2) or (len(wanted) > 1 and wanted.isupper()):
        return None
    given = [
        i
        for i, word in enumerate(answer.words)
        if len(word.raw) <= 2 and word.raw[:1].isupper() and _stands_out(answer, i)
    ]
    right = [i for i in given if answer.words[i].raw == wanted]
    return bool(right) and right[0] == given[0] and asserted(answer, right[0], right[0] + 1)


def _stands_out(answer: Reading, i: int) -> bool:
    word = answer.words[i]
    closed = i + 1 == len(answer.words) or bool(answer.gap_after(i).strip())
    opened = bool(set(word.gap) & set("(\"'“*`:=")) or (i > 0 and answer.forms[i - 1] in _CUES) or (i == 0 and closed)
    return opened and (closed or word.raw not in ("A", "I"))

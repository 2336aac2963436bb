"""The languages of a calibration's prompts: declared by the user as tags of BCP 47, never guessed.

They tell people which questions a promise is about, and nothing is refused by them: a guard does not know the language
of a later prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from semgrad_guard.errors import InputError

_TAG = re.compile(r"([A-Za-z]{2,3})(?:-[A-Za-z0-9]{1,8})*")
_TWO_LETTERS = (
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo "
    "es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka "
    "kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng "
    "nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st "
    "su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"
)
"""ISO 639-1: codes of countries (jp, cn, cz) are mistaken for these."""


def read_languages(tags: Iterable[str]) -> tuple[str, ...]:
    """The primary tags, sorted: "pt-BR" counts as "pt". A text is a list with commas.

    Raises:
        InputError: one is no such tag.
    """
    found: set[str] = set()
    for tag in tags.split(",") if isinstance(tags, str) else tags:
        match = _TAG.fullmatch(str(tag).strip())
        primary = "" if match is None else match[1].lower()
        if not primary or (len(primary) == 2 and primary not in _TWO_LETTERS):
            raise InputError(
                f"{str(tag)[:40]!r} is no language tag of BCP 47: write en, de or pt-BR. Languages that you name "
                'for all questions (--language de,fr) take the place of the column "language"'
            )
        found.add(primary)
    return tuple(sorted(found))


def doubt_of_grader(languages: Sequence[str], grader: str) -> str | None:
    """A warning where `contains` grades answers that are not all English; `grader` is its name in records."""
    others = [language for language in languages if language not in ("en", "eng")]
    if not others or not grader.startswith("contains"):
        return None
    return (
        f"{grader} reads English. In other languages ({', '.join(others)}) it may call a denial right, and finds no "
        "reference where words are not spaced. Take nli=MODEL or judge=PROVIDER:MODEL, exact-match for answers in few "
        "words, or grades by hand (docs/labels.md)"
    )

"""Whether texts share words: code that has passed a text on may have cut it, or changed its case and its marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")


def repeats(text: str, written: str, *, words: int = 4) -> bool:
    """Whether one of two texts is the other, or is a part of it and has so many words; case and marks aside."""
    return shares(words_of(text), words_of(written), words=words)


def shares(ours: Sequence[str], theirs: Sequence[str], *, words: int = 4) -> bool:
    """As `repeats`, of the words of texts. Of four words and more, the first and the last may have been cut."""
    few, many = sorted((ours, theirs), key=len)
    short, long = " ".join(few), " ".join(many)
    if len(few) < max(words, 1):
        return bool(few) and short == long
    return short in long if len(few) > 3 else f" {short} " in f" {long} "


def words_of(text: str) -> list[str]:
    """A text's words, for comparing."""
    return _WORD.findall(text.casefold())

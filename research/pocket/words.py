"""The committed lists of ordinary words and names (`make_words.py` writes them)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

SKEW = 1.7  # 1 would be uniform
NAMES = ("first", "last", "town")  # in no order of frequency
SYNONYMS_FILE = Path(__file__).parent / "data" / "synonyms.txt"
WORDS_FILE = Path(__file__).parent / "data" / "words.txt"


@cache
def words(kind: str) -> tuple[str, ...]:
    """The word list of one kind (see `make_words.py`)."""
    for line in WORDS_FILE.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(": ")
        if name == kind:
            return tuple(w.replace("_", " ") for w in rest.split())
    raise KeyError(kind)


@cache
def all_words() -> tuple[str, ...]:
    """Every lower-case noun and adjective of the lists: the pool for an arbitrary word."""
    kinds = ("thing", "food", "animal", "plant", "material", "attribute", "idea", "activity", "job", "adj")
    return tuple(dict.fromkeys(w for kind in kinds for w in words(kind)))


@cache
def synonyms() -> dict[str, list[str]]:
    """Words that have the same first meaning in WordNet, by word."""
    lines = SYNONYMS_FILE.read_text(encoding="utf-8").splitlines()
    return {word: others.split() for word, _, others in (line.partition(": ") for line in lines)}


def some(random: Random, kind: str) -> str:
    """One word of the kind. Its list begins with the commonest, and they come more often, as in real texts."""
    listed = words(kind)
    if kind in NAMES:
        return random.choice(listed)
    return listed[int(len(listed) * random.random() ** SKEW)]

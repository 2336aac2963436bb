"""Names that nobody has: invented words, and people with the first and last names of WordNet (`data/names.txt`).

Everything here is a function of a `random.Random`, so that a seed fixes a corpus.
"""

# ruff: noqa: SIM905 (word lists read better as text)
from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

FILE = Path(__file__).parent / "data" / "names.txt"
ONSETS = "b br c ch cl d dr f fl g gr h j k kl l m n p pl qu r s sc sh sl st t th tr v w z b d f k l m n r s t".split()
VOWELS = "a e i o u a e i o u a e i o a y ai ea ou ei au ie oo".split()
CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "nd", "rn", "x", "lt", "st", "ck", "th", "rd", "ng", "p", "g"]
TITLES = "Dr Professor Captain Mrs Mr Judge Sister Inspector Lady Sir".split()


@cache
def _listed() -> dict[str, list[str]]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {
        kind: [name.replace("_", " ") for name in names.split()]
        for kind, _, names in (x.partition(": ") for x in lines)
    }


def invented(random: Random, syllables: int | None = None) -> str:
    """A capitalised word that (almost surely) no one ever wrote."""
    count = syllables or random.choice((1, 2, 2, 2, 3))
    parts = (
        random.choice(ONSETS) + random.choice(VOWELS) + (random.choice(CODAS) if random.random() < 0.5 else "")
        for _ in range(count)
    )
    return "".join(parts)[:10].capitalize()


def _name(random: Random, kind: str, share: float) -> str:
    return random.choice(_listed()[kind]) if random.random() < share else invented(random)


def person(random: Random) -> str:
    roll = random.random()
    if roll < 0.08:
        return f"{random.choice(TITLES)} {_name(random, 'last', 0.6)}"
    middle = f" {random.choice('ABCDEFGHJKLMNPRSTW')}." if roll > 0.95 else ""
    return f"{_name(random, 'first', 0.85)}{middle} {_name(random, 'last', 0.6)}"


def country(random: Random) -> str:
    return invented(random, 2)[:7] + random.choice(("ia", "land", "stan", "ora", "ania", "", ""))

"""The common text of rendered prompts, and the text between: a prompt as static text and gaps.

Static text is the opening and the closing that all calibration prompts share, word for word, and the lines between
them that all share, in order: whole ones, or their labels ("Context:"). The text between two static pieces is a gap,
where prompts differ: a question, or a passage. Static text is kept as digests, so that a record of it shows no text;
and so are all words (`Vocabulary`), in a few kilobytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import takewhile
from typing import Self

from pydantic import BaseModel, Field, field_validator

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
"""Scripts without spaces between words (kana, Chinese characters), and Hangul: every character is taken as a word."""

_TOKEN = re.compile(rf"\n|[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]")
_LABEL_WORDS = 6
"""A label is the beginning of a line up to its first colon, if that is so many words at most."""

_MOST_GAPS = 4

_CALENDAR = re.compile(
    r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)(?:uary|ruary|ch|il|ust|ember|tember|ober)?"
    r"|(?:mon|tues?|wed|thu|thurs?|fri|sat|sun)(?:day|nesday|sday|urday)?",
    re.IGNORECASE,
)
"""Months and weekdays, short or long."""

MOST_BITS = 1 << 16
"""8 kB, which are 11 kB in a file."""

_BITS_A_WORD = 12
_MOST_HASHES = 6


@dataclass(frozen=True)
class Words:
    """A text cut into words, punctuation marks and line ends, with the place of each in it."""

    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, text: str) -> Self:
        """The words of a text; white space other than line ends is left out."""
        found = list(_TOKEN.finditer(text))
        return cls(text, tuple(match.group() for match in found), tuple(match.span() for match in found))

    @classmethod
    def joined(cls, parts: Sequence[Words]) -> Self:
        """Several parts of a text as one."""
        text = "\n".join(part.text for part in parts if part.text)
        return cls(text, tuple(word for part in parts for word in part.words), ())

    def __len__(self) -> int:
        return len(self.words)

    def part(self, start: int, end: int) -> Words:
        """Some of the words, and the text from the first of them to the last."""
        if start >= end:
            return Words("", (), ())
        return Words(self.text[self.spans[start][0] : self.spans[end - 1][1]], self.words[start:end], ())

    @property
    def lines(self) -> int:
        """Lines that are not blank."""
        return sum(1 for line in self.text.splitlines() if line.strip())

    @property
    def sentences(self) -> int:
        """Sentences, by their closing marks; text without one behind the last counts as one more."""
        ends = [match.end() for match in _SENTENCE_END.finditer(self.text)]
        return len(ends) + any(character.isalnum() for character in self.text[ends[-1] if ends else 0 :])

    @property
    def vocabulary(self) -> set[str]:
        """The different words and marks, in lower case; numbers are all alike."""
        return {"0" if word.isdigit() else word.lower() for word in self.words if word != "\n"}


class StaticText(BaseModel, frozen=True, extra="forbid"):
    """So many words, and the digest of them."""

    words: int = Field(ge=0)
    digest: str

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """The record of these words."""
        return cls(words=len(words), digest=_digest(words))


class Skeleton(BaseModel, frozen=True, extra="forbid"):
    """The static text of a set of prompts: opening, lines in order, closing. `lines` are digests of lines or labels."""

    opening: StaticText
    closing: StaticText
    lines: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[Words]) -> Self:
        """The common text of these texts, at least one."""
        plain = [[_static(word) for word in text.words] for text in texts]
        shortest = min(map(len, plain))
        begin = _shared(plain)
        end = min(_shared([words[::-1] for words in plain]), shortest - begin)
        middles = [_Lines(text, begin, len(text) - end) for text in texts]
        common = set[str].intersection(*({head for heads in middle.heads for head in heads} for middle in middles))
        shared = ([next((h for h in heads if h in common), "") for heads in middle.heads] for middle in middles)
        kept = ([head for head in heads if head] for heads in shared)
        return cls(
            opening=StaticText.of(plain[0][:begin]),
            closing=StaticText.of(plain[0][len(plain[0]) - end :]),
            lines=tuple(reduce(common_subsequence, kept)),
        )

    def gaps(self, text: Words) -> list[Words] | None:
        """The texts between the static pieces, in order; None where a piece is missing.

        There is one gap more than there are lines, but four at most: those in the middle of many count as one, since
        every gap that is measured by itself is one more chance that a familiar prompt looks strange.
        """
        end = len(text) - self.closing.words
        if end < self.opening.words or not (self._opens(text) and self._closes(text)):
            return None
        middle = _Lines(text, self.opening.words, end)
        gaps: list[Words] = []
        start, row = self.opening.words, 0
        for line in self.lines:
            row = next((i for i in range(row, len(middle.heads)) if line in middle.heads[i]), -1)
            if row < 0:
                return None
            gaps.append(text.part(start, middle.starts[row]))
            start = middle.starts[row] + middle.heads[row][line]
            row += 1
        gaps.append(text.part(start, end))
        return gaps if len(gaps) <= _MOST_GAPS else [gaps[0], Words.joined(gaps[1:-2]), *gaps[-2:]]

    def missing(self, text: Words) -> list[str]:
        """Why a text has no gaps, in words."""
        begins = [] if self._opens(text) else ["it begins otherwise than all calibration prompts do"]
        ends = [] if self._closes(text) else ["it ends otherwise than all calibration prompts do"]
        return begins + ends or ["a line that all calibration prompts share is missing, or stands elsewhere"]

    def _opens(self, text: Words) -> bool:
        return _digest(map(_static, text.words[: self.opening.words])) == self.opening.digest

    def _closes(self, text: Words) -> bool:
        return _digest(map(_static, text.words[max(0, len(text) - self.closing.words) :])) == self.closing.digest


@dataclass(frozen=True)
class _Chain:
    """The end of a chain of items, and the chain before it."""

    item: str
    before: _Chain | None


class _Lines:
    """The lines of a stretch of words: where each starts, and the digests it can be known by (of the whole line, and of
    its label), with their numbers of words."""

    def __init__(self, text: Words, start: int, end: int) -> None:
        self.starts: list[int] = []
        self.heads: list[dict[str, int]] = []
        while start < end:
            stop = start
            while stop < end and text.words[stop] != "\n":
                stop += 1
            if any(word[0].isalnum() for word in text.words[start:stop]):
                line = [_static(word) for word in text.words[start:stop]]
                heads = {_digest(line): len(line)}
                label = [*takewhile(lambda word: word != ":", line[: _LABEL_WORDS + 1])]
                if len(label) <= _LABEL_WORDS and len(label) < len(line):
                    heads[_digest([*label, ":"])] = len(label) + 1
                self.starts.append(start)
                self.heads.append(heads)
            start = stop + 1


def _shared(texts: Sequence[list[str]]) -> int:
    """How many words all texts begin with."""
    first, last = min(texts), max(texts)  # whatever these two share, all between them share
    shortest = min(len(first), len(last))
    return next((i for i in range(shortest) if first[i] != last[i]), shortest)


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """The longest common subsequence of two lists (Hunt and Szymanski's way: fast where little repeats)."""
    places: dict[str, list[int]] = {}
    for index, item in enumerate(right):
        places.setdefault(item, []).append(index)
    tails: list[int] = []
    chains: list[_Chain] = []
    for item in left:
        for index in reversed(places.get(item, ())):
            at = bisect_left(tails, index)
            tails[at : at + 1], chains[at : at + 1] = [index], [_Chain(item, chains[at - 1] if at else None)]
    found: list[str] = []
    chain = chains[-1] if chains else None
    while chain is not None:
        found.append(chain.item)
        chain = chain.before
    return found[::-1]


@lru_cache(maxsize=1 << 16)
def _static(word: str) -> str:
    """A word as static text is compared: numbers, months and weekdays are all alike, as templates print the date."""
    return "0" if word.isdigit() or _CALENDAR.fullmatch(word) else word


def _digest(words: Iterable[str]) -> str:
    text = "\x1f".join(words)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Vocabulary(BaseModel, frozen=True, extra="forbid"):
    """A set of words as a Bloom bitmap (Bloom, Communications of the ACM 13, 1970).

    It can be asked for a word, but its words cannot be read out of it. A word that is in it is always found; one that
    is not is taken for known with a small probability (below 1 % for up to 5,500 words, about 1 in 8 for 15,000), so
    that novelty may be overlooked but is never made up. `bitmap` is base64.
    """

    bitmap: str
    hashes: int = Field(ge=1, le=_MOST_HASHES)

    @classmethod
    def of(cls, words: Collection[str]) -> Self:
        """The vocabulary that holds exactly these words."""
        wanted = max(256, _BITS_A_WORD * len(words))
        size = min(MOST_BITS, 1 << math.ceil(math.log2(wanted)))
        hashes = max(1, min(_MOST_HASHES, round(size / max(1, len(words)) * math.log(2))))
        bits = bytearray(size // 8)
        for word in words:
            for place in _places(word, hashes, size):
                bits[place >> 3] |= 1 << (place & 7)
        return cls(bitmap=base64.b64encode(bits).decode("ascii"), hashes=hashes)

    def unknown(self, words: Iterable[str]) -> set[str]:
        """The words that are not in it."""
        bits = self._bits
        size = 8 * len(bits)
        return {
            word
            for word in words
            if not all(bits[place >> 3] >> (place & 7) & 1 for place in _places(word, self.hashes, size))
        }

    @cached_property
    def _bits(self) -> bytes:
        return base64.b64decode(self.bitmap)

    @field_validator("bitmap")
    @classmethod
    def _is_a_bitmap(cls, value: str) -> str:
        try:
            size = len(base64.b64decode(value, validate=True))
        except (binascii.Error, ValueError):
            raise ValueError("the vocabulary's bitmap must be base64") from None
        if not 1 <= size <= MOST_BITS // 8:
            raise ValueError(f"the vocabulary's bitmap must have 1 to {MOST_BITS // 8} bytes, not {size}")
        return value


def _places(word: str, hashes: int, size: int) -> list[int]:
    """The bits of a word: as many as there are hashes, made from two (Kirsch and Mitzenmacher, 2006)."""
    found = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    first, step = found >> 32, (found & 0xFFFFFFFF) | 1
    return [(first + i * step) % size for i in range(hashes)]

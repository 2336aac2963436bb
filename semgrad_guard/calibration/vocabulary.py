"""The words of many texts in a few kilobytes: which of a text's words occur in none of them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST_BITS = 1 << 16
"""8 kB, which are 11 kB in a file."""

_BITS_A_WORD = 12
_MOST_HASHES = 6


class Vocabulary(BaseModel):
    """A set of words as a Bloom bitmap (Bloom, Communications of the ACM 13, 1970).

    It can be asked for a word, but its words cannot be read out of it. A word that is in it is always found; one that
    is not is taken for known with a small probability (below 1 % for up to 5,500 words, about 1 in 8 for 15,000), so
    that novelty may be overlooked but is never made up. `bitmap` is base64.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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

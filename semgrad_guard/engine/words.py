"""Texts compared by their words, normalised as in SQuAD.

Source: Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text", EMNLP 2016.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_PUNCTUATION = re.compile(rf"(?!(?<![^\W\d])\.\d|(?<!\w)-\.?\d)[{re.escape(string.punctuation)}]")
"""Any but the point and the sign of a number: SQuAD's own rule makes one answer of 1.5, 15 and -15."""
_DECIMAL_COMMA = re.compile(r"(?<![\d,])(\d+),(?=\d\d?(?![\d,]))")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space; numbers keep their point and sign.

    Where nothing would be left (the answer "A", or "+"), only case and outer white space go.
    """
    bare = _ARTICLES.sub(" ", _PUNCTUATION.sub("", with_points(text).lower().replace("−", "-")))
    return " ".join(bare.split()) or text.strip().lower()


def with_points(text: str) -> str:
    """The text with decimal points for decimal commas: "2,54" is "2.54", while "2,540" and "2,5,4" stay."""
    return _DECIMAL_COMMA.sub(r"\1.", text)


def token_f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, in [0, 1]."""
    words, expected = normalise(text).split(), normalise(answer).split()
    shared = sum((Counter(words) & Counter(expected)).values())
    return 2 * shared / (len(words) + len(expected)) if shared else 0.0

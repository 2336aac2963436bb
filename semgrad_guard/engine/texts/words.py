"""Texts compared by their words, normalised as in SQuAD.

Source: Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text", EMNLP 2016.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space.

    Where nothing would be left (the answer "A", or "+"), only case and outer white space go.
    """
    bare = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(bare.split()) or text.strip().lower()


def token_f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, in [0, 1]."""
    words, expected = normalise(text).split(), normalise(answer).split()
    shared = sum((Counter(words) & Counter(expected)).values())
    return 2 * shared / (len(words) + len(expected)) if shared else 0.0

"""Near-duplicates: questions that are probably wordings of one fact, found by their words and references."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from semgrad_guard.evaluation.questions.data import Question

_WORD = re.compile(r"\w+")
_ALIKE, _ALIKE_WITH_ONE_ANSWER = 0.9, 0.5
"""Shares of two questions' words, rare ones weighing more, from which on they are close."""

_COMMON = 50
"""A word of more questions than this brings none of them together."""


def wordings(questions: Sequence[Question]) -> list[int]:
    """For each question the number of the first one that it is close to, directly or over others; its own otherwise.

    Copies are close. Two questions are, if they share nearly all of their words; half, if a reference is the same. Of
    passages each is another question.
    """
    copies: dict[str, int] = {}
    firsts = [copies.setdefault(question.key, row) for row, question in enumerate(questions)]
    words = [frozenset(_WORD.findall(question.question.casefold())) for question in questions]
    answers = [{answer.casefold().strip() for answer in question.answers} for question in questions]
    counts = Counter(word for row in copies.values() for word in words[row])
    weight = {word: math.log1p(len(copies) / count) for word, count in counts.items()}
    known = defaultdict[str, list[int]](list)

    def first(row: int) -> int:
        while firsts[row] != row:
            row = firsts[row]
        return row

    for row in copies.values():
        own = words[row]
        rare = [word for word in own if counts[word] <= _COMMON]
        for other in {other for word in rare for other in known[word]}:
            shared = math.fsum(weight[word] for word in own & words[other])
            least = _ALIKE_WITH_ONE_ANSWER if answers[row] & answers[other] else _ALIKE
            close = shared >= least * math.fsum(weight[word] for word in own | words[other])
            if close and questions[row].context == questions[other].context:
                low, high = sorted((first(row), first(other)))
                firsts[high] = low
        for word in rare:
            known[word].append(row)
    return [first(row) for row in range(len(questions))]

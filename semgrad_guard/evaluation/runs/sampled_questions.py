"""Which questions the methods that draw samples take part in: a seeded choice of each kind."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.questions.data import Question


@dataclass(frozen=True)
class SampledQuestions:
    """At most `count` questions of each kind, by their keys. What is chosen depends on the seed and the questions."""

    count: int
    seed: int
    keys: frozenset[str]

    @classmethod
    def of(cls, questions: Sequence[Question], *, count: int, seed: int) -> SampledQuestions | None:
        """The choice; None where no kind has more than `count` questions, so that none is left out.

        Raises:
            InputError: count is less than 1.
        """
        if count < 1:
            raise InputError(f"sampled questions must be at least 1 of each kind, not {count}")
        kinds: defaultdict[str | None, list[str]] = defaultdict(list)
        for question in questions:
            kinds[question.kind].append(question.key)
        if all(len(keys) <= count for keys in kinds.values()):
            return None
        chosen = [key for keys in kinds.values() for key in sorted(keys, key=lambda each: _place(each, seed))[:count]]
        return cls(count, seed, frozenset(chosen))

    @property
    def settings(self) -> dict[str, Any]:
        """What a record keeps of it."""
        return {"of each kind": self.count, "seed": self.seed}


def _place(key: str, seed: int) -> str:
    """Where a question stands in the draw: apart from the others, so that more questions change little."""
    return hashlib.sha256(f"{seed} {key}".encode()).hexdigest()

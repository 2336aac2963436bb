"""The effect of a threshold on graded answers: the errors with and without a guard, and the withheld answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Effect:
    """Counts of graded answers, or of sentences: all of them, and those that a threshold lets through."""

    answers: int
    wrong: int
    delivered: int
    delivered_wrong: int
    unit: Literal["answers", "sentences"] = "answers"

    @classmethod
    def of(cls, graded: Iterable[tuple[float | None, bool]], lets_through: Callable[[float | None], bool]) -> Effect:
        """Of (uncertainty, whether the answer is right)."""
        rows = [(correct, lets_through(uncertainty)) for uncertainty, correct in graded]
        delivered = [correct for correct, passes in rows if passes]
        wrong = sum(not correct for correct, _ in rows)
        return cls(len(rows), wrong, len(delivered), sum(not correct for correct in delivered))

    @property
    def error(self) -> float:
        """The error rate without the guard."""
        return self.wrong / max(1, self.answers)

    @property
    def coverage(self) -> float:
        """The share that is delivered."""
        return self.delivered / max(1, self.answers)

    @property
    def delivered_error(self) -> float | None:
        """The error rate with the guard; None where nothing is delivered."""
        return self.delivered_wrong / self.delivered if self.delivered else None

    @property
    def withheld_wrong(self) -> int:
        """The wrong answers that are withheld."""
        return self.wrong - self.delivered_wrong

    @property
    def withheld_right(self) -> int:
        """The right answers that are withheld."""
        return self.answers - self.delivered - self.withheld_wrong

    def __str__(self) -> str:
        guarded = self.delivered_error or 0.0
        return (
            f"error {self.error:.1%} without the guard, {guarded:.1%} with it; withheld: {self.withheld_wrong} of "
            f"{self.wrong} wrong {self.unit}, {self.withheld_right} of {self.answers - self.wrong} right ones"
        )

    def doubt(self, alpha: float) -> str | None:
        """A warning if the promise allows as many errors as the model makes without a guard, else None."""
        if alpha < self.error:
            return None
        return (
            f"alpha is {alpha:.1%}, and without a guard {self.error:.1%} of these {self.unit} are wrong: such a "
            "promise may withhold nothing. Take an alpha below that, and calibrate on other questions."
        )

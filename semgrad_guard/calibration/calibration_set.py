"""A calibration set: the callers' columns, checked, with errors that name the remedy; and the effect of a threshold on
graded answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.declared import Declared, declared
from semgrad_guard.errors import CalibrationError
from semgrad_guard.records import PromptForm
from semgrad_guard.settings import Alpha, Delta

Copies = Literal["keep", "once"]
"""Repeated questions: of a sample of traffic all are kept, of a list of questions the first answer of each."""


@dataclass(frozen=True)
class CalibrationSet:
    """Questions: those with a finite score as arrays, the others as counts.

    `scores` and `correct` belong together, in the caller's order. `n_unscored_wrong` of the `n_unscored` answers
    without a finite score were wrong. `n_duplicates` repeats of an earlier question were left out. `rows` are the
    caller's rows of the others, `scored` those of `scores`.
    """

    scores: NDArray[np.float64]
    correct: NDArray[np.bool_]
    n_unscored: int
    n_unscored_wrong: int
    n_duplicates: int
    rows: tuple[int, ...]
    scored: tuple[int, ...]

    @property
    def n(self) -> int:
        """Questions, scored or not."""
        return len(self.scores) + self.n_unscored

    @property
    def error(self) -> float:
        """The error rate of all answers, those without a score among them."""
        return (int((~self.correct).sum()) + self.n_unscored_wrong) / self.n


def read_set(
    uncertainties: Iterable[float | None], correct: Iterable[Any], *, groups: Iterable[Hashable] | None, copies: Copies
) -> CalibrationSet:
    """Check the three columns; with `copies="once"` keep the first answer of each group."""
    scores = np.array(
        [_score(value, row) for row, value in enumerate(read_column(uncertainties, "uncertainties"))], dtype=np.float64
    )
    labels = np.array([_label(value, row) for row, value in enumerate(read_column(correct, "correct"))], dtype=np.bool_)
    require_same_length("uncertainties", len(scores), "correct", len(labels))
    if not len(scores):
        raise CalibrationError("The calibration set is empty. Pass one uncertainty and one correct/wrong per answer.")
    every = list(range(len(scores)))
    first = every if groups is None else _first_of_each(groups, len(scores))
    if copies == "keep":
        first = every
    kept_scores, kept_labels = scores[first], labels[first]
    scored = np.isfinite(kept_scores)
    return CalibrationSet(
        scores=kept_scores[scored],
        correct=kept_labels[scored],
        n_unscored=int((~scored).sum()),
        n_unscored_wrong=int((~kept_labels[~scored]).sum()),
        n_duplicates=len(scores) - len(first),
        rows=tuple(first),
        scored=tuple(row for row, has_score in zip(first, scored.tolist(), strict=True) if has_score),
    )


ABSTAINED: Final = "abstained"
"""The label of an answer in which the model itself declines to answer."""


def claims(labels: Sequence[Any]) -> list[int]:
    """The places of the answers that are no abstentions: these alone are right or wrong.

    Raises:
        CalibrationError: there is none.
    """
    found = [place for place, label in enumerate(labels) if not (isinstance(label, str) and label == ABSTAINED)]
    if labels and not found:
        raise CalibrationError(
            "Every graded answer is an abstention: none is right or wrong, so there is nothing to promise about."
        )
    return found


Prompts = PromptForm | Sequence[PromptForm] | None
"""The prompts of one answer: of a question that took several calls, first that of the call whose score counts."""


def read_prompts(prompts: Iterable[Prompts], answers: CalibrationSet) -> list[list[PromptForm]]:
    """The prompts of the distinct questions, checked; a question without any is left out."""
    given = read_column(prompts, "prompts")
    require_same_length("uncertainties", answers.n + answers.n_duplicates, "prompts", len(given))
    several: list[Any] = [[one] if isinstance(one, PromptForm) else one or [] for one in given]
    known = any(several)
    for row, forms in enumerate(several):
        if not known or not _are_forms(forms):
            raise CalibrationError(
                f"prompts[{row}] is a {type(given[row]).__name__}. Pass what each prompt looked like: a rendered "
                "prompt's `form` (`model.render(conversation).form`), in the answers' order."
            )
    return [list(several[row]) for row in answers.rows if several[row]]


_RATES: Mapping[str, Declared] = {"alpha": declared("alpha", Alpha), "delta": declared("delta", Delta)}


def read_rate(value: float, name: Literal["alpha", "delta"]) -> float:
    """A rate to promise, or the probability of breaking the promise, within the bounds of its option."""
    number, bounds = _score(value, None, column=name), _RATES[name].bounds
    if number not in bounds:
        raise CalibrationError(f"{name} must be {bounds}, for example 0.1; it is {value!r}.")
    return number


def read_column(values: Any, name: str) -> list[Any]:
    """The entries of a list, an array, a tensor or any other iterable, as plain Python objects where it has them."""
    try:
        return list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:
        raise CalibrationError(f"{name} is {values!r}. Pass a list with one entry per answer.") from None


def _are_forms(given: Any) -> bool:
    several = cast("Sequence[Any]", given) if isinstance(given, Sequence) else [None]
    return all(isinstance(one, PromptForm) for one in several)


def _first_of_each(groups: Iterable[Hashable], n: int) -> list[int]:
    """Rows to keep: the first of each group, in order. A group is a question's name, which None is not."""
    names = read_column(groups, "groups")
    require_same_length("uncertainties", n, "groups", len(names))
    firsts: dict[Hashable, int] = {}
    for row, name in enumerate(names):
        try:
            if name is None:
                raise TypeError
            firsts.setdefault(name, row)
        except TypeError:  # one that cannot be hashed, such as a list
            raise CalibrationError(f"groups[{row}] is {name!r}. Name each question by its text or an id.") from None
    return list(firsts.values())


def _score(value: Any, row: int | None, *, column: str = "uncertainties") -> float:
    """A float; NaN for None. Text and other values that are not numbers are refused."""
    if type(value) is float:
        return value
    if value is None:
        return math.nan
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        where = column if row is None else f"{column}[{row}]"
        raise CalibrationError(f"{where} is {value!r}, which is not a number.") from None


def _label(value: Any, row: int) -> bool:
    """True for correct, False for wrong; 1 and 0 are accepted, anything in between is not."""
    if value is True or value is False:
        return value
    if isinstance(value, Real | np.bool_) and value in (0, 1):
        return bool(cast(Any, value))
    raise CalibrationError(
        f"correct[{row}] is {value!r}. Each label must be True or False (or 1 or 0; of a "
        f"whole answer also {ABSTAINED!r}): grade first."
    )


def require_same_length(one: str, n_one: int, other: str, n_other: int) -> None:
    if n_one != n_other:
        raise CalibrationError(f"{one} has {n_one} entries and {other} has {n_other}. Pass one of each per answer.")


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
        guarded = (
            f"{self.delivered_wrong / self.delivered:.1%} with it" if self.delivered else "nothing delivered with it"
        )
        return (
            f"error {self.error:.1%} without the guard, {guarded}; withheld: {self.withheld_wrong} of "
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

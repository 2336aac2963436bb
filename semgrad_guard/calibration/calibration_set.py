"""A calibration set: the callers' columns and languages, checked, with errors that name the remedy; and the effect of a
threshold on graded answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from semgrad_guard.declared import Declared, declared
from semgrad_guard.errors import CalibrationError, InputError
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
    _same_length("uncertainties", len(scores), "correct", len(labels))
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


def read_prompts(prompts: Iterable[PromptForm | None], answers: CalibrationSet) -> list[PromptForm]:
    """The prompts of the distinct questions, checked: one for each answer, or None where none was sent."""
    given = read_column(prompts, "prompts")
    _same_length("uncertainties", answers.n + answers.n_duplicates, "prompts", len(given))
    known = any(isinstance(prompt, PromptForm) for prompt in given)
    for row, prompt in enumerate(given):
        if not isinstance(prompt, PromptForm) and (prompt is not None or not known):
            raise CalibrationError(
                f"prompts[{row}] is a {type(prompt).__name__}. Pass what each prompt looked like: a rendered prompt's "
                "`form` (`model.render(conversation).form`), in the answers' order."
            )
    return [prompt for row in answers.rows if (prompt := given[row]) is not None]


def read_grades(machine: Iterable[Any], answers: CalibrationSet, rows: Sequence[int]) -> NDArray[np.bool_]:
    """A grader's grades of these rows, checked; the column has one for each answer, or None."""
    given = read_column(machine, "machine")
    _same_length("uncertainties", answers.n + answers.n_duplicates, "machine", len(given))
    return np.array([_label(given[row], row, column="machine") for row in rows], dtype=np.bool_)


def read_grid(grid: Iterable[float]) -> NDArray[np.float64]:
    """Rising, distinct, finite thresholds; at least one."""
    values = [_score(value, row, column="grid") for row, value in enumerate(read_column(grid, "grid"))]
    if not values:
        raise CalibrationError("The grid is empty. Pass thresholds fixed from unlabelled scores, or leave grid out.")
    rising = np.unique(np.array(values, dtype=np.float64))
    if not np.isfinite(rising).all():
        raise CalibrationError("The grid holds a threshold that is not finite: leave unscored answers out of it.")
    return rising


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


def _first_of_each(groups: Iterable[Hashable], n: int) -> list[int]:
    """Rows to keep: the first of each group, in order. A group is a question's name, which None is not."""
    names = read_column(groups, "groups")
    _same_length("uncertainties", n, "groups", len(names))
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


def _label(value: Any, row: int, *, column: str = "correct") -> bool:
    """True for correct, False for wrong; 1 and 0 are accepted, anything in between is not."""
    if value is True or value is False:
        return value
    if isinstance(value, Real | np.bool_) and value in (0, 1):
        return bool(cast(Any, value))
    raise CalibrationError(f"{column}[{row}] is {value!r}. Each label must be True or False (or 1 or 0): grade first.")


def _same_length(one: str, n_one: int, other: str, n_other: int) -> None:
    if n_one != n_other:
        raise CalibrationError(f"{one} has {n_one} entries and {other} has {n_other}. Pass one of each per answer.")


_TAG = re.compile(r"([A-Za-z]{2,3})(?:-[A-Za-z0-9]{1,8})*")
_TWO_LETTERS = (
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo "
    "es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka "
    "kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng "
    "nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st "
    "su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"
)
"""ISO 639-1: codes of countries (jp, cn, cz) are mistaken for these."""


def read_languages(tags: Iterable[str]) -> tuple[str, ...]:
    """The primary tags, sorted: "pt-BR" counts as "pt". A text is a list with commas.

    Raises:
        InputError: one is no such tag.
    """
    found: set[str] = set()
    for tag in tags.split(",") if isinstance(tags, str) else tags:
        match = _TAG.fullmatch(str(tag).strip())
        primary = "" if match is None else match[1].lower()
        if not primary or (len(primary) == 2 and primary not in _TWO_LETTERS):
            raise InputError(
                f"{str(tag)[:40]!r} is no language tag of BCP 47: write en, de or pt-BR. Languages that you name "
                'for all questions (languages=["de", "fr"]) take the place of the column "language"'
            )
        found.add(primary)
    return tuple(sorted(found))


def doubt_of_grader(languages: Sequence[str], grader: str) -> str | None:
    """A warning where `contains` grades answers that are not all English; `grader` is its name in records."""
    others = [language for language in languages if language not in ("en", "eng")]
    if not others or not grader.startswith("contains"):
        return None
    return (
        f"{grader} reads English. In other languages ({', '.join(others)}) it may call a denial right, and finds no "
        "reference where words are not spaced. Take nli=MODEL or judge=PROVIDER:MODEL, exact-match for answers in few "
        "words, or grades by hand (docs/labels.md)"
    )


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

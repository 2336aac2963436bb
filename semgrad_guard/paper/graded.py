"""The graded answers of one model to one data set: all that tables, figures and the report are made from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from semgrad_guard.errors import InputError
from semgrad_guard.files import atomic_write

T = TypeVar("T")


@dataclass(frozen=True)
class GradedRun:
    """One column of the tables: every method's score for every answer, and whether the answer was right.

    One entry per question everywhere, in the same order. Columns that were not recorded stay empty; the tables and
    figures that need them mention it.

    Args:
        title: the name of the run in the report, for example "Llama-3.1-8B on SciQ"; unique in a report.
        model: the model's name. Runs of one model are side by side.
        data: the name of the questions.
        scores: method (the paper's spelling) -> uncertainty, higher = less certain, None without a score.
        correct: whether the answer is right, by the run's grader.
        milliseconds: method -> run time in addition to plain generation, per question; None where the question was
            not put to the method.
        generation_ms: run time of plain generation, per question.
        mean_entropy: mean token entropy in nats, per question; None where there is none.
        kinds: the kind of each question, for a look at shifts; None where it has none.
        other_graders: grader -> whether the answer is right by that grader instead.
        ablations: variant of SemGrad -> uncertainty, as `scores`.
        clusters: by sentence, the number of the answer that each row is a sentence of; intervals are over answers.
        settings: how the run was made, as plain JSON; shown in the report.

    Raises:
        InputError: no question, no method, columns of different lengths, or a label that is not true or false.
    """

    title: str
    model: str
    data: str
    scores: Mapping[str, Sequence[float | None]]
    correct: Sequence[bool]
    milliseconds: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, Sequence[float | None]])
    generation_ms: Sequence[float] = ()
    mean_entropy: Sequence[float | None] = ()
    kinds: Sequence[str | None] = ()
    other_graders: Mapping[str, Sequence[bool]] = field(default_factory=dict[str, Sequence[bool]])
    ablations: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, Sequence[float | None]])
    clusters: Sequence[int] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("title", "model", "data"):
            if not str(getattr(self, name)).strip():
                raise InputError(f"a graded run needs a {name}: it is what the report calls it")
        self._set("correct", self._column("correct", self.correct, _label))
        if not self.correct:
            raise InputError(f"{self.title} has no answers: a graded run needs at least one question")
        if not self.scores:
            raise InputError(f"{self.title} has no scores: a graded run needs at least one method")
        for name, read in (("scores", _number), ("ablations", _number), ("milliseconds", _number)):
            self._set(name, self._columns(name, read))
        self._set("other_graders", self._columns("other_graders", _label))
        for name, read in (("generation_ms", float), ("mean_entropy", _number), ("kinds", _kind), ("clusters", int)):
            self._set(name, self._column(name, getattr(self, name), read, optional=True))

    @property
    def n(self) -> int:
        """How many questions."""
        return len(self.correct)

    def put_to(self, method: str) -> list[int]:
        """The questions that were put to the method: all of them, unless some have no run time."""
        times = self.milliseconds.get(method, [0.0] * self.n)
        return [row for row, time in enumerate(times) if time is not None]

    @property
    def accuracy(self) -> float:
        """The share of right answers, in [0, 1]."""
        return sum(self.correct) / self.n

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _columns(self, name: str, read: Callable[[Any], T]) -> dict[str, tuple[T, ...]]:
        columns = cast("Mapping[str, Iterable[Any]]", getattr(self, name))
        _unique(f"the {name} of {self.title}", columns)
        return {key: self._column(f"{name}[{key!r}]", column, read) for key, column in columns.items()}

    def _column(
        self, name: str, column: Iterable[Any], read: Callable[[Any], T], *, optional: bool = False
    ) -> tuple[T, ...]:
        """The column's entries, read; as many as there are questions, or none where it was not recorded."""
        entries = list(column)
        try:
            values = tuple(read(entry) for entry in entries)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} of {self.title} cannot be read: {error}") from error
        if name != "correct" and len(values) != self.n and not (optional and not values):
            raise InputError(
                f"{name} of {self.title} has {len(values)} entries and correct has {self.n}; "
                "pass one of each per question"
            )
        return values


def require_distinct(runs: Sequence[GradedRun]) -> None:
    """Refuse an empty list of runs, and two runs of one title: their columns could not be told apart."""
    if not runs:
        raise InputError("there is no run to report on; pass at least one")
    _unique("the runs", [run.title for run in runs])


def _unique(what: str, names: Iterable[str]) -> None:
    """Refuse blank names and names that differ in case or white space only."""
    seen: dict[str, str] = {}
    for name in names:
        key = " ".join(name.split()).casefold()
        if not key:
            raise InputError(f"{what} have an entry without a name")
        if key in seen:
            raise InputError(f"{what} name {name!r} twice ({seen[key]!r} before); give each a name of its own")
        seen[key] = name


def _label(value: Any) -> bool:
    if isinstance(value, bool | np.bool_) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(cast(Any, value))
    raise TypeError(f"{value!r} is neither true nor false")


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if np.isfinite(number) else None


def _kind(value: Any) -> str | None:
    return None if value is None else str(value)


def write_graded(path: Path, run: GradedRun) -> Path:
    """Write the run as JSON."""
    text = json.dumps(asdict(run), ensure_ascii=False)
    return atomic_write(path, text)


def read_graded(path: Path) -> GradedRun:
    """Read a run back.

    Raises:
        InputError: the file is missing, or is not a graded run.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"Cannot read {path}: {error.strerror or error}. Name the folder of an evaluation that has finished."
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a graded run; evaluate (or --regrade) there again.") from error
    content: dict[str, Any] = {"clusters": ()} | cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if set(content) != {field.name for field in fields(GradedRun)}:
        raise InputError(f"{path} is not a graded run; evaluate (or --regrade) there again.")
    return GradedRun(**content)

"""The graded answers of one model to one data set: all that tables, figures and the report are made from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from semgrad_guard.declared import read_record
from semgrad_guard.errors import InputError
from semgrad_guard.files import atomic_write


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
        InputError: no name, no question, no method, or columns of different lengths.
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
        if not (self.title.strip() and self.model.strip() and self.data.strip()):
            raise InputError("a graded run needs a title, a model and a data set: it is what the report calls them")
        if not len(self.correct) or not self.scores:
            raise InputError(f"{self.title} needs one question and one method at least")
        columns: dict[str, Sequence[Any]] = {}
        for name in ("scores", "ablations", "milliseconds", "other_graders"):
            columns |= {f"{name}[{key!r}]": column for key, column in getattr(self, name).items()}
        recorded = ("generation_ms", "mean_entropy", "kinds", "clusters")
        columns |= {name: column for name in recorded if len(column := getattr(self, name))}
        for name, column in columns.items():
            if len(column) != self.n:
                raise InputError(
                    f"{name} of {self.title} has {len(column)} entries and correct has {self.n}; pass one of each per "
                    "question"
                )

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


def require_distinct(runs: Sequence[GradedRun]) -> None:
    """Refuse an empty list of runs, and two runs of one title: their columns could not be told apart."""
    if not runs:
        raise InputError("there is no run to report on; pass at least one")
    titles = [run.title for run in runs]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise InputError(f"two runs are called {twice!r}; give each a title of its own")


def write_graded(path: Path, run: GradedRun) -> Path:
    """Write the run as JSON."""
    return atomic_write(path, json.dumps(asdict(run), ensure_ascii=False))


def read_graded(path: Path) -> GradedRun:
    """Read a run back.

    Raises:
        DataFileError: the file is missing, or is not a graded run.
    """
    advice = "Name the folder of an evaluation that has finished, or evaluate (or --regrade) there again."
    return read_record(GradedRun, path, title="graded run", advice=advice)

"""Every table of the report, from the summaries of its runs: estimates by method, and the best of each column marked.

Titles and explanations are in `tables.toml`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np

from semgrad_guard.files import table_of
from semgrad_guard.paper.results import AURC_AVERAGES, AUROC_AVERAGES, OURS, RUN_TIME_SHARES, in_order
from semgrad_guard.paper.summary import COVERAGES, Estimate, RunSummary, combined, estimate, known, mean
from semgrad_guard.questions.run_record import first_line

_TEXTS: Mapping[str, Mapping[str, str]] = table_of("semgrad_guard.paper", "tables.toml")

Better = Literal["higher", "lower"] | None
Mark = Literal["best", "tied", ""]
NOTHING = estimate(float("nan"), np.full(1, np.nan))
"""An entry that is undefined."""
AVERAGE = "Avg."


@dataclass(frozen=True)
class Cell:
    """An entry. `note` tells why an undefined one is undefined; `mark` is "best" in its column, or "tied" with it."""

    estimate: Estimate = NOTHING
    note: str = ""
    mark: Mark = ""


@dataclass(frozen=True)
class Column:
    """A column: its cells by the names of the rows, its `name` under a `group`, and how its numbers are written.

    Numbers are printed times `scale` with `digits` decimals, with a sign if `signed`. `better` tells which way is good,
    None if neither is. `reference` columns hold the figures of other people, which are not marked.
    """

    name: str
    cells: Mapping[str, Cell]
    group: str = ""
    better: Better = None
    scale: float = 100.0
    digits: int = 1
    signed: bool = False
    reference: bool = False

    def text(self, value: float | None) -> str:
        """The number as printed; a dash for none."""
        if value is None:
            return "–"
        rounded = round(self.scale * value, self.digits) + 0.0
        return f"{rounded:{'+' if self.signed else ''},.{self.digits}f}".replace("-", "−")

    def marked(self) -> Column:
        """The best entry marked, and those whose difference to it may be chance: its interval holds zero."""
        values = {name: cell.estimate.value for name, cell in self.cells.items()}
        defined = {name: value for name, value in values.items() if value is not None}
        if self.better is None or self.reference or len({*defined.values()}) < 2:
            return self
        first = (max if self.better == "higher" else min)(defined, key=defined.__getitem__)
        best = self.cells[first].estimate
        cells = {name: replace(cell, mark=_mark(cell.estimate, best)) for name, cell in self.cells.items()}
        return replace(self, cells=cells)

    @property
    def has_intervals(self) -> bool:
        """Whether an entry has an interval."""
        return any(cell.estimate.low is not None for cell in self.cells.values())


def _mark(mine: Estimate, best: Estimate) -> Mark:
    if mine.value is None:
        return ""
    if mine.value == best.value:
        return "best"
    if len(mine.replicates) != len(best.replicates) or mine.low is None:
        return ""
    return "" if combined([mine, best], [1.0, -1.0]).excludes_zero else "tied"


@dataclass(frozen=True)
class Table:
    """A table: its columns, and the `names` of its rows. `key` names its CSV file, `notes` are printed below it."""

    key: str
    title: str
    columns: tuple[Column, ...]
    names: tuple[str, ...]
    explanation: str = ""
    notes: tuple[str, ...] = ()
    first: str = "Method"

    def groups(self) -> list[tuple[str, int]]:
        """(group, number of columns), for a heading above the columns; [] if no column has a group."""
        spans = [(group, len([*columns])) for group, columns in groupby(self.columns, attrgetter("group"))]
        return spans if any(group for group, _ in spans) else []

    def reasons(self) -> list[str]:
        """Why entries are undefined, each reason once."""
        cells = [column.cells[name] for name in self.names for column in self.columns]
        return list(dict.fromkeys(cell.note for cell in cells if cell.note and cell.estimate.value is None))

    def csv(self) -> str:
        """The numbers as they are (not times `scale`), each with its interval; empty where undefined."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        titles = [f"{column.group}: {column.name}" if column.group else column.name for column in self.columns]
        writer.writerow([self.first, *(f"{title}{part}" for title in titles for part in ("", " (low)", " (high)"))])
        for name in self.names:
            found = [column.cells[name].estimate for column in self.columns]
            numbers = [number for one in found for number in (one.value, one.low, one.high)]
            writer.writerow([name, *("" if number is None else repr(float(number)) for number in numbers)])
        return text.getvalue()


def is_table(path: Path) -> bool:
    """Whether a file is a table of a report: its columns come in threes, a number and the ends of its interval."""
    line = first_line(path).decode(errors="replace")
    header = [name for row in csv.reader([line]) for name in row]
    return len(header) > 1 and all(
        header[i + 1 : i + 3] == [f"{header[i]} (low)", f"{header[i]} (high)"] for i in range(1, len(header), 3)
    )


def all_tables(summaries: Sequence[RunSummary]) -> list[Table]:
    """The tables over all runs, in the report's order; those without data are left out."""
    made = (auroc, differences, aurc, prr, accuracy, confidence, ablation, run_time, graders, kinds)
    return [table for make in made if (table := make(summaries)) is not None]


def guaranteed_tables(summaries: Sequence[RunSummary]) -> list[Table]:
    """Coverage at a guaranteed error rate: one table a run, in the runs' order."""
    tables = [guaranteed(summary) for summary in summaries]
    if len(tables) == 1:
        return tables
    return [replace(table, key=f"{table.key}_{number}") for number, table in enumerate(tables, start=1)]


HIGH, LOW = Column("", {}, better="higher"), Column("", {}, better="lower")
"""The looks of columns."""


def auroc(summaries: Sequence[RunSummary]) -> Table:
    """Table 1 of the paper."""
    unscored = [
        f"{method} {count} of {s.run.n} ({s.run.title})"
        for s in summaries
        for method, count in s.unscored.items()
        if count
    ]
    note = f"Answers without a score are left out of AUROC and never let through: {'; '.join(unscored)}."
    columns = [*_by_run(summaries, "auroc", HIGH), _paper(AUROC_AVERAGES)]
    return _table("table1_auroc", columns, _methods(summaries), [note] if unscored else ())


def aurc(summaries: Sequence[RunSummary]) -> Table:
    """Table 5 of the paper."""
    columns = [*_by_run(summaries, "aurc", LOW), _paper(AURC_AVERAGES)]
    return _table("table5_aurc", columns, _methods(summaries))


def prr(summaries: Sequence[RunSummary]) -> Table:
    """Prediction rejection ratio."""
    return _table("prr", _by_run(summaries, "prr", HIGH), _methods(summaries))


def accuracy(summaries: Sequence[RunSummary]) -> Table:
    """Accuracy of the most certain 30, 50, 70 and 90 per cent, run by run."""
    measures = {f"{c:.0%}": f"accuracy at {c:g}" for c in COVERAGES}
    columns = [_by_measure(s, measures, HIGH, group=_name(s, summaries)) for s in summaries]
    return _table("accuracy_at_coverage", chain(*columns), _methods(summaries))


def differences(summaries: Sequence[RunSummary]) -> Table | None:
    """AUROC and AURC of every method minus HybridGrad's; None if HybridGrad is in no run."""
    compared = [s for s in summaries if OURS in s.run.scores]
    if not compared:
        return None
    columns: list[Column] = []
    for metric in ("auroc", "aurc"):
        look = Column("", {}, metric.upper(), signed=True)
        found = _by_run(compared, f"{metric} difference", look)
        columns += [replace(one, name=_name(s, compared)) for one, s in zip(found, compared, strict=False)]
        columns += found[len(compared) :]
    return _table("differences", columns, [name for name in _methods(compared) if name != OURS])


def confidence(summaries: Sequence[RunSummary]) -> Table:
    """Brier score and expected calibration error of P(correct)."""
    look, measures = replace(LOW, scale=1.0, digits=3), {"Brier": "brier", "ECE": "ece"}
    columns = [_by_measure(s, measures, look, group=s.run.title if len(summaries) > 1 else "") for s in summaries]
    base = "; ".join(f"{s.run.accuracy * (1 - s.run.accuracy):.3f} for {s.run.title}" for s in summaries)
    note = f"Brier score of saying the share of right answers every time: {base}."
    return _table("confidence", chain(*columns), _methods(summaries), [note])


def ablation(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 2 of the paper; None if no variant of SemGrad was run."""
    ablated = [s for s in summaries if s.measured["ablation"]]
    columns = [
        replace(HIGH, name=s.run.data, group=s.run.model, cells={**_cells(s, "auroc"), **_cells(s, "ablation")})
        for s in ablated
    ]
    names = ["SemGrad", *dict.fromkeys(name for s in ablated for name in s.measured["ablation"])]
    return replace(_table("table2_ablation", columns, names), first="Variant") if ablated else None


def graders(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 4 of the paper; None if a single grader judged."""
    judged = [s for s in summaries if s.run.other_graders]
    columns: list[Column] = []
    for s in judged:
        measures = {_first_grader(s): "auroc", **{name: f"auroc by {name}" for name in s.run.other_graders}}
        columns += _by_measure(s, measures, HIGH, group=s.run.title)
    notes = [_agreement(s, name) for s in judged for name in s.run.other_graders]
    return _table("table4_graders", columns, _methods(judged), notes) if judged else None


def kinds(summaries: Sequence[RunSummary]) -> Table | None:
    """AUROC within each kind of question; None if questions have no kinds."""
    several = [s for s in summaries if len(s.kinds) > 1]
    columns = [
        _by_measure(s, {kind: f"auroc within {kind}" for kind in s.kinds}, HIGH, group=s.run.title) for s in several
    ]
    return _table("kinds", chain(*columns), _methods(several)) if several else None


def run_time(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 3 of the paper; None if no run time was recorded."""
    timed = [s for s in summaries if s.measured["run time"]]
    if not timed:
        return None
    look = Column("ms", {}, scale=1.0, signed=True)
    columns: list[Column] = []
    for s in timed:
        columns.append(replace(look, group=s.run.title, cells=_cells(s, "run time")))
        columns.append(replace(look, name="share", group=s.run.title, digits=2, cells=_shares_of_time(s)))
    columns.append(replace(_paper(RUN_TIME_SHARES), name="share", scale=1.0, signed=True))
    recorded = [(s.generation.value, s.run.title) for s in timed if s.generation is not None]
    plain = "; ".join(f"{milliseconds:,.1f} ms in {title}" for milliseconds, title in recorded if milliseconds)
    note = f"Plain generation: {plain}." if plain else "Run time of plain generation was not recorded."
    methods = in_order(dict.fromkeys(method for s in timed for method in s.measured["run time"]))
    return _table("table3_run_time", columns, methods, [note], missing="not measured")


def _shares_of_time(summary: RunSummary) -> dict[str, Cell]:
    """Additional run times as shares of plain generation's."""
    plain = summary.generation
    if plain is None or not plain.value:
        note = "run time of plain generation was not recorded"
        return dict.fromkeys(summary.measured["run time"], Cell(note=note))
    return {
        method: Cell(estimate(time.value / plain.value, time.replicates / plain.replicates))
        for method, time in summary.measured["run time"].items()
        if time.value is not None
    }


def guaranteed(summary: RunSummary) -> Table:
    """Coverage at a guaranteed error rate of one run."""
    columns: list[Column] = []
    for alpha, found in summary.guaranteed.items():
        answered = dict.fromkeys(found, Cell(note="one question cannot be split"))
        over = dict(answered)
        for name, one in found.items():
            if one is not None:
                low, high = np.quantile(one.coverage, [0.1, 0.9])
                answered[name] = Cell(Estimate(one.mean_coverage, float(low), float(high), one.coverage))
                over[name] = Cell(note="nothing is let through") if one.nothing == 1.0 else Cell(known(one.violations))
        columns.append(replace(HIGH, name="answered", group=_promise(alpha), cells=answered))
        columns.append(Column("over", over, _promise(alpha), digits=0))
    notes = [note for alpha in summary.guaranteed if (note := _effect(summary, alpha))]
    return _table("guaranteed_coverage", columns, summary.unscored, notes)


def _table(
    key: str, columns: Iterable[Column], names: Iterable[str], notes: Iterable[str] = (), *, missing: str = "not run"
) -> Table:
    """The table of this key; `missing` is the note where a column lacks a row."""
    rows, text = tuple(names), _TEXTS[key]

    def full(column: Column) -> Column:
        none = Cell(note="" if column.reference else missing)
        return replace(column, cells={name: column.cells.get(name, none) for name in rows})

    made = tuple(full(column).marked() for column in columns)
    return Table(key, text["title"], made, rows, text["explanation"], tuple(notes))


def _by_run(summaries: Sequence[RunSummary], measure: str, look: Column) -> list[Column]:
    """One column a run, and the means of several; none of a method that is missing or undefined in one of them."""
    columns = [
        replace(look, name=s.run.data, group=look.group or s.run.model, cells=_cells(s, measure)) for s in summaries
    ]
    means: dict[str, Cell] = {}
    for name in dict.fromkeys(chain(*(column.cells for column in columns))):
        estimates = [column.cells[name].estimate for column in columns if name in column.cells]
        whole = len(estimates) == len(columns) and all(one.value is not None for one in estimates)
        means[name] = Cell(mean(estimates)) if whole else Cell(note="not defined in every column")
    return [*columns, replace(look, name=AVERAGE, cells=means)] if len(summaries) > 1 else columns


def _by_measure(summary: RunSummary, measures: Mapping[str, str], look: Column, *, group: str) -> list[Column]:
    """One column for each of a run's measures, by their names in the table."""
    return [replace(look, name=name, group=group, cells=_cells(summary, measure)) for name, measure in measures.items()]


def _paper(averages: Mapping[str, float]) -> Column:
    """The paper's own figures."""
    cells = {method: Cell(known(figure)) for method, figure in averages.items()}
    return Column(AVERAGE, cells, "Paper", digits=2, reference=True)


def _cells(summary: RunSummary, measure: str) -> dict[str, Cell]:
    """A measure of every method, or variant, of a run that has it."""
    right, n = sum(summary.run.correct), summary.run.n
    why = "the answers with a score are all right, or all wrong"
    if right in (0, n):
        why = f"all {n} answers are {'right' if right else 'wrong'}"
    return {
        name: Cell(found, why if summary.unscored.get(name, 0) < n else "no answer has a score")
        for name, found in summary.measured[measure].items()
    }


def _methods(summaries: Sequence[RunSummary]) -> list[str]:
    """Every method of any run, in the paper's order."""
    return in_order(dict.fromkeys(method for s in summaries for method in s.unscored))


def _name(summary: RunSummary, summaries: Sequence[RunSummary]) -> str:
    """A run's name above its columns: as short as tells it from the others."""
    return summary.run.data if len({s.run.model for s in summaries}) == 1 else summary.run.title


def _promise(alpha: float) -> str:
    return f"at most {100 * alpha:g}% wrong"


def _effect(summary: RunSummary, alpha: float) -> str | None:
    """The effect of a guard with the method that answers most; a warning if it may withhold nothing."""
    found = {name: one for name, one in summary.guaranteed[alpha].items() if one is not None}
    if not found:
        return None
    error = 1 - summary.run.accuracy
    best = max(found, key=lambda name: found[name].mean_coverage)
    guarded = found[best]
    if guarded.nothing == 1.0:
        return f"{_promise(alpha).capitalize()}: nothing is let through; without a guard {error:.1%} are wrong."
    doubt = " The promise is not below the error rate without a guard." if alpha >= error else ""
    withheld = f"{guarded.withheld_wrong:.0%} of the wrong answers, {guarded.withheld_right:.0%} of the right ones"
    return (
        f"{_promise(alpha).capitalize()}, by {best}: error {error:.1%} without the guard, {guarded.mean_risk:.1%} with "
        f"it; withheld: {withheld}.{doubt}"
    )


def _first_grader(summary: RunSummary) -> str:
    return str(summary.run.settings.get("grader", "grader"))


def _agreement(summary: RunSummary, grader: str) -> str:
    """How often two graders agree, and beyond chance (Cohen's kappa)."""
    first = _first_grader(summary)
    one, other = np.array(summary.run.correct), np.array(summary.run.other_graders[grader])
    agree = float((one == other).mean())
    chance = float(one.mean() * other.mean() + (1 - one.mean()) * (1 - other.mean()))
    kappa = "" if chance == 1.0 else f" (Cohen's kappa {(agree - chance) / (1 - chance):.2f})"
    return (
        f"{summary.run.title}: {grader} and {first} agree on {agree:.1%} of the answers{kappa}; "
        f"{other.mean():.1%} are right by {grader}, {one.mean():.1%} by {first}."
    )

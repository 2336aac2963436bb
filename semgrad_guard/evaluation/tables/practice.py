"""Tables of what a method means in practice: what a promise lets through, how honest P(correct) is, what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semgrad_guard.evaluation import paper
from semgrad_guard.evaluation.graded.summary import RunSummary
from semgrad_guard.evaluation.metrics.bootstrap import Estimate, estimate, known
from semgrad_guard.evaluation.metrics.guarantee import DELTA, GuaranteedCoverage
from semgrad_guard.evaluation.tables.quality import methods, why_undefined
from semgrad_guard.evaluation.tables.table import NOTHING, Cell, Column, Row, Table, marked


def guaranteed(summary: RunSummary, *, key: str = "guaranteed_coverage") -> Table:
    """Coverage at a guaranteed error rate of one run."""
    columns = [
        column
        for alpha in summary.alphas
        for column in (
            Column("answered", _promise(alpha), better="higher"),
            Column("over", _promise(alpha), digits=0),
        )
    ]
    rows = [
        Row(name, tuple(cell for alpha in summary.alphas for cell in _guaranteed_cells(found.guaranteed[alpha])))
        for name, found in summary.methods.items()
    ]
    text = (
        "Share of all questions answered, in per cent, when the error rate among the answered is promised to stay "
        f"within the figure above the column, with {1 - DELTA:.0%} probability. Calibrated on one half of the "
        "questions, measured on the other: the mean over seeded halves, and the range of the middle 80 per cent of "
        "them. “Over” is the share of halves, in per cent, whose error rate came out above the promise: about "
        f"{100 * DELTA:.0f} or less is right; small measuring halves scatter above it."
    )
    notes = tuple(note for alpha in summary.alphas if (note := _effect(summary, alpha)) is not None)
    return marked(Table(key, "Coverage at a guaranteed error rate", tuple(columns), tuple(rows), text, notes))


def _effect(summary: RunSummary, alpha: float) -> str | None:
    """What the guard does with the method that answers most; a warning where it has nothing to do."""
    found = {name: each.guaranteed[alpha] for name, each in summary.methods.items()}
    coverage = {name: each.mean_coverage for name, each in found.items() if each is not None}
    error = 1 - summary.run.accuracy
    if not coverage:
        return None
    best = max(coverage, key=lambda name: coverage[name])
    guarded = found[best]
    if guarded is None or guarded.nothing == 1.0:
        return f"{_promise(alpha).capitalize()}: nothing is let through; without a guard {error:.1%} are wrong."
    doubt = " The promise is not below the error rate without a guard." if alpha >= error else ""
    withheld = f"{guarded.withheld_wrong:.0%} of the wrong answers, {guarded.withheld_right:.0%} of the right ones"
    return (
        f"{_promise(alpha).capitalize()}, by {best}: error {error:.1%} without the guard, {guarded.mean_risk:.1%} with "
        f"it; withheld: {withheld}.{doubt}"
    )


def confidence(summaries: Sequence[RunSummary]) -> Table:
    """Brier score and expected calibration error of P(correct)."""
    columns = [
        Column(name, summary.run.title if len(summaries) > 1 else "", better="lower", scale=1.0, digits=3)
        for summary in summaries
        for name in ("Brier", "ECE")
    ]
    rows: list[Row] = []
    for method in methods(summaries):
        found = [s.methods.get(method) for s in summaries]
        cells = [Cell(e) for each in found for e in ((each.brier, each.ece) if each else (NOTHING, NOTHING))]
        rows.append(Row(method, tuple(cells)))
    base = "; ".join(f"{s.run.accuracy * (1 - s.run.accuracy):.3f} for {s.run.title}" for s in summaries)
    text = (
        "How honest P(correct) is after isotonic regression, fitted on four fifths of the answers and judged on the "
        "last fifth, in turn: Brier score (mean squared error) and expected calibration error in ten bins."
    )
    note = f"Brier score of saying the share of right answers every time: {base}."
    return marked(Table("confidence", "Honesty of P(correct)", tuple(columns), tuple(rows), text, (note,)))


def run_time(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 3 of the paper; None where no run time was recorded."""
    timed = [s for s in summaries if s.run_time]
    if not timed:
        return None
    columns = [
        column
        for s in timed
        for column in (
            Column("ms", s.run.title, scale=1.0, digits=1, signed=True),
            Column("share", s.run.title, scale=1.0, digits=2, signed=True),
        )
    ]
    columns.append(Column("share", "Paper", scale=1.0, digits=2, signed=True, reference=True))
    rows = [
        Row(method, (*(cell for s in timed for cell in _time_cells(s, method)), _paper_share(method)))
        for method in paper.in_order(dict.fromkeys(m for s in timed for m in s.run_time))
    ]
    plain = "; ".join(
        f"{s.generation.value:,.1f} ms in {s.run.title}"
        for s in timed
        if s.generation is not None and s.generation.value
    )
    text = (
        "Additional run time per question beside plain generation, in milliseconds and as a share of generation. The "
        "paper's share is of Llama 3.1 8B on an A100, over its three data sets."
    )
    notes = (f"Plain generation: {plain}.",) if plain else ("Run time of plain generation was not recorded.",)
    return Table("table3_run_time", "Run time", tuple(columns), tuple(rows), text, notes)


def graders(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 4 of the paper; None where a single grader judged."""
    judged = [s for s in summaries if s.graders]
    if not judged:
        return None
    names = {s.run.title: [first_grader(s), *s.graders] for s in judged}
    columns = [Column(name, s.run.title, better="higher") for s in judged for name in names[s.run.title]]
    rows: list[Row] = []
    for method in methods(judged):
        cells: list[Cell] = []
        for s in judged:
            found = s.methods.get(method)
            cells.append(Cell(found.quality["auroc"], why_undefined(s)) if found else Cell(note="not run"))
            cells += [Cell(by.get(method, NOTHING), "all answers are right, or all wrong") for by in s.graders.values()]
        rows.append(Row(method, tuple(cells)))
    notes = tuple(_agreement(s, name) for s in judged for name in s.graders)
    text = "AUROC, in per cent, when another grader says which answers are right."
    return marked(Table("table4_graders", "Judge against grader", tuple(columns), tuple(rows), text, notes))


def kinds(summaries: Sequence[RunSummary]) -> Table | None:
    """AUROC within each kind of question; None where questions have no kinds."""
    sorted_out = [s for s in summaries if len(s.kinds) > 1]
    if not sorted_out:
        return None
    columns = [Column(kind, s.run.title, better="higher") for s in sorted_out for kind in s.kinds]
    rows = [
        Row(
            method,
            tuple(
                Cell(by.get(method, NOTHING), "all answers of this kind are right, or all wrong")
                for s in sorted_out
                for by in s.kinds.values()
            ),
        )
        for method in methods(sorted_out)
    ]
    text = "AUROC, in per cent, among questions of one kind."
    return marked(Table("kinds", "By kind of question", tuple(columns), tuple(rows), text))


def first_grader(summary: RunSummary) -> str:
    """The name of the run's own grader, where its settings say it."""
    return str(summary.run.settings.get("grader", "grader"))


def _promise(alpha: float) -> str:
    return f"at most {100 * alpha:g}% wrong"


def _guaranteed_cells(found: GuaranteedCoverage | None) -> tuple[Cell, Cell]:
    if found is None:
        missing = Cell(note="one question cannot be split")
        return missing, missing
    low, high = np.quantile(found.coverage, [0.1, 0.9])
    covered = Estimate(found.mean_coverage, float(low), float(high), found.coverage)
    over = Cell(note="nothing is let through") if found.nothing == 1.0 else Cell(known(found.violations))
    return Cell(covered), over


def _time_cells(summary: RunSummary, method: str) -> tuple[Cell, Cell]:
    found, plain = summary.run_time.get(method), summary.generation
    if found is None:
        return Cell(note="not measured"), Cell(note="not measured")
    if plain is None or not plain.value or found.value is None:
        return Cell(found), Cell(note="run time of plain generation was not recorded")
    share = estimate(found.value / plain.value, found.replicates / plain.replicates)
    return Cell(found), Cell(share)


def _paper_share(method: str) -> Cell:
    share = paper.RUN_TIME_SHARES.get(method)
    return Cell() if share is None else Cell(known(share))


def _agreement(summary: RunSummary, grader: str) -> str:
    """How often two graders agree, and beyond chance (Cohen's kappa)."""
    one, other = np.array(summary.run.correct), np.array(summary.run.other_graders[grader])
    agree = float((one == other).mean())
    chance = float(one.mean() * other.mean() + (1 - one.mean()) * (1 - other.mean()))
    kappa = "" if chance == 1.0 else f" (Cohen's kappa {(agree - chance) / (1 - chance):.2f})"
    return (
        f"{summary.run.title}: {grader} and {first_grader(summary)} agree on {agree:.1%} of the answers{kappa}; "
        f"{other.mean():.1%} are right by {grader}, {one.mean():.1%} by {first_grader(summary)}."
    )

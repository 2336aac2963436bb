"""Every table of the report, from the summaries of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from semgrad_guard.paper import published
from semgrad_guard.paper.guarantee import DELTA, GuaranteedCoverage
from semgrad_guard.paper.intervals import Estimate, estimate, known, mean
from semgrad_guard.paper.summary import COVERAGES, MethodSummary, RunSummary
from semgrad_guard.paper.table import NOTHING, Better, Cell, Column, Row, Table, marked

AVERAGE = "Avg."

Pick = Callable[[MethodSummary], Estimate]
Entry = Callable[[str], Cell]
"""The entry of a column in the row of this name."""


def all_tables(summaries: Sequence[RunSummary]) -> list[Table]:
    """The tables over all runs, in the report's order; those without data are left out."""
    tables = [
        auroc(summaries),
        differences(summaries),
        aurc(summaries),
        prr(summaries),
        accuracy(summaries),
        confidence(summaries),
        ablation(summaries),
        run_time(summaries),
        graders(summaries),
        kinds(summaries),
    ]
    return [table for table in tables if table is not None]


def guaranteed_tables(summaries: Sequence[RunSummary]) -> list[Table]:
    """Coverage at a guaranteed error rate: one table a run, in the runs' order."""
    key = "guaranteed_coverage"
    if len(summaries) == 1:
        return [guaranteed(summaries[0], key=key)]
    return [guaranteed(summary, key=f"{key}_{number}") for number, summary in enumerate(summaries, start=1)]


def auroc(summaries: Sequence[RunSummary]) -> Table:
    """Table 1 of the paper."""
    unscored = [
        f"{method} {found.unscored} of {s.run.n} ({s.run.title})"
        for s in summaries
        for method, found in s.methods.items()
        if found.unscored
    ]
    note = f"Answers without a score are left out of AUROC and never let through: {'; '.join(unscored)}."
    text = "How often a wrong answer is less certain than a right one, in per cent: 50 is chance."
    table = _by_run(summaries, "table1_auroc", "AUROC", text, better="higher", reference=published.AUROC_AVERAGES)
    return replace(table, notes=(note,) if unscored else ())


def aurc(summaries: Sequence[RunSummary]) -> Table:
    """Table 5 of the paper."""
    text = (
        "Error rate among the answers let through, in per cent, averaged over all shares let through. "
        "It depends on how many answers are right: compare within a column only."
    )
    return _by_run(summaries, "table5_aurc", "AURC", text, better="lower", reference=published.AURC_AVERAGES)


def prr(summaries: Sequence[RunSummary]) -> Table:
    """Prediction rejection ratio."""
    text = "What rejecting the least certain answers gains, in per cent of an oracle's gain: 0 is chance."
    return _by_run(summaries, "prr", "PRR", text, better="higher")


def accuracy(summaries: Sequence[RunSummary]) -> Table:
    """Accuracy of the most certain 30, 50, 70 and 90 per cent, run by run."""
    text = "Share of right answers, in per cent, among the most certain 30, 50, 70 and 90 per cent."
    columns = [
        (Column(f"{c:.0%}", _name(s, summaries), better="higher"), _metric(s, f"accuracy at {c:g}"))
        for s in summaries
        for c in COVERAGES
    ]
    return _table("accuracy_at_coverage", "Accuracy at a coverage", text, _methods(summaries), columns)


def differences(summaries: Sequence[RunSummary]) -> Table | None:
    """AUROC and AURC of every method minus HybridGrad's; None if HybridGrad is in no run."""
    compared = [s for s in summaries if published.OURS in s.methods]
    if not compared:
        return None
    text = (
        f"Method minus {published.OURS}, in points, on the answers that both have scored. A positive AUROC or a "
        "negative AURC speaks for the method; where the interval holds 0, the difference may be chance."
    )
    columns: list[tuple[Column, Entry]] = []
    for metric, pick in (("AUROC", _difference_in("auroc")), ("AURC", _difference_in("aurc"))):
        columns += [(Column(_name(s, compared), metric, signed=True), _entry(s, pick)) for s in compared]
        if len(compared) > 1:
            columns.append((Column(AVERAGE, metric, signed=True), _average(compared, pick)))
    others = [method for method in _methods(compared) if method != published.OURS]
    return _table("differences", f"Differences to {published.OURS}", text, others, columns)


def ablation(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 2 of the paper; None if no variant of SemGrad was run."""
    ablated = [s for s in summaries if s.ablations]
    if not ablated:
        return None

    def variant(s: RunSummary) -> Entry:
        proposed = _metric(s, "auroc")

        def entry(name: str) -> Cell:
            if name == "SemGrad":
                return proposed(name)
            return Cell(s.ablations[name], _why_undefined(s)) if name in s.ablations else Cell()

        return entry

    text = "AUROC, in per cent, of SemGrad as proposed and of its variants."
    columns = [(Column(s.run.data, s.run.model, better="higher"), variant(s)) for s in ablated]
    names = ["SemGrad", *dict.fromkeys(name for s in ablated for name in s.ablations)]
    return replace(_table("table2_ablation", "Ablation of SemGrad", text, names, columns), first="Variant")


def guaranteed(summary: RunSummary, *, key: str = "guaranteed_coverage") -> Table:
    """Coverage at a guaranteed error rate of one run."""

    def answered(found: GuaranteedCoverage) -> Cell:
        low, high = np.quantile(found.coverage, [0.1, 0.9])
        return Cell(Estimate(found.mean_coverage, float(low), float(high), found.coverage))

    def over(found: GuaranteedCoverage) -> Cell:
        return Cell(note="nothing is let through") if found.nothing == 1.0 else Cell(known(found.violations))

    def entry(alpha: float, read: Callable[[GuaranteedCoverage], Cell]) -> Entry:
        def cell(method: str) -> Cell:
            found = summary.methods[method].guaranteed[alpha]
            return Cell(note="one question cannot be split") if found is None else read(found)

        return cell

    columns: list[tuple[Column, Entry]] = []
    for alpha in summary.alphas:
        columns.append((Column("answered", _promise(alpha), better="higher"), entry(alpha, answered)))
        columns.append((Column("over", _promise(alpha), digits=0), entry(alpha, over)))
    text = (
        "Share of all questions answered, in per cent, when the error rate among the answered is promised to stay "
        f"within the figure above the column, with {1 - DELTA:.0%} probability. Calibrated on one half of the "
        "questions, measured on the other: the mean over seeded halves, and the range of the middle 80 per cent of "
        "them. “Over” is the share of halves, in per cent, whose error rate came out above the promise: about "
        f"{100 * DELTA:.0f} or less is right; small measuring halves scatter above it."
    )
    table = _table(key, "Coverage at a guaranteed error rate", text, summary.methods, columns)
    return replace(table, notes=tuple(note for alpha in summary.alphas if (note := _effect(summary, alpha))))


def confidence(summaries: Sequence[RunSummary]) -> Table:
    """Brier score and expected calibration error of P(correct)."""

    def entry(s: RunSummary, pick: Pick) -> Entry:
        return lambda method: Cell(pick(s.methods[method])) if method in s.methods else Cell()

    columns: list[tuple[Column, Entry]] = []
    for s in summaries:
        title = s.run.title if len(summaries) > 1 else ""
        look = Column("Brier", title, better="lower", scale=1.0, digits=3)
        columns.append((look, entry(s, lambda found: found.brier)))
        columns.append((replace(look, name="ECE"), entry(s, lambda found: found.ece)))
    text = (
        "How honest P(correct) is after isotonic regression, fitted on four fifths of the answers and judged on the "
        "last fifth, in turn: Brier score (mean squared error) and expected calibration error in ten bins."
    )
    base = "; ".join(f"{s.run.accuracy * (1 - s.run.accuracy):.3f} for {s.run.title}" for s in summaries)
    note = f"Brier score of saying the share of right answers every time: {base}."
    return replace(
        _table("confidence", "Honesty of P(correct)", text, _methods(summaries), columns),
        notes=(note,),
    )


def run_time(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 3 of the paper; None if no run time was recorded."""
    timed = [s for s in summaries if s.run_time]
    if not timed:
        return None

    def added(s: RunSummary) -> Entry:
        return lambda method: Cell(s.run_time[method]) if method in s.run_time else Cell(note="not measured")

    def share(s: RunSummary) -> Entry:
        def cell(method: str) -> Cell:
            time, plain = s.run_time.get(method), s.generation
            if time is None:
                return Cell(note="not measured")
            if plain is None or not plain.value or time.value is None:
                return Cell(note="run time of plain generation was not recorded")
            return Cell(estimate(time.value / plain.value, time.replicates / plain.replicates))

        return cell

    columns: list[tuple[Column, Entry]] = []
    for s in timed:
        columns.append((Column("ms", s.run.title, scale=1.0, digits=1, signed=True), added(s)))
        columns.append((Column("share", s.run.title, scale=1.0, digits=2, signed=True), share(s)))
    reference = Column("share", "Paper", scale=1.0, digits=2, signed=True, reference=True)
    columns.append((reference, _reference(published.RUN_TIME_SHARES)))
    text = (
        "Additional run time per question, compared with plain generation, in milliseconds and as a share of "
        "generation. The paper's share is of Llama 3.1 8B on an A100, over its three data sets."
    )
    plain = "; ".join(
        f"{s.generation.value:,.1f} ms in {s.run.title}"
        for s in timed
        if s.generation is not None and s.generation.value
    )
    note = f"Plain generation: {plain}." if plain else "Run time of plain generation was not recorded."
    methods = published.in_order(dict.fromkeys(method for s in timed for method in s.run_time))
    return replace(_table("table3_run_time", "Run time", text, methods, columns), notes=(note,))


def graders(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 4 of the paper; None if a single grader judged."""
    judged = [s for s in summaries if s.graders]
    if not judged:
        return None
    columns: list[tuple[Column, Entry]] = []
    for s in judged:
        columns.append((Column(_first_grader(s), s.run.title, better="higher"), _metric(s, "auroc")))
        columns += [
            (Column(name, s.run.title, better="higher"), _of_each(by, "all answers are right, or all wrong"))
            for name, by in s.graders.items()
        ]
    text = "AUROC, in per cent, when another grader says which answers are right."
    table = _table("table4_graders", "Judge against grader", text, _methods(judged), columns)
    return replace(table, notes=tuple(_agreement(s, name) for s in judged for name in s.graders))


def kinds(summaries: Sequence[RunSummary]) -> Table | None:
    """AUROC within each kind of question; None if questions have no kinds."""
    several = [s for s in summaries if len(s.kinds) > 1]
    if not several:
        return None
    columns = [
        (Column(kind, s.run.title, better="higher"), _of_each(by, "all answers of this kind are right, or all wrong"))
        for s in several
        for kind, by in s.kinds.items()
    ]
    text = "AUROC, in per cent, among questions of one kind."
    return _table("kinds", "By kind of question", text, _methods(several), columns)


def _table(
    key: str, title: str, explanation: str, names: Iterable[str], columns: Sequence[tuple[Column, Entry]]
) -> Table:
    rows = tuple(Row(name, tuple(entry(name) for _, entry in columns)) for name in names)
    return marked(Table(key, title, tuple(column for column, _ in columns), rows, explanation))


def _by_run(
    summaries: Sequence[RunSummary],
    key: str,
    metric: str,
    explanation: str,
    *,
    better: Better,
    reference: Mapping[str, float] | None = None,
) -> Table:
    """One column a run, the average of several, and the paper's average."""
    name = metric.lower()
    columns = [(Column(s.run.data, s.run.model, better=better), _metric(s, name)) for s in summaries]
    if len(summaries) > 1:
        columns.append((Column(AVERAGE, better=better), _average(summaries, lambda found: found.quality[name])))
    if reference is not None:
        columns.append((Column(AVERAGE, "Paper", digits=2, reference=True), _reference(reference)))
    return _table(key, metric, explanation, _methods(summaries), columns)


def _metric(summary: RunSummary, name: str) -> Entry:
    return _entry(summary, lambda found: found.quality[name])


def _difference_in(name: str) -> Pick:
    return lambda found: found.difference[name]


def _entry(summary: RunSummary, pick: Pick) -> Entry:
    def cell(method: str) -> Cell:
        if method not in summary.methods:
            return Cell(note="not run")
        scored = summary.methods[method].unscored < summary.run.n
        return Cell(pick(summary.methods[method]), _why_undefined(summary) if scored else "no answer has a score")

    return cell


def _average(summaries: Sequence[RunSummary], pick: Pick) -> Entry:
    """The mean over all runs; none if the method is missing or undefined in one of them."""

    def cell(method: str) -> Cell:
        found = [pick(s.methods[method]) for s in summaries if method in s.methods]
        if len(found) < len(summaries) or any(estimate.value is None for estimate in found):
            return Cell(note="not defined in every column")
        return Cell(mean(found))

    return cell


def _reference(figures: Mapping[str, float]) -> Entry:
    return lambda method: Cell(known(figures[method])) if method in figures else Cell()


def _of_each(estimates: Mapping[str, Estimate], note: str) -> Entry:
    return lambda method: Cell(estimates.get(method, NOTHING), note)


def _methods(summaries: Sequence[RunSummary]) -> list[str]:
    """Every method of any run, in the paper's order."""
    return published.in_order(dict.fromkeys(method for s in summaries for method in s.methods))


def _name(summary: RunSummary, summaries: Sequence[RunSummary]) -> str:
    """A run's name above its columns: as short as tells it from the others."""
    return summary.run.data if len({s.run.model for s in summaries}) == 1 else summary.run.title


def _why_undefined(summary: RunSummary) -> str:
    right = sum(summary.run.correct)
    if right in (0, summary.run.n):
        return f"all {summary.run.n} answers are {'right' if right else 'wrong'}"
    return "the answers with a score are all right, or all wrong"


def _promise(alpha: float) -> str:
    return f"at most {100 * alpha:g}% wrong"


def _effect(summary: RunSummary, alpha: float) -> str | None:
    """The effect of a guard with the method that answers most; a warning if it may withhold nothing."""
    found = {name: g for name, method in summary.methods.items() if (g := method.guaranteed[alpha]) is not None}
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

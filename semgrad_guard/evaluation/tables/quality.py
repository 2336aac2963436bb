"""Tables of how well methods tell right from wrong: AUROC, AURC, PRR, accuracy at a coverage, and differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from semgrad_guard.evaluation import paper
from semgrad_guard.evaluation.graded.summary import COVERAGES, MethodSummary, RunSummary
from semgrad_guard.evaluation.metrics.bootstrap import Estimate, known, mean
from semgrad_guard.evaluation.tables.table import Better, Cell, Column, Row, Table, marked

Pick = Callable[[MethodSummary], Estimate]
AVERAGE = "Avg."


def auroc(summaries: Sequence[RunSummary]) -> Table:
    """Table 1 of the paper."""
    table = _by_run(
        summaries,
        "table1_auroc",
        "AUROC",
        lambda method: method.quality["auroc"],
        better="higher",
        reference=paper.AUROC_AVERAGES,
        explanation="How often a wrong answer is less certain than a right one, in per cent: 50 is chance.",
    )
    return replace(table, notes=_unscored(summaries))


def aurc(summaries: Sequence[RunSummary]) -> Table:
    """Table 5 of the paper."""
    return _by_run(
        summaries,
        "table5_aurc",
        "AURC",
        lambda method: method.quality["aurc"],
        better="lower",
        reference=paper.AURC_AVERAGES,
        explanation="Error rate among the answers let through, in per cent, averaged over all shares let through. "
        "It depends on how many answers are right: compare within a column only.",
    )


def prr(summaries: Sequence[RunSummary]) -> Table:
    """Prediction rejection ratio."""
    return _by_run(
        summaries,
        "prr",
        "PRR",
        lambda method: method.quality["prr"],
        better="higher",
        explanation="What rejecting the least certain answers gains, in per cent of an oracle's gain: 0 is chance.",
    )


def accuracy(summaries: Sequence[RunSummary]) -> Table:
    """Accuracy of the most certain 30, 50, 70 and 90 per cent, run by run."""
    columns = [Column(f"{c:.0%}", _name(s, summaries), better="higher") for s in summaries for c in COVERAGES]
    rows = [
        Row(
            method,
            tuple(
                _cell(s, method, lambda found, c=c: found.quality[f"accuracy at {c:g}"])
                for s in summaries
                for c in COVERAGES
            ),
        )
        for method in methods(summaries)
    ]
    text = "Share of right answers, in per cent, among the most certain 30, 50, 70 and 90 per cent."
    return marked(Table("accuracy_at_coverage", "Accuracy at a coverage", tuple(columns), tuple(rows), text))


def differences(summaries: Sequence[RunSummary]) -> Table | None:
    """AUROC and AURC of every method minus HybridGrad's; None where HybridGrad is in no run."""
    compared = [s for s in summaries if paper.OURS in s.methods]
    if not compared:
        return None
    names = [("auroc", "AUROC", "higher"), ("aurc", "AURC", "lower")]
    columns: list[Column] = []
    picks: list[Callable[[str], Cell]] = []
    for key, metric, _ in names:
        for s in compared:
            columns.append(Column(_name(s, compared), metric, signed=True))
            picks.append(lambda method, s=s, key=key: _cell(s, method, lambda found: found.difference[key]))
        if len(compared) > 1:
            columns.append(Column(AVERAGE, metric, signed=True))
            picks.append(lambda method, key=key: _average(compared, method, lambda found: found.difference[key]))
    rows = [Row(m, tuple(pick(m) for pick in picks)) for m in methods(compared) if m != paper.OURS]
    text = (
        f"Method minus {paper.OURS}, in points, on the answers that both have scored. A positive AUROC or a negative "
        "AURC speaks for the method; where the interval holds 0, the difference may be chance."
    )
    title = f"Differences to {paper.OURS}"
    return Table("differences", title, tuple(columns), tuple(rows), text)


def ablation(summaries: Sequence[RunSummary]) -> Table | None:
    """Table 2 of the paper; None where no variant of SemGrad was run."""
    ablated = [s for s in summaries if s.ablations]
    if not ablated:
        return None
    names = list(dict.fromkeys(name for s in ablated for name in s.ablations))
    rows = [Row("SemGrad", tuple(_cell(s, "SemGrad", lambda found: found.quality["auroc"]) for s in ablated))]
    rows += [
        Row(name, tuple(Cell(s.ablations[name], why_undefined(s)) if name in s.ablations else Cell() for s in ablated))
        for name in names
    ]
    columns = [Column(s.run.data, s.run.model, better="higher") for s in ablated]
    text = "AUROC, in per cent, of SemGrad as proposed and of its variants."
    return marked(Table("table2_ablation", "Ablation of SemGrad", tuple(columns), tuple(rows), text, first="Variant"))


def methods(summaries: Sequence[RunSummary]) -> list[str]:
    """Every method of any run, in the paper's order."""
    return paper.in_order(dict.fromkeys(method for s in summaries for method in s.methods))


def why_undefined(summary: RunSummary) -> str:
    """What makes AUROC undefined on this run."""
    right = sum(summary.run.correct)
    if right in (0, summary.run.n):
        return f"all {summary.run.n} answers are {'right' if right else 'wrong'}"
    return "the answers with a score are all right, or all wrong"


def _by_run(
    summaries: Sequence[RunSummary],
    key: str,
    title: str,
    pick: Pick,
    *,
    better: Better,
    explanation: str,
    reference: Mapping[str, float] | None = None,
) -> Table:
    """One column a run, the average of several, and the paper's average."""
    columns = [Column(s.run.data, s.run.model, better=better) for s in summaries]
    if len(summaries) > 1:
        columns.append(Column(AVERAGE, better=better))
    if reference is not None:
        columns.append(Column(AVERAGE, "Paper", digits=2, reference=True))
    rows: list[Row] = []
    for method in methods(summaries):
        cells = [_cell(s, method, pick) for s in summaries]
        if len(summaries) > 1:
            cells.append(_average(summaries, method, pick))
        if reference is not None:
            cells.append(Cell(known(reference[method])) if method in reference else Cell())
        rows.append(Row(method, tuple(cells)))
    return marked(Table(key, title, tuple(columns), tuple(rows), explanation))


def _cell(summary: RunSummary, method: str, pick: Pick) -> Cell:
    if method not in summary.methods:
        return Cell(note="not run")
    found = pick(summary.methods[method])
    if found.value is not None:
        return Cell(found)
    scored = summary.methods[method].unscored < summary.run.n
    return Cell(found, why_undefined(summary) if scored else "no answer has a score")


def _average(summaries: Sequence[RunSummary], method: str, pick: Pick) -> Cell:
    """The mean over all runs; none where the method is missing or undefined in one of them."""
    found = [pick(s.methods[method]) for s in summaries if method in s.methods]
    if len(found) < len(summaries) or any(each.value is None for each in found):
        return Cell(note="not defined in every column")
    return Cell(mean(found))


def _unscored(summaries: Sequence[RunSummary]) -> tuple[str, ...]:
    """Which methods have answers without a score, in words."""
    found = [
        f"{method} {each.unscored} of {s.run.n} ({s.run.title})"
        for s in summaries
        for method, each in s.methods.items()
        if each.unscored
    ]
    if not found:
        return ()
    return (f"Answers without a score are left out of AUROC and never let through: {'; '.join(found)}.",)


def _name(summary: RunSummary, summaries: Sequence[RunSummary]) -> str:
    """A run's name above its columns: as short as tells it from the others."""
    if len({s.run.model for s in summaries}) == 1:
        return summary.run.data
    return summary.run.title

"""Every table of the report, from the summaries of its runs."""

from __future__ import annotations

from collections.abc import Sequence

from semgrad_guard.evaluation.graded.summary import RunSummary
from semgrad_guard.evaluation.tables import practice, quality
from semgrad_guard.evaluation.tables.table import Cell, Column, Row, Table

__all__ = ["Cell", "Column", "Row", "Table", "all_tables", "guaranteed_tables"]


def all_tables(summaries: Sequence[RunSummary]) -> list[Table]:
    """The tables over all runs, in the report's order; those without data are left out."""
    found = [
        quality.auroc(summaries),
        quality.differences(summaries),
        quality.aurc(summaries),
        quality.prr(summaries),
        quality.accuracy(summaries),
        practice.confidence(summaries),
        quality.ablation(summaries),
        practice.run_time(summaries),
        practice.graders(summaries),
        practice.kinds(summaries),
    ]
    return [table for table in found if table is not None]


def guaranteed_tables(summaries: Sequence[RunSummary]) -> list[Table]:
    """Coverage at a guaranteed error rate: one table a run, in the runs' order."""
    key = "guaranteed_coverage"
    if len(summaries) == 1:
        return [practice.guaranteed(summaries[0], key=key)]
    return [practice.guaranteed(each, key=f"{key}_{number}") for number, each in enumerate(summaries, start=1)]

"""Tables: every number against the metric of its column, marks, undefined entries, CSV; and the paper's own."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from semgrad_guard import metrics
from semgrad_guard.metrics import tally
from semgrad_guard.paper import results, tables
from semgrad_guard.paper.coverage import guaranteed_coverage
from semgrad_guard.paper.results import GradedRun
from semgrad_guard.paper.summary import RunSummary, estimate, summarize
from semgrad_guard.paper.tables import Cell, Column, Table, all_tables, guaranteed_tables
from tests.made_answers import example_run

METHODS = ("HybridGrad", "SemGrad", "LN-PE", "Homemade")


def summary(run: GradedRun) -> RunSummary:
    return summarize(run, count=60, splits=4)


@pytest.fixture(scope="module")
def runs() -> list[GradedRun]:
    return [example_run(n=80, methods=METHODS, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def summaries(runs: list[GradedRun]) -> list[RunSummary]:
    return [summary(run) for run in runs]


def numbers(table: Table) -> dict[str, list[float | None]]:
    return {name: [column.cells[name].estimate.value for column in table.columns] for name in table.names}


def test_the_main_table_has_every_run_their_mean_and_the_papers(
    runs: list[GradedRun], summaries: list[RunSummary]
) -> None:
    for table, metric, reference in (
        (tables.auroc(summaries), metrics.auroc, results.AUROC_AVERAGES),
        (tables.aurc(summaries), metrics.aurc, results.AURC_AVERAGES),
    ):
        assert list(numbers(table)) == ["LN-PE", "SemGrad", "HybridGrad", "Homemade"]
        for method, found in numbers(table).items():
            values = [metric(run.scores[method], run.correct) for run in runs]
            assert found[:2] == pytest.approx(values)
            assert found[2] == pytest.approx(np.mean(values))  # type: ignore[arg-type]
            assert found[3] == reference.get(method)
        assert [column.name for column in table.columns] == ["example data 0", "example data 1", "Avg.", "Avg."]
        assert table.groups() == [("example model", 2), ("", 1), ("Paper", 1)]
    assert len(tables.prr(summaries[:1]).columns) == 1


def test_the_other_tables_say_what_their_metrics_say(runs: list[GradedRun], summaries: list[RunSummary]) -> None:
    run = runs[0]
    accuracy = numbers(tables.accuracy(summaries[:1]))["SemGrad"]
    assert accuracy[1] == pytest.approx(tally(run.scores["SemGrad"], run.correct).accuracy_at(0.5)[0])
    ablation = tables.ablation(summaries[:1])
    assert ablation is not None
    assert list(numbers(ablation)) == ["SemGrad", "l2 norm", "without entropy weights"]
    assert numbers(ablation)["l2 norm"] == [pytest.approx(metrics.auroc(run.ablations["l2 norm"], run.correct))]
    graders = tables.graders(summaries[:1])
    assert [column.name for column in graders.columns] == ["exact-match", "judge"]
    assert numbers(graders)["LN-PE"] == [
        pytest.approx(metrics.auroc(run.scores["LN-PE"], labels))
        for labels in (run.correct, run.other_graders["judge"])
    ]
    kappa = cohen_kappa_score(run.correct, run.other_graders["judge"])
    assert f"(Cohen's kappa {kappa:.2f})" in graders.notes[0]
    kinds = tables.kinds(summaries[:1])
    reading = [i for i, kind in enumerate(run.kinds) if kind == "reading"]
    assert [column.name for column in kinds.columns] == ["closed book", "reading"]
    assert numbers(kinds)["LN-PE"][1] == pytest.approx(
        metrics.auroc([run.scores["LN-PE"][i] for i in reading], [run.correct[i] for i in reading])
    )


def test_run_time_is_what_is_added_to_generation(runs: list[GradedRun], summaries: list[RunSummary]) -> None:
    table = tables.run_time(summaries[:1])
    added, plain = np.mean(runs[0].milliseconds["HybridGrad"]), np.mean(runs[0].generation_ms)
    assert numbers(table)["HybridGrad"] == pytest.approx([added, added / plain, 1.4077], rel=1e-3)
    assert table.columns[0].text(added).startswith("+")
    assert f"{plain:,.1f} ms" in table.notes[0]
    bare = replace(runs[0], generation_ms=())
    without = tables.run_time([summary(bare)])
    assert without is not None
    assert numbers(without)["HybridGrad"][1] is None


def test_coverage_at_a_promise_is_the_mean_over_halves(runs: list[GradedRun], summaries: list[RunSummary]) -> None:
    one, other = guaranteed_tables(summaries)
    assert (one.key, other.key) == ("guaranteed_coverage_1", "guaranteed_coverage_2")
    found = guaranteed_coverage(runs[0].scores["HybridGrad"], runs[0].correct, alpha=0.2, splits=4)
    coverage, over = numbers(one)["HybridGrad"][4:]
    assert coverage == found.mean_coverage
    assert over == (None if found.nothing == 1.0 else found.violations)


def test_differences_are_to_hybridgrad_on_what_both_scored(runs: list[GradedRun], summaries: list[RunSummary]) -> None:
    table = tables.differences(summaries)
    assert table is not None
    assert "HybridGrad" not in numbers(table)
    ours, theirs = (metrics.auroc(runs[0].scores[m], runs[0].correct) for m in ("HybridGrad", "LN-PE"))
    assert numbers(table)["LN-PE"][0] == pytest.approx(theirs - ours)  # type: ignore[operator]
    holes = replace(runs[0], scores={**runs[0].scores, "LN-PE": [None, *runs[0].scores["LN-PE"][1:]]})
    kept = summary(holes).measured["auroc difference"]["LN-PE"].value
    expected = [metrics.auroc(runs[0].scores[m][1:], runs[0].correct[1:]) for m in ("LN-PE", "HybridGrad")]
    assert kept == pytest.approx(expected[0] - expected[1])  # type: ignore[operator]
    assert tables.differences([summary(replace(runs[0], scores={"LN-PE": runs[0].scores["LN-PE"]}))]) is None


def test_answers_without_a_score_are_counted_below_the_main_table(runs: list[GradedRun]) -> None:
    holes = replace(runs[0], scores={**runs[0].scores, "LN-PE": [None, *runs[0].scores["LN-PE"][1:]]})
    assert "LN-PE 1 of 80 (example 0)" in tables.auroc([summary(holes)]).notes[0]
    assert tables.auroc([summary(runs[0])]).notes == ()


@pytest.mark.parametrize(
    ("right", "why"), [([True] * 12, "all 12 answers are right"), ([False] * 12, "all 12 answers are wrong")]
)
def test_all_right_and_all_wrong_are_said(right: list[bool], why: str) -> None:
    run = replace(example_run(n=12), correct=right, other_graders={"judge": right})
    found = summary(run)
    table = tables.auroc([found])
    assert numbers(table)["HybridGrad"][0] is None
    assert why in table.reasons()
    for page in [*all_tables([found]), *guaranteed_tables([found])]:
        assert page.names
        assert page.csv()


def test_one_question_and_no_score_leave_tables_that_say_so() -> None:
    one = summary(example_run(n=1))
    assert "one question cannot be split" in guaranteed_tables([one])[0].reasons()
    none = replace(example_run(n=9), scores={"HybridGrad": [None] * 9, "SAR": [1.0] * 9})
    found = summary(none)
    assert "no answer has a score" in tables.auroc([found]).reasons()
    assert numbers(tables.auroc([found]))["SAR"][0] == 0.5
    assert numbers(tables.differences([found]))["SAR"] == [None, None]  # type: ignore[arg-type]
    assert "not run" in tables.auroc([one, found]).reasons()


def made(*values: float | None) -> tuple[Cell, ...]:
    """Entries whose replicates scatter by 0.01, each in its own way."""
    noise = [np.random.default_rng(i).normal(0, 0.01, 200) for i in range(len(values))]
    return tuple(Cell(estimate(float("nan") if v is None else v, noise[i] + (v or 0.0))) for i, v in enumerate(values))


def marks(better: str | None, *values: float | None, reference: bool = False) -> list[str]:
    cells = dict(zip("abcd", made(*values), strict=False))
    column = Column("c", cells, better=better, reference=reference)  # type: ignore[arg-type]
    return [cell.mark for cell in column.marked().cells.values()]


def test_the_best_is_marked_and_what_may_equal_it() -> None:
    assert marks("higher", 0.7, 0.9, 0.895, None) == ["", "best", "tied", ""]
    assert marks("lower", 0.7, 0.9, 0.705) == ["best", "", "tied"]
    assert marks(None, 0.7, 0.9) == ["", ""]
    assert marks("higher", 0.7, 0.9, reference=True) == ["", ""]
    assert marks("higher", 0.0, 0.0) == ["", ""]
    assert marks("higher", 0.9) == [""]


def test_high_is_good_for_auroc_and_low_for_aurc_and_brier(summaries: list[RunSummary]) -> None:
    for table, best in (
        (tables.auroc(summaries), max),
        (tables.prr(summaries), max),
        (tables.aurc(summaries), min),
        (tables.confidence(summaries), min),
    ):
        column = table.columns[0].cells
        (winner,) = [name for name, cell in column.items() if cell.mark == "best"]
        assert column[winner].estimate.value == best(cell.estimate.value for cell in column.values())  # type: ignore[type-var]


def test_numbers_are_written_for_readers() -> None:
    assert Column("c", {}).text(0.76594) == "76.6"
    assert Column("c", {}, signed=True).text(-0.0213) == "−2.1"
    assert Column("c", {}, signed=True).text(-0.0001) == "+0.0"
    assert Column("c", {}, scale=1.0, digits=1).text(12345.67) == "12,345.7"
    assert Column("c", {}).text(None) == "–"


def test_csv_holds_full_numbers_and_intervals(summaries: list[RunSummary]) -> None:
    table = tables.auroc(summaries)
    header, *rows = csv.reader(io.StringIO(table.csv()))
    assert header[:4] == [
        "Method",
        "example model: example data 0",
        "example model: example data 0 (low)",
        "example model: example data 0 (high)",
    ]
    for row, name in zip(rows, table.names, strict=True):
        found = [float(text) if text else None for text in row[1:]]
        estimates = [column.cells[name].estimate for column in table.columns]
        assert found == [number for one in estimates for number in (one.value, one.low, one.high)]


def test_columns_of_several_models_are_named_by_run(runs: list[GradedRun]) -> None:
    other = summary(replace(runs[1], model="another"))
    names = {column.group for column in tables.accuracy([summary(runs[0]), other]).columns}
    assert names == {"example 0", "example 1"}


# The paper's figures as the report gives them, held against its tables as printed: written by hand twice.

PAGE = Path(__file__).with_name("tables.md").read_text(encoding="utf-8")


def printed() -> dict[str, list[float]]:
    """The numbers of the table of AUROC and of the average AURC, by method, in per cent."""
    section = PAGE.split("## Tables 1 and 5")[1].split("\n#")[0]
    lines = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {line[0].strip(): [float(cell) for cell in line[1:] if re.fullmatch(r"[\d.]+", cell)] for line in lines[2:]}


def test_averages_are_those_of_the_nine_columns() -> None:
    found = printed()
    assert list(found) == list(results.METHODS) == list(results.AUROC_AVERAGES) == list(results.AURC_AVERAGES)
    for method, (*nine, auroc, aurc) in found.items():
        assert len(nine) == 9
        assert auroc == pytest.approx(100 * results.AUROC_AVERAGES[method])
        assert aurc == pytest.approx(100 * results.AURC_AVERAGES[method])
        assert sum(nine) / 9 == pytest.approx(100 * results.AUROC_AVERAGES[method], abs=0.011), method


def test_methods_stand_in_the_papers_order_and_others_behind() -> None:
    assert results.in_order(["Mine", "HybridGrad", "LN-PE"]) == ["LN-PE", "HybridGrad", "Mine"]
    assert max(results.AUROC_AVERAGES, key=lambda method: results.AUROC_AVERAGES[method]) == results.OURS


def test_run_times_are_shares_of_generation() -> None:
    section = PAGE.split("## Table 3")[1]
    rows = dict(re.findall(r"^\| ([\w ]+?) \| (\+?\d*\..*) \|$", section, re.MULTILINE))
    sums = {name: sum(map(float, re.findall(r"[.\d]+", row))) for name, row in rows.items()}
    plain = sums.pop("plain generation")
    assert {name: total / plain for name, total in sums.items()} == pytest.approx(dict(results.RUN_TIME_SHARES))

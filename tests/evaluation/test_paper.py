"""The paper's figures as the report and the docs give them: printed by hand twice, held against each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from semgrad_guard.evaluation.report import paper

PAGE = (Path(__file__).parents[2] / "docs" / "results" / "paper.md").read_text()


def cells(title: str) -> dict[str, list[float]]:
    """The numbers of the table under a heading, by method."""
    section = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    lines = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {line[0].strip(): [float(cell) for cell in line[1:] if re.fullmatch(r"[\d.]+", cell)] for line in lines[2:]}


@pytest.mark.parametrize(("metric", "averages"), [("AUROC", paper.AUROC_AVERAGES), ("AURC", paper.AURC_AVERAGES)])
def test_averages_are_those_of_the_nine_columns(metric: str, averages: dict[str, float]) -> None:
    models = [
        f"{metric}, {m}" for m in ("Qwen3-4B-Instruct-2507", "Mistral-Nemo-Instruct-2407", "Llama-3.1-8B-Instruct")
    ]
    tables = [cells(title) for title in models]
    printed = cells(f"{metric}, average over the nine")
    assert list(printed) == list(paper.METHODS) == list(averages)
    for method, average in averages.items():
        nine = [number for table in tables for number in table[method]]
        assert len(nine) == 9
        assert printed[method] == [pytest.approx(100 * average)]
        assert sum(nine) / 9 == pytest.approx(100 * average, abs=0.011), method


def test_methods_stand_in_the_papers_order_and_others_behind() -> None:
    assert paper.in_order(["Mine", "HybridGrad", "LN-PE"]) == ["LN-PE", "HybridGrad", "Mine"]
    assert max(paper.AUROC_AVERAGES, key=lambda method: paper.AUROC_AVERAGES[method]) == paper.OURS


def test_run_times_are_shares_of_generation() -> None:
    section = PAGE.split("## Table 3")[1].split("## Table 4")[0]
    rows = dict(re.findall(r"^\| ([\w ]+?) \| (\+?\d*\..*) \|$", section, re.MULTILINE))
    sums = {name: sum(map(float, re.findall(r"[.\d]+", row))) for name, row in rows.items()}
    plain = sums.pop("plain generation")
    assert {name: total / plain for name, total in sums.items()} == pytest.approx(dict(paper.RUN_TIME_SHARES))

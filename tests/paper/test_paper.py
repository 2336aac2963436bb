"""The paper's figures as the report gives them, held against its tables as printed: written by hand twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from semgrad_guard.paper import published

PAGE = Path(__file__).with_name("tables.md").read_text(encoding="utf-8")


def rows() -> dict[str, list[float]]:
    """The numbers of the table of AUROC and of the average AURC, by method, in per cent."""
    section = PAGE.split("## Tables 1 and 5")[1].split("\n#")[0]
    lines = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {line[0].strip(): [float(cell) for cell in line[1:] if re.fullmatch(r"[\d.]+", cell)] for line in lines[2:]}


def test_averages_are_those_of_the_nine_columns() -> None:
    found = rows()
    assert list(found) == list(published.METHODS) == list(published.AUROC_AVERAGES) == list(published.AURC_AVERAGES)
    for method, (*nine, auroc, aurc) in found.items():
        assert len(nine) == 9
        assert auroc == pytest.approx(100 * published.AUROC_AVERAGES[method])
        assert aurc == pytest.approx(100 * published.AURC_AVERAGES[method])
        assert sum(nine) / 9 == pytest.approx(100 * published.AUROC_AVERAGES[method], abs=0.011), method


def test_methods_stand_in_the_papers_order_and_others_behind() -> None:
    assert published.in_order(["Mine", "HybridGrad", "LN-PE"]) == ["LN-PE", "HybridGrad", "Mine"]
    assert max(published.AUROC_AVERAGES, key=lambda method: published.AUROC_AVERAGES[method]) == published.OURS


def test_run_times_are_shares_of_generation() -> None:
    section = PAGE.split("## Table 3")[1]
    rows = dict(re.findall(r"^\| ([\w ]+?) \| (\+?\d*\..*) \|$", section, re.MULTILINE))
    sums = {name: sum(map(float, re.findall(r"[.\d]+", row))) for name, row in rows.items()}
    plain = sums.pop("plain generation")
    assert {name: total / plain for name, total in sums.items()} == pytest.approx(dict(published.RUN_TIME_SHARES))

"""Records hold the data for the AUROCs of an evaluation, and no text."""

from __future__ import annotations

import csv
from pathlib import Path

from research.smollm2.records import aurocs, packed, read


def test_aurocs_follow_from_the_records(tmp_path: Path) -> None:
    names = ["id", "key", "kind", "question", "references", "answer", "correct: contains", "HybridGrad", "G-NLL"]
    names += ["ms: HybridGrad", "ms: G-NLL", "ms: generation"]
    with (tmp_path / "graded.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file)
        table.writerow(names)
        for i in range(40):
            columns = ["" if i % 2 else f"id {i}", f"key {i}", "kind", "which secret?", "r", "two words", i % 2]
            table.writerow([*columns, 1 - i % 2 + i / 100, "" if i == 3 else i, 1.5, 0.25, 10])
    path = tmp_path / "set.csv.gz"
    path.write_bytes(packed(tmp_path))
    assert packed(tmp_path) == path.read_bytes()
    rows = read(path)
    assert [row["key"] for row in rows[:2]] == ["id 0", "key 1"]
    assert {row["words"] for row in rows} == {"2"}
    assert not any("secret" in str(row) for row in rows)
    assert rows[3]["G-NLL"] == ""
    first, second = aurocs(rows, "set")
    assert first.startswith("| HybridGrad | 1.000 (1.000-1.000)")
    assert second.startswith("| G-NLL | 0.4")

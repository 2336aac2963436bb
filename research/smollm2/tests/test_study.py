"""The committed records hold the figures that the page states, and a copy of a public set is recognised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research.smollm2 import study

PAGE = Path("docs/results/smollm2.md")
RECORDS = Path("docs/results/smollm2/records")


@pytest.mark.parametrize(("name", "column"), [("facts", 2), ("reading", 3), ("sciq", 4)])
def test_the_pages_table_follows_from_the_records(name: str, column: int) -> None:
    run = study.read(RECORDS / f"{name}.csv.gz")
    found = dict(line.split("|")[1:3] for line in study.table(run).splitlines()[4:])
    lines = PAGE.read_text(encoding="utf-8").partition("| method | facts |")[2].splitlines()[2:10]
    rows = {cells[1]: cells[column] for cells in (line.split("|") for line in lines)}
    assert len(rows) == 8
    assert {method: found[method] for method in rows} == rows


def test_the_picture_has_the_methods_that_the_page_compares(tmp_path: Path) -> None:
    study.main(["picture", str(RECORDS / "facts.csv.gz"), str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_a_copy_of_a_set_is_recognised_by_its_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ["What is Earth's moon?", "Who is 'first'?"]
    monkeypatch.setitem(study.QUESTIONS, "sciq", study.checksum(questions))
    copy, drawn = tmp_path / "validation.json", tmp_path / "drawn.jsonl"
    rows = [
        {"question": "What is  Earth\u2019s moon?", "correct_answer": "a moon", "distractor1": "a sun"},
        {"question": "Who is \u2018first\u2019?", "correct_answer": "nobody", "distractor1": "he"},
    ]
    copy.write_text(json.dumps(rows), encoding="utf-8")
    study.main(["draw", "sciq", str(copy), str(drawn)])
    kept = [json.loads(line) for line in drawn.read_text(encoding="utf-8").splitlines()]
    assert sorted(row["question"] for row in kept) == questions
    assert "2 questions, those of" in capsys.readouterr().out
    copy.write_text(json.dumps(rows[:1]), encoding="utf-8")
    study.main(["draw", "sciq", str(copy), str(drawn)])
    assert "1 questions, NOT those of" in capsys.readouterr().out

"""The sets of questions: every question once in each, and a copy of a public set is recognised or called another."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from research.pocket.world import sentence, world
from research.smollm2.questions import ASKED, brought, checksum, closed_book, natural, reading, straight, told_facts


def test_a_set_asks_every_question_once() -> None:
    for rows in (closed_book(Random(7)), reading(Random(7)), list(natural()), told_facts(Random(7))):
        assert len({(row["question"], row.get("context")) for row in rows}) == len(rows) >= 240


def test_all_checked_facts_are_asked() -> None:
    lines = Path("research/pocket/data/facts.csv").read_text(encoding="utf-8").splitlines()
    assert len(closed_book(Random(7))) == len(lines) - 1 == 1293


def test_what_is_told_is_in_the_passage_once() -> None:
    facts = {f"told/{fact.relation}/{fact.entity}": fact for fact in world() if not fact.several}
    rows = told_facts(Random(7))
    assert len(rows) == len(facts) > 1000
    for row in rows:
        fact = facts[row["id"]]
        assert row["context"].count(sentence(fact, fact.answers[0])) == 1
        others = [other for other in facts.values() if other.relation == fact.relation and other is not fact]
        assert sum(sentence(other, other.answers[0]) in row["context"] for other in others) >= 2


def test_a_copy_of_a_set_is_recognised_by_its_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ["What is Earth's moon?", "Who is 'first'?"]
    monkeypatch.setitem(ASKED, "sciq", checksum(questions))
    copy = tmp_path / "validation.json"
    rows = [
        {"question": "What is  Earth\u2019s moon?", "correct_answer": "a moon", "distractor1": "a sun"},
        {"question": "Who is \u2018first\u2019?", "correct_answer": "nobody", "distractor1": "he"},
    ]
    copy.write_text(json.dumps(rows), encoding="utf-8")
    drawn = brought(str(copy), "sciq", Random(7))
    assert sorted(row["question"] for row in drawn) == questions
    assert {row["kind"] for row in drawn} == {"sciq"}
    assert "2 questions, those of" in capsys.readouterr().out

    copy.write_text(json.dumps(rows[:1]), encoding="utf-8")
    brought(str(copy), "sciq", Random(7))
    assert "1 questions, NOT those of" in capsys.readouterr().out


def test_quotation_marks_and_spaces_are_straight() -> None:
    assert straight(" \u201cA\u201d\n it\u2019s ") == '"A" it\'s'

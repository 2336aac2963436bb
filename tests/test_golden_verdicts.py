"""The recorded drafts are decided as they were recorded, and every way of deciding occurs among them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import golden_verdicts
from golden_verdicts import Golden


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.load()


def test_every_draft_is_decided_as_recorded(golden: Golden) -> None:
    assert list(golden.changes()) == []


def test_the_drafts_are_of_every_sort(golden: Golden) -> None:
    assert len(golden.rows) > 4900
    assert {row["status"] for row in golden.rows} == {"scored", "unscored"}
    assert {type(row["cut"]) for row in golden.rows} == {type(None), int, str}
    letters = Counter(letter for row in golden.rows for letter, _ in row["decisions"].values())
    assert {"D", "Dp", "Du", "A", "Au", "E", "Eu", "R", "UnfamiliarPromptError"} <= letters.keys()
    parts = {
        rest[at : at + 2] for letter in letters if (rest := letter.partition("-")[2]) for at in range(0, len(rest), 2)
    }
    assert parts == {"de", "dr", "st"}
    assert golden_verdicts.PATH.stat().st_size < 1_000_000


def test_a_changed_decision_is_listed_with_its_reason(golden: Golden) -> None:
    row = next(row for row in golden.rows if row["decisions"]["bare"][0] == "A")
    changed = {**row, "decisions": {**row["decisions"], "bare": ("D", None)}}
    facts = golden.facts[row["group"]]
    rows = [changed if one is row else one for one in golden.rows if one["group"] == row["group"]]
    assert row["group"] == 0
    [(case, question, before, now, reason)] = Golden([facts], rows).changes()
    assert (case, question, before, now) == ("0 bare", row["question"], "D None", "A None")
    assert "above the threshold" in reason

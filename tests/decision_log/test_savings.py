"""Savings: sums over whole blocks of 20 requests of one kind, and words that follow from them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.database import Database
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.decision_log.entries import BLOCK, Decision, Facts, Price
from semgrad_guard.guard import escalated, external

from .test_decision_log import verdict

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
NUMBERS = ("prompt_tokens", "draft_tokens", "seconds", "target_prompt_tokens", "target_tokens", "target_seconds")


def decision(number: int, kind: str, **numbers: Any) -> Decision:
    """The decision of this number, a minute behind the one before."""
    enforced = kind != "flagged"
    return Decision(
        id=f"dec_{number:04}",
        at=BEGAN + timedelta(minutes=number),
        model="m",
        estimator="e",
        status="scored",
        action="abstain" if kind == "flagged" else kind,  # type: ignore[arg-type]
        enforced=enforced,
        escalated_to="large" if kind == "escalate" else None,
        **numbers,
    )


counted = st.one_of(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.none())
kinds = st.sampled_from(["answer", "answer", "escalate", "abstain", "flagged"])


@settings(max_examples=40, deadline=None)
@given(drawn=st.data(), count=st.integers(0, 130), since=st.integers(0, 60))
def test_sums_are_those_of_a_plain_recomputation(drawn: Any, count: int, since: int) -> None:
    known = drawn.draw(st.booleans())
    number = st.integers(0, 1000) if known else counted
    rows = [decision(place, drawn.draw(kinds), **dict.fromkeys(NUMBERS, drawn.draw(number))) for place in range(count)]
    database, moment = Database("sqlite://"), BEGAN + timedelta(minutes=since)
    database.add(rows)
    found = database.savings(since=moment)
    database.close()
    for kind in ("answer", "escalate", "abstain"):
        mine = [row for row in rows if row.delivery == kind]
        blocks = [mine[start : start + BLOCK] for start in range(0, len(mine), BLOCK)]
        whole = [row for block in blocks if len(block) == BLOCK and block[0].at >= moment for row in block]
        assert found.counts[kind] == sum(row.at >= moment for row in mine)
        assert found.spent[kind].requests == len(whole)
        for name in NUMBERS:
            values = [getattr(row, name) for row in whole]
            assert getattr(found.spent[kind], name) == (None if None in values or not values else sum(values))


def test_no_figure_moves_with_one_draft() -> None:
    """Between two blocks every figure but the counts stays as it is, whatever comes."""
    database, seen = Database("sqlite://"), list[Any]()
    for number in range(2 * BLOCK + 5):
        database.add([decision(number, "escalate", **dict.fromkeys(NUMBERS, number))])
        seen.append(database.savings(since=BEGAN).spent["escalate"])
    database.close()
    assert len(set(seen)) == 3
    assert [seen[BLOCK - 2].requests, seen[BLOCK - 1].requests, seen[-1].requests] == [0, BLOCK, 2 * BLOCK]


def test_words_tell_the_cost_beside_what_was_saved() -> None:
    database = Database("sqlite://")
    here = {"prompt_tokens": 200, "draft_tokens": 20, "seconds": 0.8}
    away = {**here, "seconds": 2.9, "target_prompt_tokens": 150, "target_tokens": 30, "target_seconds": 2.0}
    rows = [decision(number, "answer", **here) for number in range(40)]
    assert Database("sqlite://").savings(since=BEGAN).words() == []
    rows += [decision(100 + number, "escalate", **away) for number in range(25)] + [decision(200, "abstain", **here)]
    database.add(rows)
    found = database.savings(since=BEGAN)
    database.close()
    assert found.words() == [
        "Of 66 requests 40 (61%) were answered here, 25 (38%) escalated and 1 (2%) withheld, which saves nothing.",
        "Not sent to the target, of 40 answered here: 8,000 prompt and 800 answer tokens, as this model counts them, "
        "in 0.8 s each.",
        "The drafts of 20 escalated requests are a cost: 4,000 prompt and 400 answer tokens, in 0.9 s each.",
        "The target took 3,000 prompt and 600 answer tokens for them, in 2 s each.",
    ]
    assert found.words(Price(2.5, 10))[2] == "At 2.5/10 for a million tokens that is about 0.03."


def test_the_log_has_the_targets_tokens_and_time(tmp_path: Path) -> None:
    draft = verdict(prompt_tokens=7, scored_tokens=3)
    answered = escalated(draft, external("Ask a cook.", prompt_tokens=5, answer_tokens=4))
    with DecisionLog(tmp_path / "log.db") as log:
        log.write(answered, seconds=1.5, facts=Facts(target_seconds=1.25))
        log.flush()
        ((row, _),) = log.database.decisions()
    assert [getattr(row, name) for name in NUMBERS] == [7, 3, 1.5, 5, 4, 1.25]
    assert {getattr(row.without_score(), name) for name in NUMBERS} == {None}

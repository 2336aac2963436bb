"""Grades of delivered answers: drawn at random or not, twice, contradicting, of answers that are not there; which of
them count for a promise, corrections, other processes, and the callback. And savings: sums over whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy, Router, calibrate
from semgrad_guard.errors import InputError
from semgrad_guard.guard import escalated, external

from .test_decision_log import verdict

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.database import Database
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.decision_log.entries import BLOCK, Decision, Facts, Price

PROMISED = {"promised": True, "calibration_id": "c1", "threshold": 1.0}
DAY = timedelta(days=1)


def written(log: DecisionLog, count: int, **changes: Any) -> list[str]:
    facts = Facts(alpha=0.1, delta=0.1, request_id="r")
    return [str(log.write(verdict(**{**PROMISED, **changes}), facts=facts)) for _ in range(count)]


def graded(log: DecisionLog, ids: Sequence[str], *, right: bool) -> None:
    """Draw these answers, and grade them."""
    log.database.mark_drawn(ids)
    for one in ids:
        assert log.feedback(one, right=right).sampling == "random"


def test_only_the_log_makes_a_grade_a_random_one(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        ids = written(log, 30)
        others = written(log, 3, promised=False) + written(log, 3, action="abstain")
        drawn = log.database.draw(10, since=datetime.now(UTC) - DAY)
        assert len({one.id for one in drawn}) == 10
        assert {one.id for one in drawn} < set(ids)
        log.database.mark_drawn([one.id for one in drawn])
        again = log.database.draw(100, since=datetime.now(UTC) - DAY)
        assert {one.id for one in again} == set(ids) - {one.id for one in drawn}
        assert log.database.draw(5, since=datetime.now(UTC) + DAY) == []
        chosen = log.feedback(drawn[0].id, right=True)
        assert (chosen.sampling, chosen.note) == ("random", None)
        complaint = log.feedback(again[0].id, right=False)
        assert complaint.sampling == "user"
        assert "has not drawn it at random" in str(complaint.note)
        for one in (others[0], others[-1]):
            assert "was not promised" in str(log.feedback(one, right=True).note)


@pytest.mark.parametrize(
    ("second", "says"),
    [(True, "graded right before (random): it counts once"), (False, "that grade counts until the operator")],
)
def test_a_second_grade_is_kept_and_named(tmp_path: Path, second: bool, says: str) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        (one,) = written(log, 1)
        graded(log, [one], right=True)
        assert says in str(log.feedback(one, right=second).note)
        ((_, counting),) = log.database.decisions()
        assert counting is not None
        assert (counting.right, counting.note) == (True, None)
        assert "this grade counts" in str(log.feedback(one, right=False, corrects=True).note)
        assert log.database.count() == 4
        ((_, counting),) = log.database.decisions()
        assert counting is not None
        assert counting.right is False
        assert log.database.find(one) == log.database.decisions()[0]


def test_a_guard_takes_feedback(tmp_path: Path, language_model: LanguageModel) -> None:
    options = GenerationOptions(max_tokens=4)
    calibration = calibrate([float(i) for i in range(60)], [True] * 60, alpha=0.2, delta=0.1)
    with DecisionLog(tmp_path / "log.db") as log:
        guard = Guard(language_model, Router(Policy.from_calibration(calibration), log=log), options=options)
        verdict = guard("question")
        entry = guard.feedback(str(verdict.decision_id), False, grader="me")
        assert (entry.right, entry.sampling, entry.grader) == (False, "user", "me")
        ((decision, _),) = log.database.decisions()
        assert (decision.alpha, decision.delta) == (0.2, 0.1)
        (other,) = written(log, 1)
        log.database.mark_drawn([other])
        assert "calibration c1, which decides no longer" in str(guard.feedback(other, True).note)
        with pytest.raises(InputError, match="no decision"):
            guard.feedback("dec_nothing", True)
    with pytest.raises(InputError, match="this guard has none"):
        Guard(language_model, Policy(threshold=1.0), options=options).feedback("dec_x", True)


def test_only_random_grades_of_promised_answers_count(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        others = written(log, 9, promised=False)
        others += written(log, 9, action="escalate", escalated=verdict("another answer"))
        ids, later = written(log, 30), written(log, 3, calibration_id="c2")
        graded(log, ids[:20], right=True)
        graded(log, others, right=False)
        for one in ids[20:]:
            log.feedback(one, right=False)
        first, second = log.promises()
        assert [first.calibration_id, second.calibration_id] == ["c2", "c1"]
        assert (second.labels, second.wrong, second.alpha) == (20, 0, 0.1)
        assert (first.labels, first.state) == (0, "unknown")
        log.database.mark_drawn(later)
        assert [one.ungraded for one in log.promises()] == [3, 0]
        assert "3 drawn answers are not graded yet" in str(log.promises()[0])
        assert "asked for" not in str(log.promises()[0])
        written(log, 1, calibration_id="c3", requested_alpha=0.05)
        assert "at most 10% of the answers let through are wrong (5% was asked for" in str(log.promises()[0])


def test_a_corrected_grade_counts_as_corrected(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        ids = written(log, 40)
        graded(log, ids, right=False)
        assert log.promises()[0].state == "broken"
        graded(log, ids, right=True)  # by later ones
        assert log.promises()[0].wrong == 40
        for one in ids:
            log.feedback(one, right=True, corrects=True)
        (found,) = log.promises()
        assert (found.state, found.labels, found.wrong) == ("kept", 40, 0)


def test_grades_by_any_process_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DecisionLog(tmp_path / "log.db") as log, DecisionLog(tmp_path / "log.db") as other:
        graded(other, written(log, 30), right=False)
        for _ in range(3):
            assert log.promises()[0].state == "broken"
        assert log.watched == log.promises()
        logger = [record for record in caplog.records if "the promise of calibration c1: Broken" in record.getMessage()]
    assert len(logger) in (1, 2)  # by each log once


# Savings: sums over whole blocks of 20 requests of one kind, and words that follow from them.


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

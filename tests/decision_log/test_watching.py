"""The promises of a log: which grades count, corrections, other processes, and the callback."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog

from .test_decision_log import verdict
from .test_feedback import graded, written


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

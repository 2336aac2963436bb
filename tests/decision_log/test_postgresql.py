"""The decision log in a real PostgreSQL server, which goes away and comes back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from semgrad_guard import Verdict

pytest.importorskip("psycopg", reason="psycopg is not installed")
pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.decision_log.entries import Facts
from semgrad_guard.errors import DecisionLogError
from tests.decision_log.test_decision_log import killed
from tests.postgresql import Postgres

pytestmark = pytest.mark.slow

VERDICT = Verdict.of(status="scored", action="answer", text="né", estimator="e", model="m" * 2000, uncertainty=0.1)


def test_it_goes_away_and_comes_back(postgres: Postgres, tmp_path: Path) -> None:
    with DecisionLog(postgres.url, journal=tmp_path / "journal", text=True) as log:
        ids = [log.write(VERDICT, facts=Facts(question="why\0?"), seconds=0.5) for _ in range(3)]
        log.feedback(str(ids[0]), right=True)
        assert log.flush()
        postgres.stop()
        ids += [log.write(VERDICT) for _ in range(3)]
        assert None not in ids
        assert log.flush() is False
        postgres.start()
        assert log.flush()
        found = log.database.decisions()
        assert {decision.id for decision, _ in found} == set(ids)
        first, feedback = found[-1]
        assert (first.id, first.question, first.delivered, first.uncertainty) == (ids[0], "why\ufffd?", "né", 0.1)
        assert feedback is not None
        assert feedback.right
        assert [decision.id for decision, _ in log.database.decisions(before=str(ids[4]), limit=2)] == [ids[3], ids[2]]
    with DecisionLog(postgres.url, journal=tmp_path / "journal") as log:  # the tables are there already
        assert len(log.database.decisions()) == 6
        changes = {"promised": True, "calibration_id": "c1"}
        promised = log.write(VERDICT.revised(**changes), facts=Facts(alpha=0.1, delta=0.2))
        assert log.flush()
        (drawn,) = log.database.draw(5, since=datetime.now(UTC) - timedelta(days=1))
        assert (drawn.id, drawn.alpha, drawn.delta) == (promised, 0.1, 0.2)
        log.database.mark_drawn([drawn.id])
        assert log.feedback(drawn.id, right=True).sampling == "random"


def test_a_killed_process_leaves_its_decisions_to_the_next(postgres: Postgres, tmp_path: Path) -> None:
    """Killed while the database is there, and while it is away."""
    journal = tmp_path / "journal"
    acknowledged = killed(postgres.url, 60, journal=journal)
    postgres.stop()
    acknowledged |= killed(postgres.url, 60, journal=journal)
    postgres.start()
    with DecisionLog(postgres.url, journal=journal) as log:
        log.write(VERDICT)
        assert log.flush()
        found = {decision.id for decision, _ in log.database.decisions()}
    assert len(acknowledged) >= 120
    assert acknowledged <= found


def test_a_wrong_database_says_so(postgres: Postgres, tmp_path: Path) -> None:
    with (
        DecisionLog(f"{postgres.url}-of-another-name", journal=tmp_path / "journal") as log,
        pytest.raises(DecisionLogError, match='database "postgres-of-another-name" does not exist'),
    ):
        log.database.open()

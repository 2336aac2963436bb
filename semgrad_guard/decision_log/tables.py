"""The tables of a decision log, and the steps from each version of them to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from semgrad_guard.decision_log.entries import Decision, Feedback
from semgrad_guard.errors import MissingExtraError

try:
    import sqlalchemy as sa
except ImportError as error:  # pragma: no cover - the extra
    raise MissingExtraError("sqlalchemy", extra="log") from error

metadata = sa.MetaData()
decisions = sa.Table(
    "semgrad_guard_decisions",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("at", sa.Float, nullable=False, index=True),  # seconds since 1970, UTC: alike in every database
    *(sa.Column(name, sa.Text) for name in ("request_id", "served")),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("estimator", sa.Text, nullable=False),
    sa.Column("calibration_id", sa.String(64)),
    sa.Column("action", sa.String(16), nullable=False, index=True),
    sa.Column("enforced", sa.Boolean, nullable=False),
    sa.Column("promised", sa.Boolean, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    *(sa.Column(name, sa.Double) for name in ("uncertainty", "confidence", "threshold")),
    sa.Column("reason", sa.Text),
    sa.Column("drift", sa.Boolean),
    sa.Column("tokens", sa.Integer),
    *(sa.Column(name, sa.Double) for name in ("seconds", "scoring_ms")),
    sa.Column("escalated_to", sa.Text),
    *(sa.Column(name, sa.Text) for name in ("question", "delivered")),
    *(sa.Column(name, sa.Double) for name in ("alpha", "delta")),
    sa.Column("drawn", sa.Double, index=True),
    sa.Column("sentences", sa.JSON(none_as_null=True)),
)
feedback = sa.Table(
    "semgrad_guard_feedback",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("decision_id", sa.String(64), nullable=False, index=True),
    sa.Column("right", sa.Boolean, nullable=False),
    sa.Column("sampling", sa.String(16), nullable=False),
    sa.Column("grader", sa.Text),
)
schema = sa.Table("semgrad_guard_schema", sa.MetaData(), sa.Column("version", sa.Integer, primary_key=True))

PROMISED = sa.and_(decisions.c.promised, decisions.c.action == "answer", decisions.c.escalated_to.is_(None))
"""The answers that the promise of a decision's own calibration is about."""
RANDOMLY_GRADED = sa.select(feedback.c.decision_id).where(feedback.c.sampling == "random")

KINDS: Mapping[sa.Table, type[Decision] | type[Feedback]] = {decisions: Decision, feedback: Feedback}
"""The entries of each table."""


def _add_columns(names: AbstractSet[str], connection: sa.Connection) -> None:
    there = {column["name"] for column in sa.inspect(connection).get_columns(decisions.name)}
    for name in names - there:
        kind = decisions.c[name].type.compile(connection.dialect)
        connection.execute(sa.text(f"ALTER TABLE {decisions.name} ADD COLUMN {name} {kind}"))
    for index in decisions.indexes:
        index.create(connection, checkfirst=True)


MIGRATIONS: tuple[Callable[[sa.Connection], None], ...] = (
    metadata.create_all,
    partial(_add_columns, {"alpha", "delta", "drawn"}),
    partial(_add_columns, {"sentences"}),
)
"""The step from each version of the tables to the next; the first makes the tables, with every column of today.

Version 2 has the promise that a decision was made under, and when it was drawn to be graded; version 3 its sentences.
"""

"""The database of a decision log: SQLite in a file, or any that SQLAlchemy reaches by URL (PostgreSQL is tested)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from semgrad_guard.decision_log.entries import Decision, Feedback
from semgrad_guard.errors import DecisionLogError, InputError, MissingExtraError
from semgrad_guard.files import make_private, reason, take_back

try:
    import sqlalchemy as sa
    from sqlalchemy import event as sa_event
    from sqlalchemy import exc as sa_exc
    from sqlalchemy.dialects import postgresql, sqlite
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

_LONGEST_WORDS = 300

MIGRATIONS: tuple[Callable[[sa.Connection], None], ...] = (metadata.create_all,)
"""What brings a database from each version to the next; the first makes the tables."""


class Database:
    """Where the entries end up.

    Args:
        url: as SQLAlchemy takes it, or the path of an SQLite file.

    Raises:
        InputError: it is no URL that SQLAlchemy knows, or its driver is missing.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = as_url(url)
        try:
            self._engine = sa.create_engine(self.url, pool_pre_ping=True)
        except (sa_exc.ArgumentError, ImportError) as error:
            raise InputError(
                f"{self.url.render_as_string()} cannot be used as a decision log: {error}. Take the path of a file, or "
                "a URL such as postgresql+psycopg://user@host/name"
            ) from error
        if self.url.get_backend_name() == "sqlite":
            sa_event.listen(self._engine, "do_connect", _protect_sqlite)
            sa_event.listen(self._engine, "connect", _prepare_sqlite)
        self._ready, self._preparing = False, threading.Lock()

    def add(self, entries: Sequence[Decision | Feedback]) -> None:
        """Put entries in, in one transaction; those that are there already stay as they are.

        Raises:
            DecisionLogError: the database cannot be reached, or refuses.
        """
        rows: Mapping[sa.Table, list[dict[str, Any]]] = {
            decisions: [_row(entry) for entry in entries if isinstance(entry, Decision)],
            feedback: [_row(entry) for entry in entries if isinstance(entry, Feedback)],
        }
        with self._transaction() as connection:
            for table, own in rows.items():
                if own:
                    connection.execute(self._insert(table), own)

    def decisions(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        action: str | None = None,
        limit: int | None = None,
        before: str | None = None,
    ) -> list[tuple[Decision, Feedback | None]]:
        """Decisions, the latest first, each with what was last said of it.

        Args:
            since, until: from the first, up to and without the second.
            action: only those of which this became (see `Decision.delivery`).
            limit: so many at most.
            before: only those that come after the decision of this id in this order.

        Raises:
            DecisionLogError: the database cannot be reached.
        """
        query = sa.select(decisions).order_by(decisions.c.at.desc(), decisions.c.id.desc())
        if since is not None:
            query = query.where(decisions.c.at >= since.timestamp())
        if until is not None:
            query = query.where(decisions.c.at < until.timestamp())
        if action is not None:
            enforced = sa.and_(decisions.c.enforced, decisions.c.action == action)
            query = query.where(sa.or_(enforced, sa.not_(decisions.c.enforced)) if action == "answer" else enforced)
        with self._transaction() as connection:
            if before is not None:
                last = connection.execute(sa.select(decisions.c.at).where(decisions.c.id == before)).scalar()
                if last is None:
                    return []
                place = sa.tuple_(decisions.c.at, decisions.c.id)
                query = query.where(place < sa.tuple_(sa.literal(last), sa.literal(before)))
            found = connection.execute(query if limit is None else query.limit(limit)).mappings().all()
            said = self._said(connection, [row["id"] for row in found])
        return [(_decision(dict(row)), said.get(row["id"])) for row in found]

    def open(self) -> None:
        """Make sure that it can be reached, and that its tables are there.

        Raises:
            DecisionLogError: one of both fails; the message says why.
        """
        with self._transaction():
            pass

    def has(self, decision_id: str) -> bool:
        """Whether there is a decision of this id.

        Raises:
            DecisionLogError: the database cannot be reached.
        """
        with self._transaction() as connection:
            query = sa.select(decisions.c.id).where(decisions.c.id == decision_id)
            return connection.execute(query).first() is not None

    def forget(self, before: datetime) -> int:
        """Delete decisions before a time, and what was said of them; how many decisions there were.

        Raises:
            DecisionLogError: the database cannot be reached.
        """
        with self._transaction() as connection:
            old = decisions.c.at < before.timestamp()
            ids = sa.select(decisions.c.id).where(old)
            connection.execute(sa.delete(feedback).where(feedback.c.decision_id.in_(ids)))
            return connection.execute(sa.delete(decisions).where(old)).rowcount

    def close(self) -> None:
        """Let go of all connections."""
        self._engine.dispose()

    def _said(self, connection: sa.Connection, ids: Sequence[str]) -> dict[str, Feedback]:
        found: dict[str, Feedback] = {}
        for start in range(0, len(ids), 500):
            some = feedback.c.decision_id.in_(ids[start : start + 500])
            for row in connection.execute(sa.select(feedback).where(some).order_by(feedback.c.at)).mappings():
                found[row["decision_id"]] = Feedback.model_validate({**row, "at": _time(row["at"])})
        return found

    def _transaction(self) -> _Transaction:
        return _Transaction(self._engine, self.url, self._prepare)

    def _prepare(self) -> None:
        """Bring the tables up to date, before the first transaction of this process."""
        with self._preparing:
            if not self._ready:
                try:
                    self._migrated()
                except (sa_exc.OperationalError, sa_exc.ProgrammingError, sa_exc.IntegrityError):
                    self._migrated()  # another process has made the same tables at the same moment
                self._ready = True

    def _migrated(self) -> None:
        with self._engine.begin() as connection:
            _migrate(connection)

    def _insert(self, table: sa.Table) -> Any:
        """An insert that leaves alone what is there: a journal may be read twice."""
        if self.url.get_backend_name() == "postgresql":
            return postgresql.insert(table).on_conflict_do_nothing()
        if self.url.get_backend_name() == "sqlite":
            return sqlite.insert(table).on_conflict_do_nothing()
        return sa.insert(table)


class _Transaction:
    """One transaction on a database whose tables are there; what goes wrong is a `DecisionLogError`."""

    def __init__(self, engine: sa.Engine, url: sa.URL, prepare: Callable[[], None]) -> None:
        self._engine, self._url, self._prepare = engine, url, prepare
        self._open: Any = None

    def __enter__(self) -> sa.Connection:
        try:
            self._prepare()
            self._open = self._engine.begin()
            return self._open.__enter__()
        except sa_exc.SQLAlchemyError as error:
            raise self._error(error, why=_words(error, self._url)) from error

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._open.__exit__(kind, error, trace)
        except sa_exc.SQLAlchemyError as failed:
            raise self._error(failed) from failed
        if isinstance(error, sa_exc.SQLAlchemyError):
            raise self._error(error) from error

    def _error(self, error: Exception, *, why: str = "") -> DecisionLogError:
        """Without the driver's words once rows are on their way: they may hold a question or an answer."""
        kind = type(error).__name__
        hint = "Check the address, the user, the password and the database's name" if why else "Is there room?"
        return DecisionLogError(
            f"the decision log at {self._url.render_as_string()} cannot be used ({kind}{why and ': '}{why}). {hint}"
        )


def _words(error: sa_exc.SQLAlchemyError, url: sa.URL) -> str:
    """Why a database could not be opened, in its driver's words, in one line and without the password."""
    said = " ".join(str(getattr(error, "orig", None) or error).split())
    return (said.replace(str(url.password), "***") if url.password else said)[:_LONGEST_WORDS]


def as_url(url: str | Path) -> sa.URL:
    """A URL, or the path of an SQLite file as one.

    Raises:
        InputError: it is neither.
    """
    if isinstance(url, str) and "://" in url:
        try:
            return sa.make_url(url)
        except sa_exc.ArgumentError as error:
            raise InputError("the decision log's URL cannot be read; give dialect+driver://user@host/name") from error
    return sa.URL.create("sqlite", database=str(Path(url).expanduser().resolve()))


def _migrate(connection: sa.Connection) -> None:
    """Bring the tables up to date.

    Raises:
        DecisionLogError: a newer version has written them.
    """
    schema.create(connection, checkfirst=True)
    version = connection.execute(sa.select(sa.func.max(schema.c.version))).scalar() or 0
    if version > len(MIGRATIONS):
        raise DecisionLogError(
            f"the decision log was written by a newer version (schema {version}, known: {len(MIGRATIONS)}); update "
            "semgrad-guard"
        )
    for number in range(version, len(MIGRATIONS)):
        MIGRATIONS[number](connection)
        connection.execute(sa.insert(schema).values(version=number + 1))


def _protect_sqlite(_: object, __: object, given: Sequence[Any], ___: object) -> None:
    """Before a file is opened: only its owner can read it. SQLite gives the files beside it the same rights.

    Raises:
        DecisionLogError: others can read it, and go on to.
    """
    name = str(given[0])
    if name in ("", ":memory:"):
        return
    path = Path(urlsplit(name).path if name.startswith("file:") else name)
    with suppress(OSError):  # SQLite itself says why a file cannot be opened
        make_private(path)
    try:
        for each in (path, *(Path(f"{path}-{kind}") for kind in ("wal", "shm", "journal"))):
            if each.exists():
                take_back(each)
    except OSError as error:
        raise DecisionLogError(
            f"the decision log at {path} can be read by others, and their rights cannot be taken back: "
            f"{reason(error)}. Let its owner write it, or choose another file"
        ) from error


def _prepare_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for setting in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _row(entry: Decision | Feedback) -> dict[str, Any]:
    return {**entry.model_dump(exclude={"kind"}), "at": entry.at.timestamp()}


def _decision(row: dict[Any, Any]) -> Decision:
    return Decision.model_validate({**row, "at": _time(row["at"])})


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)

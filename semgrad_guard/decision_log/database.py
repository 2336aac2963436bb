"""The database of a decision log: SQLite in a file, or PostgreSQL."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

from semgrad_guard.decision_log.entries import BLOCK, Decision, Entry, Feedback, Row, Savings, Spent
from semgrad_guard.errors import DecisionLogError, InputError, MissingExtraError
from semgrad_guard.files import make_private, reason, state_folder, take_back
from semgrad_guard.records import Action
from semgrad_guard.settings import LOG_VARIABLE

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
    sa.Column("at", sa.Double, nullable=False, index=True),  # seconds since 1970, UTC: alike in both databases
    sa.Column("action", sa.String(16), nullable=False, index=True),
    sa.Column("drawn", sa.Double, index=True),
    *(sa.Column(name, sa.Boolean) for name in ("enforced", "promised", "drift")),
    *(sa.Column(name, sa.Double) for name in ("uncertainty", "confidence", "threshold", "alpha", "delta")),
    *(sa.Column(name, sa.Double) for name in ("requested_alpha", "seconds", "scoring_ms")),
    *(sa.Column(name, sa.Text) for name in ("request_id", "served", "model", "estimator", "calibration_id")),
    *(sa.Column(name, sa.Text) for name in ("status", "reason", "escalated_to", "question", "delivered")),
    *(sa.Column(name, sa.Integer) for name in ("tokens", "prompt_tokens", "draft_tokens")),
    *(sa.Column(name, sa.Integer) for name in ("target_prompt_tokens", "target_tokens")),
    sa.Column("target_seconds", sa.Double),
    sa.Column("sentences", sa.JSON(none_as_null=True)),
)
feedback = sa.Table(
    "semgrad_guard_feedback",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("decision_id", sa.String(64), nullable=False, index=True),
    sa.Column("right", sa.Boolean, nullable=False),
    sa.Column("sampling", sa.String(16), nullable=False),
    sa.Column("corrects", sa.Boolean, nullable=False),
    sa.Column("grader", sa.Text),
)
TABLES: Mapping[sa.Table, type[Decision] | type[Feedback]] = {decisions: Decision, feedback: Feedback}
"""The entries of each table."""

PROMISED = sa.and_(decisions.c.promised, decisions.c.action == "answer", decisions.c.escalated_to.is_(None))
"""The answers that the promise of a decision's own calibration is about."""
RANDOMLY_GRADED = sa.select(feedback.c.decision_id).where(feedback.c.sampling == "random")

_LONGEST_REASON = 300
_EDITED = "was it edited? Put it right, or delete it"

E = TypeVar("E", bound=Entry)


class Database:
    """The tables of a log, in SQLite or PostgreSQL.

    SQLite is in WAL mode with `synchronous=FULL`: a row is on the disk once `add` returns, and readers never wait.

    Args:
        url: as SQLAlchemy takes it, or the path of an SQLite file.
        patience: seconds for which SQLite waits where another program holds the lock.

    Raises:
        InputError: it is no URL of one of them, or its driver is missing.
        DecisionLogError: from every method that reads or writes, if the database cannot be reached or refuses; the
            message gives the reason.
    """

    def __init__(self, url: str | Path, *, patience: float = 10.0) -> None:
        try:
            if isinstance(url, str) and "://" in url:
                self.url = sa.make_url(url)
            else:
                self.url = sa.URL.create("sqlite", database=str(Path(url).expanduser().resolve()))
            self._engine = sa.create_engine(self.url, pool_pre_ping=True)
            self._insert: Any = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[self._engine.name]
        except (sa_exc.ArgumentError, ImportError, KeyError) as error:
            raise InputError(
                f"this is no decision log ({type(error).__name__}): give the path of an SQLite file, or a "
                "URL such as postgresql+psycopg://user@host/name, and install its driver"
            ) from error
        if self._engine.name == "sqlite":
            wait = f"busy_timeout={patience * 1000:.0f}"
            settings = (wait, "journal_mode=WAL", "synchronous=FULL", "secure_delete=ON")  # no text stays in free pages
            sa_event.listen(self._engine, "do_connect", _protect_sqlite)

            def set_up(connection: Any, _: object) -> None:
                for setting in settings:
                    connection.execute(f"PRAGMA {setting}").close()

            sa_event.listen(self._engine, "connect", set_up)
        self._ready, self._preparing = False, threading.Lock()

    @property
    def file(self) -> Path | None:
        """The file of an SQLite database; None in memory, and for PostgreSQL."""
        return _file_of(self.url.database or "") if self._engine.name == "sqlite" else None

    def open(self) -> None:
        """Make sure that the database can be reached, and that its tables are there."""
        with self._transaction():
            pass

    def add(self, entries: Sequence[Entry]) -> None:
        """Add entries in one transaction; those that are there already stay as they are."""
        with self._transaction() as connection:
            for table, kind in TABLES.items():
                if rows := [_row(entry) for entry in entries if isinstance(entry, kind)]:
                    connection.execute(self._insert(table).on_conflict_do_nothing(), rows)

    def oldest(self, limit: int) -> list[Entry]:
        """The first entries of an SQLite file that is a journal, in the order in which each table got them."""
        entries: list[Entry] = []
        with self._transaction() as connection:
            for table, kind in TABLES.items():
                query = sa.select(table).order_by(sa.text("rowid")).limit(limit - len(entries))
                entries += [_entry(kind, row) for row in connection.execute(query).mappings()]
        return entries

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove entries."""
        with self._transaction() as connection:
            for table, kind in TABLES.items():
                ids = [entry.id for entry in entries if isinstance(entry, kind)]
                connection.execute(sa.delete(table).where(table.c.id.in_(ids)))

    def count(self) -> int:
        """How many entries there are."""
        with self._transaction() as connection:
            return sum(connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in TABLES)

    def decisions(
        self,
        *,
        since: datetime | None = None,
        action: str | None = None,
        limit: int | None = None,
        before: str | None = None,
    ) -> list[Row]:
        """Decisions, the latest first, each with the feedback on it that counts.

        Args:
            since: from this time on.
            action: only decisions with this `Decision.delivery`.
            limit: at most so many.
            before: only decisions that come after the decision of this id in this order.
        """
        query = sa.select(decisions).order_by(decisions.c.at.desc(), decisions.c.id.desc())
        if since is not None:
            query = query.where(decisions.c.at >= since.timestamp())
        if action is not None:
            enforced = sa.and_(decisions.c.enforced, decisions.c.action == action)
            query = query.where(sa.or_(enforced, sa.not_(decisions.c.enforced)) if action == "answer" else enforced)
        if before is not None:
            last = sa.select(decisions.c.at).where(decisions.c.id == before).scalar_subquery()
            query = query.where(sa.tuple_(decisions.c.at, decisions.c.id) < sa.tuple_(last, sa.literal(before)))
        return self._rows(query.limit(limit))

    def find(self, decision_id: str) -> Row | None:
        """The decision of this id, with the feedback on it that counts; None where there is none."""
        return next(iter(self._rows(sa.select(decisions).where(decisions.c.id == decision_id))), None)

    def _rows(self, query: sa.Select[Any]) -> list[Row]:
        """Decisions, each with the feedback on it that counts."""
        shown = query.with_only_columns(decisions.c.id)
        with self._transaction() as connection:
            rows = connection.execute(query).mappings().all()
            grades = _graded(connection, sa.select(feedback).where(feedback.c.decision_id.in_(shown)))
        return [(_entry(Decision, row), grades.get(row["id"])) for row in rows]

    def draw(self, size: int, *, since: datetime) -> list[Decision]:
        """Draw watched promised answers at random to be graded: so many of those that were never drawn."""
        fresh = sa.and_(decisions.c.alpha.is_not(None), decisions.c.drawn.is_(None))
        query = sa.select(decisions).where(PROMISED, fresh, decisions.c.at >= since.timestamp())
        with self._transaction() as connection:
            rows = connection.execute(query.order_by(sa.func.random()).limit(size)).mappings().all()
        return [_entry(Decision, row) for row in rows]

    def mark_drawn(self, ids: Sequence[str]) -> None:
        """Mark decisions as drawn, so that feedback on them counts as random, and none is drawn twice."""
        if not ids:
            return
        update = sa.update(decisions).where(decisions.c.id == sa.bindparam("of")).values(drawn=sa.bindparam("now"))
        now = datetime.now(UTC).timestamp()
        with self._transaction() as connection:
            connection.execute(update, [{"of": name, "now": now} for name in ids])

    def promises(self) -> dict[str, tuple[float, float, float | None, int]]:
        """alpha, delta and the requested alpha of every calibration that has promised an answer, that of the latest
        decision first; and how many of its answers were drawn, and have no random grade.
        """
        columns = decisions.c
        rates = (sa.func.max(columns.alpha), sa.func.max(columns.delta), sa.func.max(columns.requested_alpha))
        known = sa.select(columns.calibration_id, *rates).where(
            PROMISED, columns.calibration_id.is_not(None), columns.alpha.is_not(None)
        )
        waiting = sa.select(columns.calibration_id, sa.func.count()).where(
            columns.drawn.is_not(None), columns.id.not_in(RANDOMLY_GRADED)
        )
        latest_first = sa.func.max(columns.at).desc()
        with self._transaction() as connection:
            rows = connection.execute(known.group_by(columns.calibration_id).order_by(latest_first)).all()
            ungraded = {row[0]: row[1] for row in connection.execute(waiting.group_by(columns.calibration_id))}
        return {name: (alpha, delta, wish, ungraded.get(name, 0)) for name, alpha, delta, wish in rows}

    def random_grades(self) -> dict[str, dict[str, bool]]:
        """The grades of promised answers that were drawn at random, by calibration and decision, in the order in which
        the answers were first graded so.
        """
        promised = sa.select(decisions.c.id, decisions.c.calibration_id).where(PROMISED)
        random = sa.select(feedback).where(feedback.c.sampling == "random")
        grades: dict[str, dict[str, bool]] = {}
        with self._transaction() as connection:
            known = promised.where(decisions.c.id.in_(RANDOMLY_GRADED))
            calibrations = {row.id: row.calibration_id for row in connection.execute(known)}
            found = _graded(connection, random)
        for name, grade in found.items():
            if (calibration := calibrations.get(name)) is not None:
                grades.setdefault(calibration, {})[name] = grade.right
        return grades

    def savings(self, *, since: datetime) -> Savings:
        """What the decisions since a time have saved and cost, over whole blocks of them."""
        columns = decisions.c
        delivered = sa.or_(columns.action == "answer", sa.not_(columns.enforced))
        own = sa.case((columns.escalated_to.is_not(None), "escalate"), (delivered, "answer"), else_="abstain")
        place = sa.func.row_number().over(partition_by=own, order_by=(columns.at, columns.id))
        names = [one.name for one in fields(Spent) if one.name != "requests"]
        numbered = sa.select(
            own.label("own"), columns.at, ((place - 1) // BLOCK).label("block"), *(columns[name] for name in names)
        ).subquery()
        sums = [sa.case((sa.func.count(numbered.c[name]) == BLOCK, sa.func.sum(numbered.c[name]))) for name in names]
        blocks = (
            sa.select(numbered.c.own, *(one.label(name) for one, name in zip(sums, names, strict=True)))
            .group_by(numbered.c.own, numbered.c.block)
            .having(sa.func.count() == BLOCK, sa.func.min(numbered.c.at) >= since.timestamp())
        )
        counted = sa.select(own, sa.func.count()).where(columns.at >= since.timestamp()).group_by(own)
        with self._transaction() as connection:
            counts = dict.fromkeys(get_args(Action), 0) | {row[0]: row[1] for row in connection.execute(counted)}
            found = connection.execute(blocks).mappings().all()
        mine = {action: [row for row in found if row["own"] == action] for action in counts}
        spent = dict[Action, Spent]()
        for action, rows in mine.items():
            columns_of = {name: [row[name] for row in rows] for name in names}
            known = {name: sum(column) for name, column in columns_of.items() if column and None not in column}
            spent[action] = Spent(requests=BLOCK * len(rows), **known)
        return Savings(counts, spent)

    def forget(self, before: datetime) -> int:
        """Delete decisions before a time, and feedback on them; how many decisions there were."""
        with self._transaction() as connection:
            old = decisions.c.at < before.timestamp()
            ids = sa.select(decisions.c.id).where(old)
            connection.execute(sa.delete(feedback).where(feedback.c.decision_id.in_(ids)))
            return connection.execute(sa.delete(decisions).where(old)).rowcount

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Generator[sa.Connection]:
        """One transaction, on tables that are there."""
        began = False
        try:
            self._prepare()
            with self._engine.begin() as connection:
                began = True
                yield connection
        except (json.JSONDecodeError, UnicodeDecodeError) as error:  # SQLite takes any value in any column
            raise DecisionLogError(f"a row of the decision log holds what is no JSON; {_EDITED}") from error
        except sa_exc.SQLAlchemyError as error:
            # A driver's text may quote rows, and rows may hold questions and answers.
            why = "" if began else f": {_reason(error, self.url)}"
            hint = "Is there room, and was it made by this version?"
            if not began and self._engine.name != "sqlite":
                hint = "Check the address, the user, the password and the database's name"
            raise DecisionLogError(
                f"the decision log at {self.url.render_as_string()} cannot be used ({type(error).__name__}{why}). "
                f"{hint}"
            ) from error

    def _prepare(self) -> None:
        """Make the tables where they are missing, before the first transaction of this process."""
        with self._preparing:
            if not self._ready:
                try:
                    metadata.create_all(self._engine)
                except (sa_exc.OperationalError, sa_exc.ProgrammingError, sa_exc.IntegrityError):
                    metadata.create_all(self._engine)  # another process has made the same tables at the same moment
                self._ready = True


def log_address(given: str | None, *, known: bool = False) -> str | Path:
    """The URL or the file of a decision log; without one that of the environment, or the default file.

    Raises:
        DecisionLogError: the file is not there, and has to be `known`.
    """
    given = given or os.environ.get(LOG_VARIABLE)
    if given is not None and "://" in given:
        return given
    path = state_folder(otherwise="Name a file: --log decisions.db") / "decisions.db" if given is None else Path(given)
    if known and not path.is_file():
        raise DecisionLogError(f"there is no decision log at {path}; name the one that you mean with --log")
    return path


@contextmanager
def opened(given: str | None) -> Generator[Database]:
    """The database of a known log at a file or a URL, or else as `log_address` finds it.

    Raises:
        DecisionLogError: there is no such file.
    """
    with closing(Database(log_address(given, known=True))) as database:
        yield database


def _graded(connection: sa.Connection, some: sa.Select[Any]) -> dict[str, Feedback]:
    """Of some feedback that which counts, by decision, in the order of the first on each."""
    found: dict[str, Feedback] = {}
    for row in connection.execute(some.order_by(feedback.c.at, feedback.c.id)).mappings():
        entry = _entry(Feedback, row)
        if (before := found.get(entry.decision_id)) is None or entry.replaces(before):
            found[entry.decision_id] = entry
    return found


def _reason(error: sa_exc.SQLAlchemyError, url: sa.URL) -> str:
    """The driver's text about a database that cannot be opened, in one line and without the password."""
    text = " ".join(str(getattr(error, "orig", None) or error).split())
    return (text.replace(str(url.password), "***") if url.password else text)[:_LONGEST_REASON]


def _file_of(name: str) -> Path | None:
    """The file that SQLite opens under a name; None for a database in memory."""
    if name in ("", ":memory:"):
        return None
    return Path(urlsplit(name).path if name.startswith("file:") else name)


def _protect_sqlite(_: object, __: object, arguments: Sequence[Any], ___: object) -> None:
    """Before a file is opened: only its owner can read it. SQLite gives its own files next to it the same rights."""
    if (path := _file_of(str(arguments[0]))) is None:
        return
    with suppress(OSError):  # SQLite itself gives the reason why a file cannot be opened
        make_private(path)
    try:
        for file in (path, *(Path(f"{path}-{kind}") for kind in ("wal", "shm", "journal"))):
            if file.exists():
                take_back(file)
    except OSError as error:
        raise DecisionLogError(
            f"the decision log at {path} can be read by others, and their rights cannot be taken back: "
            f"{reason(error)}. Let its owner write it, or choose another file"
        ) from error


def _row(entry: Entry) -> dict[str, Any]:
    moments = {name: value.timestamp() for name, value in entry if isinstance(value, datetime)}
    return {**entry.model_dump(exclude={"note"}), **moments}


def _entry(kind: type[E], row: Mapping[Any, Any]) -> E:
    moments = {name: row[name] for name in ("at", "drawn") if row.get(name) is not None}
    try:
        moments = {name: datetime.fromtimestamp(value, UTC) for name, value in moments.items()}
        return kind.model_validate({**row, **moments})
    except (ValueError, TypeError, OverflowError, OSError) as error:
        named = str(row.get("id"))[:60]
        raise DecisionLogError(f"row {named} of the decision log cannot be read; {_EDITED}") from error

"""`DecisionLog`: every decision is a row on the disk before its id is given out. It watches the promises of the
calibrations in it, by the grades of answers that it has drawn at random.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from semgrad_guard.calibration.monitors import PromiseMonitor, PromiseState
from semgrad_guard.decision_log.database import Database
from semgrad_guard.decision_log.entries import Decision, Entry, Facts, Feedback, writable
from semgrad_guard.errors import DecisionLogError, InputError
from semgrad_guard.files import reason, state_folder, take_back
from semgrad_guard.records import Verdict

logger = logging.getLogger("semgrad_guard.decision_log")

_PATIENCE = 0.25
"""Seconds that a decision waits for a locked SQLite file before it goes to the journal."""
_PAUSE, _GATHER = 2.0, 0.05
"""Seconds between two looks for work; and for which entries gather, so that several share the transactions."""
_STALE, _SWEEP = 20.0, 3600.0
"""Seconds after which promises are read again without a grade from here, and old decisions deleted."""
_JOURNAL = "journal.db"
_AT_ONCE = 500
"""Entries that are brought from the journal into the database in one transaction."""


def watched_promises(database: Database) -> tuple[PromiseState, ...]:
    """The promises in a database by the grades of drawn answers, that of the latest decision first.

    Raises:
        DecisionLogError: the database cannot be reached.
    """
    grades, found = database.random_grades(), list[PromiseState]()
    for name, (alpha, delta, requested, ungraded) in database.promises().items():
        monitor = PromiseMonitor(alpha, delta)
        for right in grades.get(name, {}).values():
            monitor.add(not right)
        found.append(monitor.report(calibration_id=name, requested_alpha=requested, ungraded=ungraded))
    return tuple(found)


class DecisionLog(AbstractContextManager["DecisionLog"]):
    """Every decision a row; `Router(log=...)`, the integrations and the server write to one.

        log = DecisionLog("decisions.db")
        guard = Guard(model, Router(policy, log=log))

    A decision is on the disk before `write` returns its id, so that a killed process loses none. An SQLite file takes
    decisions itself. In front of PostgreSQL there is a journal, which is an SQLite file on this machine: a thread
    brings its entries into the database, which may be away for any time. The journal also takes the decisions of an
    SQLite file that another program has locked, so that no answer waits for that program. Where neither can be written,
    answers are delivered without an id, and an error is logged: a guard that stops because a disk is full would be
    worse than a gap that is counted. Thread-safe; processes may share a log.

    Args:
        url: the path of an SQLite file, or a URL as SQLAlchemy takes it ("postgresql+psycopg://user@host/name").
        journal: a folder for the journal, on a local disk; default: next to an SQLite file, or in the state folder.
        text: also write questions and delivered answers; withheld ones never.
        keep: delete decisions that are older than this.

    Raises:
        InputError: the URL cannot be used.
        DecisionLogError: the journal's folder cannot be made.
        MissingExtraError: without the extra `log`.
    """

    def __init__(
        self, url: str | Path, *, journal: Path | None = None, text: bool = False, keep: timedelta | None = None
    ) -> None:
        self._opened = partial(DecisionLog, url, journal=journal, text=text, keep=keep)
        self.database = Database(url, patience=_PATIENCE)
        self._journal_file = _journal_file(journal, self.database.file)
        self._journal = Database(self._journal_file)
        self._store = self._journal if self.database.file is None else self.database
        self.text, self._keep = text, keep
        self.failures = self.pending = 0
        """Decisions that could not be written; and entries that are safe in the journal, not yet in the database."""
        self.watched: tuple[PromiseState, ...] = ()
        """The promises as they were at the last look, at most some seconds ago where the database is there."""
        self._writing = threading.Lock()
        self._working, self._looked, self._swept, self._problem = threading.RLock(), -math.inf, -math.inf, ""
        self._due, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="semgrad-guard-log")
        self._thread.start()

    def __reduce__(self) -> tuple[Callable[[], DecisionLog], tuple[()]]:
        """By its address: another process opens the same log."""
        return self._opened, ()

    def write(self, verdict: Verdict, *, seconds: float | None = None, facts: Facts | None = None) -> str | None:
        """Write one decision, and return its id once it is on the disk; None where that failed."""
        entry = Decision.of(verdict, seconds=seconds, facts=facts or Facts(), text=self.text)
        try:
            self._put(entry)
        except DecisionLogError as error:
            self.failures += 1
            logger.error("a decision could not be written down: %s", error)
            return None
        return entry.id

    def feedback(
        self,
        decision_id: str,
        *,
        right: bool,
        grader: str | None = None,
        corrects: bool = False,
        current: Collection[str] = (),
    ) -> Feedback:
        """Write whether a delivered answer was right. Only grades of answers that this log has drawn (`Database.draw`)
        count for a promise, and of each the first; no caller can state that its grade is of a random sample.

        Args:
            decision_id: the answer's decision.
            right: whether it was right.
            grader: the name of the person or the program.
            corrects: it takes the place of earlier grades: said by `semgrad-guard feedback`, never for a client.
            current: the ids of the calibrations that decide now; the note tells where the decision is another's.

        Raises:
            InputError: there is no such decision.
            DecisionLogError: the decision cannot be looked up, or the feedback cannot be written.
        """
        # The journal first: entries go from there to the database.
        waits = self._journal.find(decision_id) if self._store is self._journal else None
        found = waits or self.database.find(decision_id)
        if found is None:
            raise InputError("there is no decision of this id in the log")
        decision, earlier = found
        entry = Feedback(
            id=f"fb_{secrets.token_hex(12)}",
            at=datetime.now(UTC),
            decision_id=decision_id,
            right=right,
            sampling="user" if decision.drawn is None else "random",
            corrects=corrects,
            grader=writable(grader),
        )
        self._put(entry)
        self._looked = -math.inf
        self._due.set()
        return entry.model_copy(update={"note": _note(decision, entry, earlier, current)})

    def promises(self) -> tuple[PromiseState, ...]:
        """Whether the promises of the calibrations in this log hold, that of the latest decision first.

        Raises:
            DecisionLogError: the database cannot be reached.
        """
        with self._working:
            self._forward()
            return self._look()

    def flush(self) -> bool:
        """Bring the journal's entries into the database, and the promises up to date; whether that was possible.

        A problem is logged once, and once more when it is over.
        """
        try:
            with self._working:
                self._bring_up_to_date()
        except DecisionLogError as error:
            if self._problem != str(error):
                logger.error("the decision log is not up to date, and is tried again every 2 s: %s", error)
            self._problem = str(error)
            return False
        if self._problem:
            logger.warning("the decision log is up to date again")
            self._problem = ""
        return True

    def close(self) -> None:
        """Bring the journal's entries into the database if it is there, and stop."""
        self._closed.set()
        self._due.set()
        self._thread.join()
        self._journal.close()
        self.database.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, entry: Entry) -> None:
        """Return once an entry is on the disk: in an SQLite file, or in the journal, also as long as that holds earlier
        ones.
        """
        if self._closed.is_set():
            raise DecisionLogError("the decision log is closed")
        with self._writing:
            if self._store is self.database:
                try:
                    self.database.add([entry])
                    return
                except DecisionLogError:
                    self._store = self._journal
            self._journal.add([entry])
            self.pending += 1
        self._due.set()

    # In a thread of its own: from the journal into the database, the promises, and old decisions.

    def _run(self) -> None:
        while not self._closed.is_set():
            self._closed.wait(_GATHER if self.flush() else _PAUSE)
            self._due.wait(_PAUSE)
            self._due.clear()
        self.flush()

    def _bring_up_to_date(self) -> None:
        self.database.open()
        self._forward()
        now = time.monotonic()
        if now - self._looked > _STALE:
            self._look()
            self._looked = now
        if self._keep is not None and now - self._swept > _SWEEP:
            self.database.forget(datetime.now(UTC) - self._keep)
            self._swept = now

    def _forward(self) -> None:
        """Bring the journal's entries into the database: this process's, and those that an ended one has left."""
        if self._store is self.database and not self._journal_file.exists():
            return
        while entries := self._journal.oldest(_AT_ONCE):
            self.database.add(entries)
            self._journal.remove(entries)
        with self._writing:
            self.pending = self._journal.count()
            if self.database.file is not None and not self.pending:
                self._store = self.database

    def _look(self) -> tuple[PromiseState, ...]:
        before = {one.calibration_id: one.state for one in self.watched}
        self.watched = watched_promises(self.database)
        for one in self.watched:
            if one.state != before.get(one.calibration_id, "unknown"):
                level = logging.WARNING if one.state == "broken" else logging.INFO
                logger.log(level, "the promise of calibration %s: %s", one.calibration_id, one)
        return self.watched


def _note(decision: Decision, entry: Feedback, earlier: Feedback | None, current: Collection[str]) -> str | None:
    """What new feedback does not count for, and how it differs from earlier feedback; None where all is as usual."""
    parts: list[str] = []
    if earlier is not None:
        before = f"the answer was graded {'right' if earlier.right else 'wrong'} before ({earlier.sampling})"
        counts = "this grade counts" if entry.replaces(earlier) else "that grade counts until the operator corrects it"
        parts.append(f"{before}: {'it counts once' if earlier.right == entry.right else counts}")
    mine = decision.calibration_id
    if mine is None or not decision.is_promised:
        parts.append("the answer was not promised, so it tells nothing about a promise")
    elif decision.alpha is None:
        parts.append("the promise that it was given under is about single sentences")
    elif entry.sampling != "random":
        parts.append("the log has not drawn it at random, so it does not count for the promise")
    elif current and mine not in current:
        parts.append(f"it counts for the promise of calibration {mine}, which decides no longer")
    return "; ".join(parts) or None


def _journal_file(folder: Path | None, log: Path | None) -> Path:
    """The journal in its folder, which is made; by default next to the SQLite file of a log, or in the state folder."""
    if folder is None and log is None:
        folder = state_folder(otherwise="Name a folder: the setting journal") / "journal"
    file = Path(f"{log}.waiting") if folder is None else folder / _JOURNAL
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder is not None and all(path.name.startswith(_JOURNAL) for path in folder.iterdir()):
            take_back(folder)  # unless it holds other files as well
    except OSError as error:
        raise DecisionLogError(
            f"the journal cannot be kept in {file.parent}: {reason(error)}; choose another folder"
        ) from error
    return file

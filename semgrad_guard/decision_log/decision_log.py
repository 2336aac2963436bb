"""`DecisionLog`: writes decisions to a journal, and brings them from there into a database."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

from semgrad_guard.decision_log.database import Database
from semgrad_guard.decision_log.entries import Decision, Feedback, Sampling
from semgrad_guard.decision_log.journal import Journal, Segment
from semgrad_guard.decision_log.sink import Facts
from semgrad_guard.errors import DecisionLogError, InputError
from semgrad_guard.records import Verdict

logger = logging.getLogger("semgrad_guard.decision_log")

_RETRY = 2.0
"""Seconds until the database is tried again."""
_SWEEP = 3600.0
"""Seconds between two looks for what is too old."""


class DecisionLog:
    """Every decision a row; `Guard(log=...)`, the integrations and the server write to one.

        log = DecisionLog("decisions.db")
        guard = Guard(model, policy, log=log)

    A decision is on the disk before `write` returns its id: what a killed process leaves in the journal is taken up by
    the next one. Where the journal cannot be written, answers go on without an id, and an error is logged. The database
    may be away for any time. Thread-safe; several processes may share one.

    Args:
        url: the path of an SQLite file, or a URL as SQLAlchemy takes it ("postgresql+psycopg://user@host/name").
        journal: a folder for the journal, on a local disk; default: "NAME.journal" beside an SQLite file.
        text: also write down questions and delivered answers; withheld ones never.
        keep: delete decisions that are older than this.

    Raises:
        InputError: the URL cannot be used, or has no journal.
        DecisionLogError: the journal's folder cannot be made.
        MissingExtraError: without the extra `log`.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        journal: Path | None = None,
        text: bool = False,
        keep: timedelta | None = None,
    ) -> None:
        self.database = Database(url)
        if journal is None:
            if self.database.url.get_backend_name() != "sqlite" or not self.database.url.database:
                raise InputError("a decision log in a database needs journal=..., a folder on a local disk")
            journal = Path(f"{self.database.url.database}.journal")
        self.text, self._keep = text, keep
        self.failures = 0
        self._journal = Journal(journal)
        self._taken: dict[Path, int] = {}
        self._pending = 0
        self._wake = threading.Condition()
        self._rounds, self._closed, self._asked = 0, False, True
        self._opened, self._said = False, ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="semgrad-guard-log")
        self._thread.start()

    @property
    def pending(self) -> int:
        """How many entries of this process are safe, and not yet in the database."""
        return self._pending

    def write(self, verdict: Verdict, *, seconds: float | None = None, facts: Facts | None = None) -> str | None:
        """Write one decision down, and return its id once it is on the disk; None where that failed."""
        entry = Decision.of(verdict, seconds=seconds, facts=facts or Facts(), text=self.text)
        try:
            self._put(entry)
        except DecisionLogError as error:
            self.failures += 1
            logger.error("a decision could not be written down: %s", error)
            return None
        return entry.id

    def feedback(
        self, decision_id: str, *, right: bool, sampling: Sampling = "user", grader: str | None = None
    ) -> Feedback:
        """Write down whether a delivered answer was right, and how it came to be graded.

        Raises:
            InputError: there is no such decision.
            DecisionLogError: it cannot be looked up, or written down.
        """
        self.flush()
        if not self.database.has(decision_id):
            raise InputError("there is no decision of this id in the log")
        entry = Feedback.of(decision_id, right=right, sampling=sampling, grader=grader)
        self._put(entry)
        return entry

    def flush(self, *, timeout: float = 10.0) -> bool:
        """Bring what is in the journal into the database; whether that was done in time."""
        with self._wake:
            aim = self._rounds + 2  # a round that has begun may have missed the last entry
            self._asked = True
            self._wake.notify_all()
            return self._wake.wait_for(lambda: self._rounds >= aim or self._pending == 0, timeout) or False

    def close(self) -> None:
        """Write what waits, bring it into the database if that is there, and stop."""
        self._journal.close()
        with self._wake:
            self._closed = self._asked = True
            self._wake.notify_all()
        self._thread.join()
        self.database.close()

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, entry: Decision | Feedback) -> None:
        with self._wake:
            self._pending += 1  # first: its line may be in the database before anybody here goes on
        try:
            self._journal.write([entry])
        except DecisionLogError:
            with self._wake:
                self._pending -= 1
            raise
        with self._wake:
            self._asked = True
            self._wake.notify_all()

    # From the journal into the database, in a thread of its own.

    def _run(self) -> None:
        swept = 0.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._asked, None)
                self._asked, last = False, self._closed
            done = self._try(last=last)
            if done and self._keep is not None and datetime.now(UTC).timestamp() - swept > _SWEEP:
                done, swept = self._sweep(), datetime.now(UTC).timestamp()
            with self._wake:
                self._rounds += done
                self._wake.notify_all()
                if last:
                    break
                if not done:
                    self._wake.wait_for(lambda: self._closed, _RETRY)
                    self._asked = True
        for segment in (*self._journal.full, *([self._journal.current] if self._journal.current else [])):
            segment.release()

    def _try(self, *, last: bool) -> bool:
        """One round: everything that is whole; whether it went well. The first one tells whether the database is there.

        What goes wrong is told once, and again when it is over.
        """
        try:
            if not self._opened:
                self.database.open()
                self._opened = True
            for segment in self._journal.orphans():
                self._take_over(segment)
            for segment in list(self._journal.full):
                self._fill(segment)
                self._journal.full.remove(segment)
                self._taken.pop(segment.path, None)
                segment.remove()
            current = self._journal.current
            if current is not None:
                self._fill(current)
                if last:
                    current.remove()
        except (DecisionLogError, OSError) as error:
            if self._said != str(error):
                logger.error("the decision log is not up to date, and is tried again every 2 s: %s", error)
            self._said = str(error)
            return False
        if self._said:
            logger.warning("the decision log is up to date again")
            self._said = ""
        return True

    def _take_over(self, segment: Segment) -> None:
        """Bring what another process has left behind into the database."""
        try:
            found, _ = segment.entries()
            self.database.add(found)
        except BaseException:
            segment.lock.release()
            raise
        logger.warning("%d entries of a process that is gone were taken over", len(found))
        segment.remove()

    def _fill(self, segment: Segment) -> None:
        """Bring the new entries of a segment of ours into the database."""
        found, end = segment.entries(self._taken.get(segment.path, 0))
        if found:
            self.database.add(found)
        self._taken[segment.path] = end
        with self._wake:
            self._pending -= len(found)

    def _sweep(self) -> bool:
        try:
            if self._keep is not None:
                self.database.forget(datetime.now(UTC) - self._keep)
        except DecisionLogError as error:
            logger.error("old decisions could not be deleted: %s", error)
            return False
        return True

"""`DecisionLog`: every decision is a row on the disk before its id is given out. It watches the promises of the
calibrations in it, by the grades of answers that were drawn at random.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from semgrad_guard.calibration.promise import PromiseMonitor, PromiseState
from semgrad_guard.decision_log.database import Database, log_address
from semgrad_guard.decision_log.entries import Decision, Entry, Facts, Feedback, Sampling
from semgrad_guard.errors import DecisionLogError, InputError
from semgrad_guard.files import reason, state_folder, take_back
from semgrad_guard.records import Verdict

logger = logging.getLogger("semgrad_guard.decision_log")

_PATIENCE = 0.25
"""Seconds that a decision waits for a locked SQLite file before it goes to the journal."""
_RETRY = 2.0
"""Seconds until a database that is away is tried again."""
_ROUND = 3600.0
"""Seconds between two looks for old decisions."""
_LOOK = 5.0
"""Seconds between two looks at the promises, and for a journal that an ended process left."""
_GATHER = 0.05
"""Seconds for which entries gather in the journal, so that several share the transactions that move them."""
_JOURNAL = "journal.db"
_AT_ONCE = 500
"""Entries that are brought from the journal into the database in one transaction."""
_STALE, _REST = 60.0, 1.0
"""Seconds after which promises are read again, where no feedback has come and where some has."""


@dataclass(frozen=True, kw_only=True)
class WatchedPromise:
    """The state of one calibration's promise; `ungraded` answers were drawn at random and are not graded yet."""

    calibration_id: str
    state: PromiseState
    ungraded: int

    def __str__(self) -> str:
        missing = f" {self.ungraded} drawn answers are not graded yet: if these are the hard ones, the grades flatter."
        return f"{self.state}{missing if self.ungraded else ''}"

    def as_json(self) -> dict[str, object]:
        """Plain JSON types, with the state in words."""
        numbers = self.state.model_dump(mode="json")
        return {"calibration_id": self.calibration_id, **numbers, "ungraded": self.ungraded, "words": str(self)}


class PromiseWatch:
    """The promises in a database. A monitor continues from the grades that it has seen; where an earlier grade was
    corrected, it begins anew. Thread-safe.

    Args:
        database: the decision log's.
        notify: called with a promise when its state has changed, also from "unknown" at the first look.
    """

    def __init__(self, database: Database, notify: Callable[[WatchedPromise], None] | None = None) -> None:
        self._database, self._notify = database, notify
        self._looking = threading.Lock()
        self._mark: object = None
        self._looked = -math.inf
        self._seen: dict[str, tuple[PromiseMonitor, list[bool]]] = {}
        self.latest: tuple[WatchedPromise, ...] = ()

    def look(self) -> tuple[WatchedPromise, ...]:
        """The promises now, that of the latest decision first.

        Raises:
            DecisionLogError: the database cannot be reached.
        """
        with self._looking:
            before = {one.calibration_id: one.state.state for one in self.latest}
            self.latest = tuple(self._read())
            for one in self.latest:
                if one.state.state == before.get(one.calibration_id, "unknown"):
                    continue
                is_alarm = one.state.state == "broken" and one.calibration_id in before
                level = logging.WARNING if is_alarm else logging.INFO
                logger.log(level, "the promise of calibration %s: %s", one.calibration_id, one)
                if self._notify is not None:
                    try:
                        self._notify(one)
                    except Exception:
                        logger.exception("the callback for changed promises failed")
            return self.latest

    def keep_up(self, *, at_once: bool) -> None:
        """Look where feedback has come, or a minute has passed; not twice in a second, unless `at_once`.

        Raises:
            DecisionLogError: the database cannot be reached.
        """
        now = time.monotonic()
        if at_once or now - self._looked >= _REST:
            self._looked, mark = now, (self._database.feedback_mark(), now // _STALE)
            if mark != self._mark:
                self.look()
                self._mark = mark

    def _read(self) -> Iterator[WatchedPromise]:
        grades = self._database.random_grades()
        for calibration_id, (alpha, delta, ungraded) in self._database.promises().items():
            mine = list(grades.get(calibration_id, {}).values())
            monitor, seen = self._seen.get(calibration_id, (PromiseMonitor(alpha, delta), []))
            if mine[: len(seen)] != seen:
                monitor, seen = PromiseMonitor(alpha, delta), []
            for right in mine[len(seen) :]:
                monitor.add(not right)
            self._seen[calibration_id] = (monitor, mine)
            yield WatchedPromise(calibration_id=calibration_id, state=monitor.report(), ungraded=ungraded)


class DecisionLog:
    """Every decision a row; `Guard(log=...)`, the integrations and the server write to one.

        log = DecisionLog("decisions.db")
        guard = Guard(model, policy, log=log)

    A decision is on the disk before `write` returns its id, so that a killed process loses none. An SQLite file takes
    decisions itself. In front of another database there is a journal, which is an SQLite file on this machine: a thread
    brings its entries into the database, which may be away for any time.

    The journal also takes the decisions of an SQLite file that another program has locked. Without it, an answer would
    wait for that program, or have no id; with it, the first decision under a lock takes 0.3 s and the others as long as
    without a lock. Where neither can be written, answers are delivered without an id, and an error is logged: a guard
    that stops because a disk is full would be worse than a gap that is counted. Thread-safe; processes may share a log.

    Args:
        url: the path of an SQLite file, or a URL as SQLAlchemy takes it ("postgresql+psycopg://user@host/name").
        journal: a folder for the journal, on a local disk; default: next to an SQLite file.
        text: also write questions and delivered answers; withheld ones never.
        keep: delete decisions that are older than this.
        on_promise: called with a `WatchedPromise` when a promise turns out to be kept or broken, in a thread of the
            log: at the latest some seconds after the feedback.

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
        on_promise: Callable[[WatchedPromise], None] | None = None,
    ) -> None:
        self._opened = partial(DecisionLog, url, journal=journal, text=text, keep=keep, on_promise=on_promise)
        self.database = Database(url, patience=_PATIENCE)
        self._watch = PromiseWatch(self.database, on_promise)
        self._is_sqlite = self.database.file is not None
        self._journal_file = _journal_file(journal, self.database.file)
        self._journal = Database(self._journal_file)
        self._store = self.database if self._is_sqlite else self._journal
        self.text, self._keep = text, keep
        self.failures = 0
        self._queue, self._writing = list[tuple[Entry, Future[None]]](), threading.Lock()
        self._changed = threading.Condition()
        self._pending, self._rounds, self._due, self._closed = 0, 0, True, False
        self._swept, self._problem = 0.0, ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="semgrad-guard-log")
        self._thread.start()

    def __reduce__(self) -> tuple[Callable[[], DecisionLog], tuple[()]]:
        """By its address: another process opens the same log."""
        return self._opened, ()

    @property
    def pending(self) -> int:
        """How many entries are safe in the journal, and not yet in the database."""
        return self._pending

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
        sampling: Sampling | None = None,
        grader: str | None = None,
        current: Collection[str] = (),
    ) -> Feedback:
        """Write whether a delivered answer was right.

        Args:
            decision_id: the answer's decision.
            right: whether it was right.
            sampling: why it was graded; by default "random" where this log has drawn it (`Database.draw`), or else
                "user". Only answers that were graded because they were drawn at random count for a claim.
            grader: the name of the person or the program.
            current: the ids of the calibrations that decide now; the note tells where the decision is another's.

        Raises:
            InputError: there is no such decision.
            DecisionLogError: the decision cannot be looked up, or the feedback cannot be written.
        """
        # The journal first: entries go from there to the database.
        waits = self._journal.find(decision_id) if self._store is self._journal else None
        found = self.database.find(decision_id) if waits is None else waits
        if found is None:
            raise InputError("there is no decision of this id in the log")
        decision, earlier = found
        way: Sampling = sampling or ("user" if decision.drawn is None else "random")
        entry = Feedback.of(decision_id, right=right, sampling=way, grader=grader)
        self._put(entry)
        with self._changed:
            self._due = True
            self._changed.notify_all()
        return entry.model_copy(update={"note": _note(decision, entry, earlier, current)})

    @property
    def watched(self) -> tuple[WatchedPromise, ...]:
        """The promises as they were at the last look, at most some seconds ago where the database is there."""
        return self._watch.latest

    def promises(self) -> tuple[WatchedPromise, ...]:
        """Whether the promises of the calibrations in this log hold, that of the latest decision first.

        Raises:
            DecisionLogError: the database cannot be reached.
        """
        self.flush(timeout=2.0)
        return self._watch.look()

    def flush(self, *, timeout: float = 10.0) -> bool:
        """Bring the journal's entries into the database; whether that was done in time."""
        with self._changed:
            aim = self._rounds + 2  # a round that has begun may have missed the last entry
            self._due = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._rounds >= aim or self._pending == 0, timeout) or False

    def close(self) -> None:
        """Bring the journal's entries into the database if it is there, and stop."""
        with self._changed:
            self._closed = self._due = True
            self._changed.notify_all()
        self._thread.join()
        self._journal.close()
        self.database.close()

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, entry: Entry) -> None:
        """Return once an entry is on the disk. Entries that come together are written in one transaction."""
        done = Future[None]()
        with self._changed:
            if self._closed:
                raise DecisionLogError("the decision log is closed")
            self._queue.append((entry, done))
        with self._writing:
            if not done.done():  # the thread before this one has not written this entry with its own
                self._write_queue()
        done.result()

    def _write_queue(self) -> None:
        with self._changed:
            batch, self._queue = self._queue, []
        problem: DecisionLogError | None = DecisionLogError("writing was interrupted")
        try:
            self._add([entry for entry, _ in batch])
            problem = None
        except DecisionLogError as error:
            problem = error
        finally:
            for _, done in batch:
                if problem is None:
                    done.set_result(None)
                else:
                    done.set_exception(problem)

    def _add(self, entries: list[Entry]) -> None:
        """Add entries to an SQLite file, or to the journal; to the journal also as long as it holds earlier ones."""
        if self._store is self.database:
            try:
                self.database.add(entries)
            except DecisionLogError:
                self._store = self._journal
            else:
                return
        self._journal.add(entries)
        with self._changed:
            self._pending += len(entries)
            self._due = True
            self._changed.notify_all()

    # From the journal into the database, in a thread of its own.

    def _run(self) -> None:
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(lambda: self._due, _LOOK)
                self._changed.wait_for(lambda: self._closed, _GATHER)
                self._due, last = False, self._closed
            done = self._round()
            with self._changed:
                self._rounds += done
                self._changed.notify_all()
                if not done and not last:
                    self._changed.wait_for(lambda: self._closed, _RETRY)
                    self._due = True

    def _round(self) -> bool:
        """Bring everything up to date; whether that worked. A problem is logged once, and once more when it is over."""
        try:
            if not self._rounds:  # before there is a decision: is the database there?
                self.database.open()
            if self._store is self._journal or self._journal_file.exists():
                self._forward()
            self._watch.keep_up(at_once=self._closed)
            now = time.time()
            if self._keep is not None and now - self._swept > _ROUND:
                self.database.forget(datetime.now(UTC) - self._keep)
                self._swept = now
        except DecisionLogError as error:
            if self._problem != str(error):
                logger.error("the decision log is not up to date, and is tried again every 2 s: %s", error)
            self._problem = str(error)
            return False
        if self._problem:
            logger.warning("the decision log is up to date again")
            self._problem = ""
        return True

    def _forward(self) -> None:
        """Bring the journal's entries into the database: this process's, and those that an ended one has left."""
        while entries := self._journal.oldest(_AT_ONCE):
            self.database.add(entries)
            self._journal.remove(entries)
        with self._writing:
            self._pending = self._journal.count()
            if self._is_sqlite and not self._pending:
                self._store = self.database


def open_log(
    given: str | None, *, journal: Path | None = None, text: bool = False, keep: timedelta | None = None
) -> DecisionLog:
    """The log at a file or a URL, or else at the address of the environment, or in the default file.

    Raises:
        InputError, DecisionLogError, MissingExtraError: see `DecisionLog`.
    """
    address = log_address(given)
    if isinstance(address, Path):
        address.parent.mkdir(parents=True, exist_ok=True)
    elif journal is None and not address.startswith("sqlite"):
        journal = state_folder(otherwise="Name a folder: --journal FOLDER") / "journal"
    return DecisionLog(address, journal=journal, text=text, keep=keep)


def _note(decision: Decision, entry: Feedback, earlier: Feedback | None, current: Collection[str]) -> str | None:
    """What new feedback does not count for, and how it differs from earlier feedback; None where all is as usual."""
    parts: list[str] = []
    if earlier is not None:
        before = f"the answer was graded {'right' if earlier.right else 'wrong'} before ({earlier.sampling})"
        same = earlier.right == entry.right
        parts.append(
            f"{before}: {'it counts once' if same else 'both are kept, and the latest of a random sample counts'}"
        )
    mine = decision.calibration_id
    if mine is None or not decision.is_promised:
        parts.append("the answer was not promised, so it tells nothing about a promise")
    elif decision.alpha is None:
        parts.append("the promise that it was given under is about single sentences, or older than the log's watch")
    elif entry.sampling != "random":
        parts.append(f"it was not drawn at random ({entry.sampling}), so it does not count for the promise")
    elif current and mine not in current:
        parts.append(f"it counts for the promise of calibration {mine}, which decides no longer")
    return "; ".join(parts) or None


def _journal_file(folder: Path | None, log: Path | None) -> Path:
    """The journal in its folder, which is made; without a folder, next to the SQLite file of a log."""
    if folder is None and log is None:
        raise InputError("a decision log in a database needs journal=..., a folder on a local disk")
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

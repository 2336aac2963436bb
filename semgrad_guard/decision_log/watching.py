"""Watches the promises of the calibrations in a decision log, by the grades of answers that were drawn at random."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from semgrad_guard.calibration.promise_monitor import PromiseMonitor, PromiseState
from semgrad_guard.decision_log.database import Database

logger = logging.getLogger("semgrad_guard.decision_log")

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
                if one.state.state != before.get(one.calibration_id, "unknown"):
                    self._tell(one, is_news=one.calibration_id in before)
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

    def _tell(self, changed: WatchedPromise, *, is_news: bool) -> None:
        level = logging.WARNING if is_news and changed.state.state == "broken" else logging.INFO
        logger.log(level, "the promise of calibration %s: %s", changed.calibration_id, changed)
        if self._notify is not None:
            try:
                self._notify(changed)
            except Exception:
                logger.exception("the callback for changed promises failed")

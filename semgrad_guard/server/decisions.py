"""The decision log over HTTP: decisions, summaries of them, and feedback."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from semgrad_guard.calibration import Calibration
from semgrad_guard.calibration.promise import PromiseMonitor
from semgrad_guard.decision_log.entries import Summary, by_day, parse_since
from semgrad_guard.errors import InputError
from semgrad_guard.server.answers import HttpError
from semgrad_guard.server.protocol import DecisionsRequest, FeedbackRequest, SummaryRequest

if TYPE_CHECKING:  # they need the extra `log`
    from semgrad_guard.decision_log.decision_log import DecisionLog
    from semgrad_guard.decision_log.entries import Decision, Feedback

SUMMARIZED = 50_000
"""How many decisions a summary reads at most, the latest."""


def feedback(log: DecisionLog, request: FeedbackRequest, *, current: Collection[str]) -> dict[str, Any]:
    """Log whether a delivered answer was right; `current` are the calibrations that decide.

    Raises:
        HttpError: the decision is unknown.
        DecisionLogError: it cannot be written.
    """
    try:
        entry = log.feedback(request.decision_id, right=request.right, grader=request.grader, current=current)
    except InputError as error:
        raise HttpError(404, "decision_not_found", str(error), fields=("decision_id",)) from error
    return {"object": "feedback", **entry.model_dump(mode="json", exclude={"kind"})}


def decisions(log: DecisionLog, request: DecisionsRequest) -> dict[str, Any]:
    """Decisions, the latest first; those on withheld answers without their scores and times.

    Raises:
        InputError: a time cannot be read.
        DecisionLogError: it cannot be read.
    """
    log.flush(timeout=2.0)
    rows = log.database.decisions(
        since=None if request.since is None else parse_since(request.since),
        until=None if request.until is None else parse_since(request.until),
        action=request.action,
        limit=request.limit + 1,
        before=request.after,
    )
    data = [_listed(decision, feedback) for decision, feedback in rows[: request.limit]]
    return {"object": "list", "data": data, "has_more": len(rows) > request.limit}


def summary(log: DecisionLog, request: SummaryRequest) -> dict[str, Any]:
    """Rates and coverage by day, and in all, of the latest `SUMMARIZED` decisions; `complete` if these are all.

    A summary of one withheld answer would be its score, so scores and times are those of delivered answers.

    Raises:
        InputError: the time cannot be read.
        DecisionLogError: it cannot be read.
    """
    log.flush(timeout=2.0)
    latest = log.database.decisions(since=parse_since(request.since), limit=SUMMARIZED + 1)
    rows = latest[:SUMMARIZED]
    return {
        "object": "summary",
        "total": Summary.of("in all", rows, withheld=False).model_dump(mode="json"),
        "days": [day.model_dump(mode="json") for day in by_day(rows, withheld=False)],
        "complete": len(latest) == len(rows),
    }


def promises(log: DecisionLog, *, current: Mapping[str, Calibration]) -> dict[str, Any]:
    """Whether the promises in the log hold, those of the calibrations that decide (`current`) first.

    Raises:
        DecisionLogError: it cannot be read.
    """
    from semgrad_guard.decision_log.decision_log import WatchedPromise

    logged = {one.calibration_id: one for one in log.promises()}
    for name, calibration in current.items():
        if calibration.threshold is not None and calibration.is_about_answers and name not in logged:
            state = PromiseMonitor(calibration.alpha, calibration.delta).report()
            logged[name] = WatchedPromise(calibration_id=name, state=state, ungraded=0)
    data = [{**one.as_json(), "current": name in current} for name, one in logged.items()]
    return {"object": "list", "data": sorted(data, key=lambda one: not one["current"])}


def _listed(decision: Decision, feedback: Feedback | None) -> dict[str, Any]:
    shown = (
        None if feedback is None else feedback.model_dump(mode="json", exclude={"kind", "id", "decision_id", "note"})
    )
    decision = decision if decision.shows_draft else decision.without_score()
    row = decision.model_dump(mode="json", exclude={"kind"})
    return {"object": "decision", **row, "delivery": decision.delivery, "feedback": shown}

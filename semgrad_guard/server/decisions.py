"""The decision log over HTTP: decisions, summaries of them, and feedback."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from semgrad_guard.calibration import Calibration
from semgrad_guard.calibration.promise import PromiseMonitor
from semgrad_guard.decision_log.entries import parse_since
from semgrad_guard.errors import InputError
from semgrad_guard.server.errors import HttpError
from semgrad_guard.server.protocol import DecisionsRequest, FeedbackRequest

if TYPE_CHECKING:  # they need the extra `log`
    from semgrad_guard.decision_log.decision_log import DecisionLog
    from semgrad_guard.decision_log.entries import Decision, Feedback


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
    return {"object": "feedback", **entry.model_dump(mode="json")}


def decisions(log: DecisionLog, request: DecisionsRequest) -> dict[str, Any]:
    """Decisions, the latest first; those on withheld answers without their scores and times.

    Raises:
        InputError: a time cannot be read.
        DecisionLogError: it cannot be read.
    """
    log.flush()
    rows = log.database.decisions(
        since=None if request.since is None else parse_since(request.since),
        action=request.action,
        limit=request.limit + 1,
        before=request.after,
    )
    data = [_listed(decision, feedback) for decision, feedback in rows[: request.limit]]
    return {"object": "list", "data": data, "has_more": len(rows) > request.limit}


def promises(log: DecisionLog, *, current: Mapping[str, Calibration]) -> dict[str, Any]:
    """Whether the promises in the log hold, those of the calibrations that decide (`current`) first.

    Raises:
        DecisionLogError: it cannot be read.
    """
    logged = {str(one.calibration_id): one for one in log.promises()}
    for name, calibration in current.items():
        if calibration.threshold is not None and calibration.is_about_answers and name not in logged:
            logged[name] = PromiseMonitor(calibration.alpha, calibration.delta).report(calibration_id=name)
    data = [{**one.model_dump(), "words": str(one), "current": name in current} for name, one in logged.items()]
    return {"object": "list", "data": sorted(data, key=lambda one: not one["current"])}


def savings(log: DecisionLog, since: str | None) -> dict[str, Any]:
    """What the decisions since a time have saved and cost, over whole blocks of them.

    Raises:
        InputError: the time cannot be read.
        DecisionLogError: it cannot be read.
    """
    log.flush()
    found = log.database.savings(since=parse_since(since or "7d"))
    spent = {action: asdict(one) for action, one in found.spent.items()}
    return {"object": "savings", "requests": found.counts, "sums": spent, "words": found.words()}


def _listed(decision: Decision, feedback: Feedback | None) -> dict[str, Any]:
    shown = (
        None if feedback is None else feedback.model_dump(mode="json", include={"at", "right", "sampling", "grader"})
    )
    partly = decision.is_part
    decision = decision if decision.shows_draft else decision.without_score()
    row = decision.model_dump(mode="json", exclude={"drawn"})  # which would tell a client which grades will count
    return {"object": "decision", **row, "delivery": decision.delivery, "partly_withheld": partly, "feedback": shown}

"""What an observing router does with a decision: write it to a log, and tell whoever listens to the run."""

from __future__ import annotations

import logging

from langchain_core.callbacks import CallbackManager
from langchain_core.messages import AIMessage
from langchain_core.runnables.config import ensure_config

from langchain_semgrad_guard.rules import Rules
from semgrad_guard import METADATA_KEY, Verdict
from semgrad_guard.guard import Draft, Pending, one

logger = logging.getLogger(METADATA_KEY)


def observe(rules: Rules, draft: Draft[AIMessage]) -> None:
    """Log a decision, and dispatch it as a custom event where there is a run to belong to.

    Answers let through are logged as INFO, others as WARNING; the record's attribute `semgrad_guard` holds the
    verdict's metadata. An observer must not end what it observes: its own errors are logged, with their traces.
    """
    try:
        verdict = one(Pending([draft], rules.terms).outcomes()).verdict
        level = logging.INFO if verdict.action == "answer" else logging.WARNING
        record = verdict.metadata()
        logger.log(level, "%s would be the decision: %s", verdict.action, _why(verdict), extra={METADATA_KEY: record})
        # A model that is not ours has no context in a batch: what is observed about it is reported to the log only.
        manager = CallbackManager.configure(ensure_config().get("callbacks"))
        if manager.parent_run_id is not None:
            manager.on_custom_event(METADATA_KEY, record, run_id=manager.parent_run_id)
    except Exception:
        logger.exception("there is no decision about this answer")


def _why(verdict: Verdict) -> str:
    if verdict.reason is not None or verdict.uncertainty is None:
        return verdict.reason or "the answer has no score"
    return f"uncertainty {verdict.uncertainty:.4g} is within the threshold {verdict.threshold:.4g}"

"""Verdicts in OpenTelemetry: attributes of a span, and an evaluation event tied to it. Needs the extra `tracing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry._logs import LoggerProvider, LogRecord, get_logger
from opentelemetry.trace import Span, get_current_span, set_span_in_context

from semgrad_guard.records import trace_fields

EVENT = "gen_ai.evaluation.result"
"""The event's name in OpenTelemetry's semantic conventions for generative AI."""


class EvaluationLog:
    """Writes records of verdicts (`Verdict.metadata()`) to spans and to a logger; no text of an answer.

    Args:
        name: of the instrumentation, in exported events.
        logger_provider: where events go; default: OpenTelemetry's global one.
    """

    def __init__(self, name: str, *, logger_provider: LoggerProvider | None = None) -> None:
        self._logger = get_logger(name, logger_provider=logger_provider)

    def write(self, record: Mapping[str, Any], span: Span | None = None, *, response_id: str | None = None) -> None:
        """Write one verdict to a span, by default the current one; `response_id` names the response that it is about.

        A span that has ended takes no attributes; the event is tied to it all the same. An answer without a score is an
        evaluation that failed: its `error.type` is the verdict's status.
        """
        span = span or get_current_span()
        if span.is_recording():
            span.set_attributes(trace_fields(record))
        fields = {  # the estimator is the metric, the action is the label
            "gen_ai.evaluation.name": record["estimator"],
            "gen_ai.evaluation.score.value": record["uncertainty"],
            "gen_ai.evaluation.score.label": record["action"],
            "gen_ai.evaluation.explanation": record["reason"],
            "gen_ai.response.id": response_id,
            "error.type": None if record["status"] == "scored" else record["status"],
        }
        attributes = {name: value for name, value in fields.items() if value is not None}
        self._logger.emit(LogRecord(context=set_span_in_context(span), event_name=EVENT, attributes=attributes))

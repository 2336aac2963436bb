"""Verdicts as OpenTelemetry's evaluation events, as the integrations emit them. Needs the extra `tracing`."""

from __future__ import annotations

from opentelemetry._logs import LoggerProvider
from opentelemetry.trace import get_current_span

from semgrad_guard.adapters.telemetry import EvaluationLog
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import public_record


class Evaluations:
    """Writes every verdict of a server as a `gen_ai.evaluation.result`, tied to the request's span if there is one.

    No text is written. The event of a withheld answer is the client's record with the score and the reason: events go
    to the operator.

    Args:
        logger_provider: where events go; default: OpenTelemetry's global one, which `opentelemetry-instrument` sets.
    """

    def __init__(self, *, logger_provider: LoggerProvider | None = None) -> None:
        self._log = EvaluationLog("semgrad_guard.server", logger_provider=logger_provider)

    def decided(self, verdict: Verdict) -> None:
        """Write one verdict."""
        record = {**public_record(verdict), "uncertainty": verdict.uncertainty, "reason": verdict.reason}
        self._log.write(record, get_current_span())

"""What the tests of both frameworks share: the scenarios of a gate of tool calls, and what is exported to traces."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from semgrad_guard import ToolCall, Verdict
from semgrad_guard.records import CallVerdict

SURE, DOUBTFUL = 0.1, 9.0
Call = tuple[str, dict[str, Any], float | None]
"""A tool, its arguments, and the uncertainty of the call."""


def pay(to: str, uncertainty: float | None = SURE) -> Call:
    """A payment."""
    return "pay", {"to": to}, uncertainty


CLOCK: Call = ("clock", {}, SURE)

SCENARIOS: dict[str, tuple[list[list[Call]], list[str]]] = {
    "sure": ([[pay("Ann")]], ["Ann"]),
    "doubtful": ([[pay("Ann", DOUBTFUL)]], []),
    "without a score": ([[pay("Ann", None)]], []),
    "each by itself": ([[pay("Bob", DOUBTFUL), pay("Ann"), CLOCK]], ["Ann", "clock"]),
    "the same twice in a message, once in doubt": ([[pay("Ann"), pay("Ann", DOUBTFUL)]], []),
    "written again, twenty times": ([[pay("Bob", DOUBTFUL)], *([pay(f"Bob{number}")] for number in range(20))], []),
    "a result next to the block": ([[pay("Bob", DOUBTFUL), CLOCK], [pay("Bob")]], ["clock"]),
    "a later result": ([[pay("Bob", DOUBTFUL)], [CLOCK], [pay("Ann")]], ["clock"]),
    "twice the same": ([[pay("Ann")], [pay("Ann", DOUBTFUL)]], ["Ann"]),
}


def verdict_on(calls: list[Call], *, text: str = "", estimator: str = "gnll", model: str = "m") -> Verdict:
    """The verdict on a message with these calls."""
    scored = tuple(CallVerdict(digest=ToolCall(name, args).digest, uncertainty=own) for name, args, own in calls)
    return Verdict.of(
        status="scored", action="answer", text=text, estimator=estimator, uncertainty=1.0, model=model, calls=scored
    )


class Exported:
    """A tracer and a logger provider that keep what is exported in memory: nothing leaves the machine."""

    def __init__(self) -> None:
        self._spans, self._logs = InMemorySpanExporter(), InMemoryLogRecordExporter()
        self.tracer_provider, self.logger_provider = TracerProvider(), LoggerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.logger_provider.add_log_record_processor(SimpleLogRecordProcessor(self._logs))

    def spans(self) -> list[ReadableSpan]:
        """All spans that have ended, in the order of their ends."""
        return list(self._spans.get_finished_spans())

    def judged(self) -> list[ReadableSpan]:
        """Those that hold a verdict."""
        return [span for span in self.spans() if "semgrad_guard.action" in (span.attributes or {})]

    def events(self) -> list[Any]:
        """All events."""
        return [exported.log_record for exported in self._logs.get_finished_logs()]

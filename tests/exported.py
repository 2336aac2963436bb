"""What a test exports to OpenTelemetry, for the tests of both frameworks and of the server."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


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

"""Confidence in traces: OpenTelemetry spans, exported to memory here and to Phoenix, Jaeger or a file elsewhere.

    python examples/06_traces.py

It needs opentelemetry-sdk and openinference-instrumentation-langchain.
"""

from __future__ import annotations

# Ours first: where something is not installed, it says what to install.
from langchain_semgrad_guard import ChatSemGrad, UncertaintyMiddleware, UncertaintyTracer

# isort: split

from langchain.agents import create_agent
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console
from rich.table import Table

from semgrad_guard import Policy

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
LangChainInstrumentor().instrument(tracer_provider=provider)

draft, second = ChatSemGrad(model="pocket", max_tokens=24), ChatSemGrad(model="pocket", max_tokens=48)
guard = UncertaintyMiddleware(Policy(threshold=0), escalate_to=second)  # 0: every answer is handed on
agent = create_agent(draft, [], middleware=[guard])
agent.invoke({"messages": [("human", "What is the capital of France?")]}, {"callbacks": [UncertaintyTracer()]})

table = Table("span", "kind", "action", "uncertainty", "ms")
for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time):
    about, milliseconds = span.attributes, (span.end_time - span.start_time) / 1e6
    uncertainty = about.get("semgrad_guard.uncertainty")
    table.add_row(
        span.name,
        about["openinference.span.kind"],
        about.get("semgrad_guard.action", ""),
        "" if uncertainty is None else f"{uncertainty:.2e}",
        f"{milliseconds:.0f}",
    )
Console(width=100).print(table)

"""Confidence in traces: OpenTelemetry spans, exported to memory here and to Phoenix, Jaeger or a file elsewhere.

    python examples/06_traces.py [--model smollm2]

It needs opentelemetry-sdk and openinference-instrumentation-langchain.
"""

from __future__ import annotations

# Ours first: if a package is absent, its error names it.
from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, UncertaintyTracer, get_verdict

# isort: split

from argparse import ArgumentParser
from statistics import median

from langchain.agents import create_agent
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console
from rich.table import Table

from semgrad_guard import Policy

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model

QUESTIONS = ["What is the capital of France?", "What is the capital of Mongolia?"]
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
LangChainInstrumentor().instrument(tracer_provider=provider)

draft, second = ChatSemGrad(model=MODEL, max_tokens=24), ChatSemGrad(model=MODEL, max_tokens=48)
scores = [get_verdict(answer).uncertainty for answer in draft.batch(QUESTIONS)]
router = UncertaintyRouterCallback(Policy(threshold=median(scores)), escalate_to=second)  # between the two
agent = create_agent(ChatSemGrad(model=MODEL, max_tokens=24, router=router), [])
exporter.clear()
for question in QUESTIONS:
    agent.invoke({"messages": [("human", question)]}, {"callbacks": [UncertaintyTracer()]})

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

"""`UncertaintyTracer`: confidence in OpenTelemetry traces, OpenInference's among them."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any
from uuid import UUID

from langchain_core.outputs import ChatGeneration, LLMResult
from opentelemetry._logs import LoggerProvider
from opentelemetry.trace import INVALID_SPAN, Span, get_current_span

from langchain_semgrad_guard.deciding import TracingHandler
from langchain_semgrad_guard.messages import verdict_of
from semgrad_guard.adapters.traces import EvaluationLog
from semgrad_guard.errors import LowConfidenceError

_OPENINFERENCE = "openinference.instrumentation.langchain"


class UncertaintyTracer(TracingHandler):
    """Writes the verdict about every scored answer into the span of its run.

        chat.invoke(question, config={"callbacks": [UncertaintyTracer()]})

    The span is OpenInference's span of the chat model's run if its LangChain instrumentor is on, else the current span.
    Its attributes are the verdict's fields (`semgrad_guard.uncertainty`, `semgrad_guard.action`, ...); a log event
    `gen_ai.evaluation.result` is tied to it. The decision of a router is written as well as the score; a scored
    target's run, within an answer's, has a span of its own. No text is written.

    Give it in a config's callbacks: the model's own come after the instrumentor, which ends the span too early, so that
    the verdict is an event only.

    Args:
        logger_provider: where events go; default: OpenTelemetry's global one.
    """

    run_inline = True  # on the caller's thread, where the current span is, and before tracers that end spans

    def __init__(self, *, logger_provider: LoggerProvider | None = None) -> None:
        self._evaluations = EvaluationLog(__name__, logger_provider=logger_provider)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Write the verdict, if the answer carries one."""
        verdict = verdict_of(response)
        if verdict is not None:
            delivered = next(chain.from_iterable(response.generations), None)
            response_id = delivered.message.id if isinstance(delivered, ChatGeneration) else None
            self._evaluations.write(verdict.metadata(), _span_of(run_id), response_id=response_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Write the verdict that a raising router's error holds."""
        if isinstance(error, LowConfidenceError):
            self._evaluations.write(error.verdict.metadata(), _span_of(run_id))


def _span_of(run_id: UUID) -> Span:
    """OpenInference's span of a run, while it is open; the current one where it is not in use."""
    module: Any = sys.modules.get(_OPENINFERENCE)  # imported by every instrumentor
    instrumentor = None if module is None else module.LangChainInstrumentor()
    if instrumentor is None or not instrumentor.is_instrumented_by_opentelemetry:
        return get_current_span()
    return instrumentor.get_span(run_id) or INVALID_SPAN

"""`UncertaintyTracer`: confidence in OpenTelemetry traces, OpenInference's among them."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from opentelemetry._logs import LoggerProvider
from opentelemetry.trace import get_current_span
from pydantic import PrivateAttr

from llama_index_semgrad_guard.events import UncertaintyEvent
from semgrad_guard.adapters.telemetry import EvaluationLog


class UncertaintyTracer(BaseEventHandler):
    """Writes every verdict into the span of the guard that decided (engine, chat engine, agent's step), or of the LLM.

        get_dispatcher().add_event_handler(UncertaintyTracer())

    The span is the current one: OpenInference's, if its LlamaIndex instrumentor (4.6.1 or later) is on, or the one
    around the call. Its attributes are the verdict's fields (`semgrad_guard.uncertainty`, `semgrad_guard.action`, ...);
    a log event `gen_ai.evaluation.result` is tied to it. No text is written.

    Args:
        logger_provider: where events go; default: OpenTelemetry's global one.
    """

    _evaluations: EvaluationLog = PrivateAttr()

    def __init__(self, *, logger_provider: LoggerProvider | None = None) -> None:
        super().__init__()
        self._evaluations = EvaluationLog(__name__, logger_provider=logger_provider)

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for this handler."""
        return "UncertaintyTracer"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Write the event if it is a verdict."""
        if isinstance(event, UncertaintyEvent):
            self._evaluations.write(event.record, get_current_span())

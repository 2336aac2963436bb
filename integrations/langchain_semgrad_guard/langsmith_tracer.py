"""`UncertaintyLangChainTracer`: confidence in LangSmith's runs."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from langchain_core.outputs import LLMResult
from langchain_core.tracers import LangChainTracer
from langchain_core.tracers.schemas import Run

from langchain_semgrad_guard.messages import verdict_of
from semgrad_guard.records import trace_fields


class UncertaintyLangChainTracer(LangChainTracer):
    """LangChain's LangSmith tracer, which also writes verdicts into the metadata of the runs they are about.

        chat.invoke(question, config={"callbacks": [UncertaintyLangChainTracer()]})

    It takes the place of the tracer that LANGSMITH_TRACING adds: LangChain adds none where there is one. Runs can then
    be filtered by `semgrad_guard.action`, `semgrad_guard.uncertainty` and so on. It is a tracer of its own, because
    runs are sent as soon as they end.
    """

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> Run:
        """Add the verdict, if the answer carries one, before the run is sent."""
        verdict, run = verdict_of(response), self.run_map.get(str(run_id))
        if verdict is not None and run is not None:
            run.add_metadata(trace_fields(verdict.metadata()))
        return super().on_llm_end(response, run_id=run_id, **kwargs)

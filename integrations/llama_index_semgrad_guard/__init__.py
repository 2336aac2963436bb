"""LlamaIndex with answers that know how sure they are: a scored LLM, and engines that enforce a policy.

    llm = SemGradLLM(model="pocket")
    engine = GuardedQueryEngine(index.as_query_engine(llm=llm), policy=Policy(threshold=0.004))
    engine.query("What is the capital of France?").metadata["semgrad_guard"]

`get_verdict(response)` reads the record back as a `Verdict`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from semgrad_guard.adapters.code_identity import Versioned
from semgrad_guard.errors import LowConfidenceError, MissingExtraError

if find_spec("llama_index") is None or find_spec("llama_index.core") is None:
    raise MissingExtraError("llama-index-core", extra="llama-index")

from llama_index_semgrad_guard.agents import GuardedReActAgent, ask_person
from llama_index_semgrad_guard.calibrating import acalibrate_engine, calibrate_engine
from llama_index_semgrad_guard.callback import UncertaintyRouterCallback
from llama_index_semgrad_guard.chat_engine import GuardedChatEngine
from llama_index_semgrad_guard.evaluator import UncertaintyEvaluator
from llama_index_semgrad_guard.events import UncertaintyEvent, UncertaintyEventHandler
from llama_index_semgrad_guard.llm import SemGradLLM
from llama_index_semgrad_guard.query_engine import GuardedQueryEngine
from llama_index_semgrad_guard.records import get_verdict

if TYPE_CHECKING:
    from llama_index_semgrad_guard.tracing import UncertaintyTracer

__all__ = [
    "GuardedChatEngine",
    "GuardedQueryEngine",
    "GuardedReActAgent",
    "LowConfidenceError",
    "SemGradLLM",
    "UncertaintyEvaluator",
    "UncertaintyEvent",
    "UncertaintyEventHandler",
    "UncertaintyRouterCallback",
    "UncertaintyTracer",
    "Versioned",
    "acalibrate_engine",
    "ask_person",
    "calibrate_engine",
    "get_verdict",
]


def __getattr__(name: str) -> Any:
    if name != "UncertaintyTracer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("opentelemetry") is None:
        raise MissingExtraError("opentelemetry", extra="tracing")
    return import_module(f"{__name__}.tracing").UncertaintyTracer

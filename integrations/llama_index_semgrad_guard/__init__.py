"""LlamaIndex with a score for every answer, which an LLM decides about before the answer leaves it.

    router = UncertaintyRouterCallback(Policy(threshold=0.004))
    llm = SemGradLLM(model="pocket", router=router)
    engine = guarded(index.as_query_engine(llm=llm), router)
    engine.query("What is the capital of France?").metadata["semgrad_guard"]

`get_verdict(response)` reads the record back as a `Verdict`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from semgrad_guard.errors import MissingExtraError
from semgrad_guard.lazy import lazy_names

if find_spec("llama_index") is None or find_spec("llama_index.core") is None:
    raise MissingExtraError("llama-index-core", extra="llama-index")

if TYPE_CHECKING:
    from llama_index_semgrad_guard.engines import acalibrate_engine as acalibrate_engine
    from llama_index_semgrad_guard.engines import calibrate_engine as calibrate_engine
    from llama_index_semgrad_guard.engines import guarded as guarded
    from llama_index_semgrad_guard.evaluator import UncertaintyEvaluator as UncertaintyEvaluator
    from llama_index_semgrad_guard.llm import SemGradLLM as SemGradLLM
    from llama_index_semgrad_guard.records import UncertaintyEvent as UncertaintyEvent
    from llama_index_semgrad_guard.records import UncertaintyEventHandler as UncertaintyEventHandler
    from llama_index_semgrad_guard.records import UncertaintyTracer as UncertaintyTracer
    from llama_index_semgrad_guard.records import get_verdict as get_verdict
    from llama_index_semgrad_guard.router import UncertaintyRouterCallback as UncertaintyRouterCallback
    from llama_index_semgrad_guard.router import ask_person as ask_person
    from llama_index_semgrad_guard.tool_gate import ToolGate as ToolGate
    from llama_index_semgrad_guard.tool_gate import calibrate_tool_calls as calibrate_tool_calls
    from semgrad_guard.errors import LowConfidenceError as LowConfidenceError
    from semgrad_guard.guard import asking as asking
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)

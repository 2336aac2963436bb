"""LlamaIndex with a score for every answer: a scored LLM, and engines that enforce a policy.

    llm = SemGradLLM(model="pocket")
    engine = GuardedQueryEngine(index.as_query_engine(llm=llm), policy=Policy(threshold=0.004))
    engine.query("What is the capital of France?").metadata["semgrad_guard"]

`get_verdict(response)` reads the record back as a `Verdict`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from semgrad_guard.errors import MissingExtraError, UnsupportedFrameworkError
from semgrad_guard.lazy import lazy_names

if find_spec("llama_index") is None or find_spec("llama_index.core") is None:
    raise MissingExtraError("llama-index-core", extra="llama-index")

from llama_index_semgrad_guard.private_names import ABSENT

if ABSENT:
    raise UnsupportedFrameworkError("llama-index-core", ABSENT, extra="llama-index")

if TYPE_CHECKING:
    from llama_index_semgrad_guard.agents import GuardedFunctionAgent as GuardedFunctionAgent
    from llama_index_semgrad_guard.agents import GuardedReActAgent as GuardedReActAgent
    from llama_index_semgrad_guard.agents import ask_person as ask_person
    from llama_index_semgrad_guard.calibrating import acalibrate_engine as acalibrate_engine
    from llama_index_semgrad_guard.calibrating import calibrate_engine as calibrate_engine
    from llama_index_semgrad_guard.chat_engine import GuardedChatEngine as GuardedChatEngine
    from llama_index_semgrad_guard.evaluator import UncertaintyEvaluator as UncertaintyEvaluator
    from llama_index_semgrad_guard.events import UncertaintyEvent as UncertaintyEvent
    from llama_index_semgrad_guard.events import UncertaintyEventHandler as UncertaintyEventHandler
    from llama_index_semgrad_guard.events import UncertaintyRouterCallback as UncertaintyRouterCallback
    from llama_index_semgrad_guard.events import UncertaintyTracer as UncertaintyTracer
    from llama_index_semgrad_guard.llm import SemGradLLM as SemGradLLM
    from llama_index_semgrad_guard.query_engine import GuardedQueryEngine as GuardedQueryEngine
    from llama_index_semgrad_guard.records import get_verdict as get_verdict
    from semgrad_guard.adapters.code_identity import Versioned as Versioned
    from semgrad_guard.errors import LowConfidenceError as LowConfidenceError
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)

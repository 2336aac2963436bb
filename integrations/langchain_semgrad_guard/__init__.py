"""LangChain with answers that know how sure they are: chat models that decide about their answers before they return.

    router = UncertaintyRouterCallback(Policy(threshold=0.004), escalate_to=larger)
    chat = ChatSemGrad(model="pocket", router=router)
    prompt | chat | StrOutputParser()

Every message carries its verdict in `message.response_metadata["semgrad_guard"]`; `get_verdict(message)` reads it back.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from semgrad_guard.errors import MissingExtraError
from semgrad_guard.lazy import lazy_names

if find_spec("langchain_core") is None:
    raise MissingExtraError("langchain-core", extra="langchain")

if TYPE_CHECKING:
    from langchain_semgrad_guard.agents import ToolGate as ToolGate
    from langchain_semgrad_guard.agents import UncertaintyMiddleware as UncertaintyMiddleware
    from langchain_semgrad_guard.agents import calibrate_tool_calls as calibrate_tool_calls
    from langchain_semgrad_guard.chains import acalibrate_chain as acalibrate_chain
    from langchain_semgrad_guard.chains import calibrate_chain as calibrate_chain
    from langchain_semgrad_guard.chains import guarded as guarded
    from langchain_semgrad_guard.chat_semgrad import ChatSemGrad as ChatSemGrad
    from langchain_semgrad_guard.deciding import UncertaintyLangChainTracer as UncertaintyLangChainTracer
    from langchain_semgrad_guard.decisions import CalibratedDecisions as CalibratedDecisions
    from langchain_semgrad_guard.decisions import calibrate_decisions as calibrate_decisions
    from langchain_semgrad_guard.messages import get_verdict as get_verdict
    from langchain_semgrad_guard.router import UncertaintyRouterCallback as UncertaintyRouterCallback
    from langchain_semgrad_guard.router import asking as asking
    from langchain_semgrad_guard.router import withheld_draft as withheld_draft
    from langchain_semgrad_guard.served import GuardedChatModel as GuardedChatModel
    from langchain_semgrad_guard.tracing import UncertaintyTracer as UncertaintyTracer
    from semgrad_guard.errors import LowConfidenceError as LowConfidenceError
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, extras={"langchain": "agents", "opentelemetry": "tracing"})

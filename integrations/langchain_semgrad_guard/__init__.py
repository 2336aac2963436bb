"""LangChain with answers that know how sure they are: a scored chat model, and a router whose decisions it enforces.

    chat = ChatSemGrad(model="pocket")
    router = UncertaintyRouterCallback(policy=Policy(threshold=0.004), escalate_to=retrieval_chain)
    chat.invoke("What is the capital of France?", config={"callbacks": [router]})

Every message carries its verdict in `message.response_metadata["semgrad_guard"]`; `get_verdict(message)` reads it back.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from semgrad_guard.errors import LowConfidenceError, MissingExtraError

if find_spec("langchain_core") is None:
    raise MissingExtraError("langchain-core", extra="langchain")

from langchain_semgrad_guard.calibrating import acalibrate_chain, calibrate_chain
from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.chat_model import ChatSemGrad
from langchain_semgrad_guard.guarded_model import GuardedChatModel, UncertaintyRouter
from langchain_semgrad_guard.langsmith_tracer import UncertaintyLangChainTracer
from langchain_semgrad_guard.messages import get_verdict
from langchain_semgrad_guard.review import HumanReview

if TYPE_CHECKING:
    from langchain_semgrad_guard.middleware import UncertaintyMiddleware
    from langchain_semgrad_guard.tracing import UncertaintyTracer

__all__ = [
    "ChatSemGrad",
    "GuardedChatModel",
    "HumanReview",
    "LowConfidenceError",
    "UncertaintyLangChainTracer",
    "UncertaintyMiddleware",
    "UncertaintyRouter",
    "UncertaintyRouterCallback",
    "UncertaintyTracer",
    "acalibrate_chain",
    "calibrate_chain",
    "get_verdict",
]

_LAZY = {
    "UncertaintyMiddleware": ("middleware", "langchain", "agents"),
    "UncertaintyTracer": ("tracing", "opentelemetry", "tracing"),
}
"""Names whose modules need more than langchain-core: module, package, extra."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package, extra = _LAZY[name]
    if find_spec(package) is None:
        raise MissingExtraError(package, extra=extra)
    return getattr(import_module(f"{__name__}.{module}"), name)

"""LangChain with answers that know how sure they are: a scored chat model, and a router whose decisions it enforces.

    chat = ChatSemGrad(model="pocket")
    router = UncertaintyRouterCallback(policy=Policy(threshold=0.004), escalate_to=retrieval_chain)
    chat.invoke("What is the capital of France?", config={"callbacks": [router]})

Every message carries its verdict in `message.response_metadata["semgrad_guard"]`; `get_verdict(message)` reads it back.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from semgrad_guard.errors import MissingExtraError, UnsupportedFrameworkError
from semgrad_guard.lazy import lazy_names

if find_spec("langchain_core") is None:
    raise MissingExtraError("langchain-core", extra="langchain")

from langchain_semgrad_guard.private_names import ABSENT

if ABSENT:
    raise UnsupportedFrameworkError("langchain-core", ABSENT, extra="langchain")

if TYPE_CHECKING:
    from langchain_semgrad_guard.calibrating import acalibrate_chain as acalibrate_chain
    from langchain_semgrad_guard.calibrating import calibrate_chain as calibrate_chain
    from langchain_semgrad_guard.callback import UncertaintyLangChainTracer as UncertaintyLangChainTracer
    from langchain_semgrad_guard.callback import UncertaintyRouterCallback as UncertaintyRouterCallback
    from langchain_semgrad_guard.chains import guarded as guarded
    from langchain_semgrad_guard.chat_model import ChatSemGrad as ChatSemGrad
    from langchain_semgrad_guard.guarded_model import GuardedChatModel as GuardedChatModel
    from langchain_semgrad_guard.guarded_model import UncertaintyRouter as UncertaintyRouter
    from langchain_semgrad_guard.messages import get_verdict as get_verdict
    from langchain_semgrad_guard.middleware import UncertaintyMiddleware as UncertaintyMiddleware
    from langchain_semgrad_guard.review import HumanReview as HumanReview
    from langchain_semgrad_guard.tracing import UncertaintyTracer as UncertaintyTracer
    from semgrad_guard.errors import LowConfidenceError as LowConfidenceError
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, extras={"langchain": "agents", "opentelemetry": "tracing"})

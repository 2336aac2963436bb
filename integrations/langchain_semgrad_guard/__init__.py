"""LangChain with answers that know how sure they are: a scored chat model, and a router whose decisions it enforces.

    chat = ChatSemGrad(model="pocket")
    router = UncertaintyRouterCallback(policy=Policy(threshold=0.004), escalate_to=retrieval_chain)
    chat.invoke("What is the capital of France?", config={"callbacks": [router]})

Every message carries its verdict in `message.response_metadata["semgrad_guard"]`; `get_verdict(message)` reads it back.
"""

from __future__ import annotations

from importlib.util import find_spec

from semgrad_guard.errors import LowConfidenceError, MissingExtraError

if find_spec("langchain_core") is None:
    raise MissingExtraError("langchain-core", extra="langchain")

from langchain_semgrad_guard.callback import UncertaintyRouterCallback
from langchain_semgrad_guard.chat_model import ChatSemGrad
from langchain_semgrad_guard.messages import get_verdict
from langchain_semgrad_guard.router import UncertaintyRouter

__all__ = ["ChatSemGrad", "LowConfidenceError", "UncertaintyRouter", "UncertaintyRouterCallback", "get_verdict"]

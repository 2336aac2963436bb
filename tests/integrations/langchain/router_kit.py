"""A router in any of its modes, and all that listens to a call of it, on every path that LangChain has."""

from __future__ import annotations

from typing import Any

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable

from langchain_semgrad_guard import (
    UncertaintyRouter,
)
from semgrad_guard import Policy

from .support import (
    EVENT_ROUTES,
    QUESTION,
    ROUTES,
    Ledger,
    Wire,
)

PROMPT = ChatPromptTemplate.from_messages([("human", "{question}")])
ABSTENTION, ELSEWHERE = "I would rather not say.", "from elsewhere"
KINDS = ("ChatSemGrad", "served elsewhere")
PATHS = ROUTES | EVENT_ROUTES
LIVE = frozenset({"stream", "astream", *EVENT_ROUTES})
MODES = ("enforce", "annotate", "observe", "raise")


class Kit:
    """A router around one kind of model, and all that listens to a call of it."""

    def __init__(self, model: dict[str, Any], wire: Wire, ledger: Ledger) -> None:
        self.model, self.wire, self.ledger = model, wire, ledger

    def router(self, policy: Policy, **settings: Any) -> UncertaintyRouter:
        return UncertaintyRouter(**self.model, policy=policy, abstain_message=ABSTENTION, **settings)

    def call(self, path: str, router: Runnable[Any, Any]) -> list[Any]:
        """Through a chain, but for version 3 of the event streams, which chains do not have."""
        config = {"callbacks": [self.wire, self.ledger]}
        if path.endswith("v3"):
            return PATHS[path](router, QUESTION, config)
        return PATHS[path](PROMPT | router, {"question": QUESTION}, config)

    def assert_closed(self) -> None:
        """Every run that was opened was closed exactly once, for handlers and for tracers."""
        assert self.ledger.models(), "no run of a model was traced"
        assert sorted(map(str, self.wire.started)) == sorted(map(str, self.wire.ended))
        self.ledger.assert_balanced()

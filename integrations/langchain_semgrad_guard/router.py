"""`UncertaintyRouter`: the old name of `GuardedChatModel`."""

from __future__ import annotations

from typing import Any

from langchain_semgrad_guard.guarded_model import GuardedChatModel
from semgrad_guard import Policy


class UncertaintyRouter(GuardedChatModel):
    """`GuardedChatModel` under its old name, its first argument called `llm`."""

    def __init__(self, llm: Any = None, policy: Policy | None = None, /, **fields: Any) -> None:
        super().__init__(fields.pop("llm", llm), policy, **fields)

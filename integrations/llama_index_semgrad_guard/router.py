"""`UncertaintyRouterCallback`: the rules by which a `SemGradLLM` decides, as its `router`."""

from __future__ import annotations

from semgrad_guard.guard import Router


class UncertaintyRouterCallback(Router):
    """Decides about every answer of the LLMs that have it, before the answer leaves them.

        router = UncertaintyRouterCallback(Policy(threshold=0.004), escalate_to=larger_llm)
        llm = SemGradLLM(model="pocket", router=router)

    `escalate_to` is an engine, an LLM or a function. It gets what the LLM was asked, a text or messages; an engine gets
    the user's last message. For a `guarded` engine it answers the engine's question.
    """

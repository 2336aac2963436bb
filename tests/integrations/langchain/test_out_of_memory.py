"""A chain delivers an answer that there was no room to score, by the policy for answers without a score."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from semgrad_guard import LanguageModel, Policy

from .support import QUESTION, Route, text_of

ABSTENTION = "I would rather not say."


@pytest.mark.parametrize("on_unscored", ["answer", "abstain"])
def test_it_is_delivered_by_the_policy(
    on_unscored: Any, chat: ChatSemGrad, language_model: LanguageModel, draft: str, route: Route
) -> None:
    policy = Policy(threshold=1e308, on_unscored=on_unscored, on_cut="score")
    router = chat.model_copy(update={"router": UncertaintyRouterCallback(policy, abstain_message=ABSTENTION)})

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].requires_grad:
            torch.empty(1 << 52)

    model: Any = language_model._model
    handle = model.model.layers[-1].register_forward_pre_hook(hook)
    try:
        assert text_of(route(router, QUESTION, {})) == (draft if on_unscored == "answer" else ABSTENTION)
        verdict = get_verdict(router.invoke(QUESTION))
    finally:
        handle.remove()
    assert verdict is not None
    assert (verdict.action, verdict.status) == (on_unscored, "failed")
    assert "memory ran out" in str(verdict.reason)

"""An engine delivers an answer that there was no room to score, by the policy for answers without a score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback, guarded
from semgrad_guard import LanguageModel, Policy
from tests.pairwise import in_turn


@in_turn(on_unscored=["answer", "abstain"], streaming=[False, True])
def test_it_is_delivered_by_the_policy(
    on_unscored: Any, streaming: bool, make_engine: Callable[..., Any], llm: SemGradLLM, wide: LanguageModel
) -> None:
    engine = make_engine(streaming=streaming)
    plain = str(make_engine().query("What?"))
    llm.router = UncertaintyRouterCallback(Policy(threshold=1e308, on_cut="score"), on_unscored=on_unscored)

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].requires_grad:
            torch.empty(1 << 52)

    model: Any = wide._model
    handle = model.model.layers[-1].register_forward_pre_hook(hook)
    try:
        response = guarded(engine, llm.router).query("What?")
    finally:
        handle.remove()
    assert str(response) == (plain if on_unscored == "answer" else "I don't know.")
    record = response.metadata["semgrad_guard"]
    assert (record["action"], record["status"]) == (on_unscored, "failed")
    assert "memory ran out" in record["reason"]

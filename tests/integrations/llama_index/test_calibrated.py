"""An LLM that scores as a calibration did, told by the calibration or by a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llama_index_semgrad_guard import GuardedQueryEngine, SemGradLLM
from semgrad_guard import LanguageModel, Policy, SemGrad, calibrate
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard import binding_of, decide, questions_of_kind

OFFICIAL = SemGrad("official")


def test_a_calibration_or_a_policy_stands_for_its_estimator(wide: LanguageModel) -> None:
    reference = SemGradLLM.from_model(wide, estimator=OFFICIAL, max_tokens=4).score("What?", "That.")
    made = calibrate([i / 100 for i in range(100)], [True] * 100, alpha=0.2, delta=0.2, binding=binding_of(reference))
    policy = Policy.from_calibration(made)
    for given in (made, policy):
        llm = SemGradLLM.from_model(wide, estimator=given, max_tokens=4)
        assert llm.estimator == OFFICIAL
        verdict = decide(llm.score("What?", "That."), policy, can_escalate=False)
        assert (verdict.calibration_id, verdict.uncertainty) == (made.id, reference.uncertainty)
    with pytest.raises(BindingMismatchError, match=r"estimator_of\(calibration\)"):
        decide(SemGradLLM.from_model(wide, max_tokens=4).score("What?", "That."), policy, can_escalate=False)


@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_questions_have_a_kind_while_the_context_lasts(make_engine: Callable[..., Any], way: str) -> None:
    engine = GuardedQueryEngine(make_engine(), Policy(threshold=1e9))
    with questions_of_kind("law"):
        response = engine.query("What?") if way == "query" else await engine.aquery("What?")
    assert response.metadata["semgrad_guard"]["kind"] == "law"
    assert engine.query("What?").metadata["semgrad_guard"]["kind"] is None

"""A model that scores as a calibration did: told by the calibration, by a policy, or by the router around it."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouter, UncertaintyRouterCallback, get_verdict
from semgrad_guard import Calibration, HybridGrad, LanguageModel, Policy, SemGrad, calibrate, estimator_of
from semgrad_guard.errors import BindingMismatchError, CalibrationError
from semgrad_guard.guard import binding_of, questions_of_kind

from .served import Served
from .support import QUESTION

OFFICIAL = SemGrad("official")


@pytest.fixture(scope="module")
def calibration(language_model: LanguageModel) -> Calibration:
    """Made for the answers of the tiny model, by another estimator than the default."""
    verdict = get_verdict(ChatSemGrad.from_model(language_model, estimator=OFFICIAL, max_tokens=12).invoke(QUESTION))
    return calibrate([i / 100 for i in range(100)], [True] * 100, alpha=0.2, delta=0.2, binding=binding_of(verdict))


def test_a_calibration_or_a_policy_stands_for_its_estimator(
    language_model: LanguageModel, calibration: Calibration
) -> None:
    policy = Policy.from_calibration(calibration)
    for given in (calibration, policy, estimator_of(calibration)):
        chat = ChatSemGrad.from_model(language_model, estimator=given, max_tokens=12)
        assert chat.estimator == OFFICIAL
        verdict = get_verdict(chat.invoke(QUESTION, {"callbacks": [UncertaintyRouterCallback(policy)]}))
        assert verdict.calibration_id == calibration.id
        assert verdict.confidence is not None
    assert ChatSemGrad.from_model(language_model, estimator=Policy(threshold=1.0)).estimator == HybridGrad()


@pytest.mark.parametrize("bound", [False, True])
def test_a_router_scores_as_its_policy_says(chat: ChatSemGrad, calibration: Calibration, bound: bool) -> None:
    model: Any = chat.bind(max_tokens=11) if bound else chat
    router = UncertaintyRouter(model, Policy.from_calibration(calibration))
    assert get_verdict(router.invoke(QUESTION)).calibration_id == calibration.id
    assert chat.estimator == HybridGrad(), "the model itself stays as it was"


def test_a_scorer_too(language_model: LanguageModel, calibration: Calibration) -> None:
    policy = Policy.from_calibration(calibration)
    router = UncertaintyRouter(Served(weights=language_model), policy, scorer=language_model, prompt_template="chat")
    assert get_verdict(router.invoke(QUESTION)).calibration_id == calibration.id


def test_a_choice_is_kept_and_a_mismatch_says_what_helps(
    language_model: LanguageModel, calibration: Calibration
) -> None:
    policy = Policy.from_calibration(calibration)
    chosen = ChatSemGrad.from_model(language_model, estimator=HybridGrad(), max_tokens=12)
    with pytest.raises(BindingMismatchError, match=r"estimator is 'hybridgrad'.*estimator_of\(calibration\)"):
        UncertaintyRouter(chosen, policy).invoke(QUESTION)


def test_an_estimator_that_cannot_be_made_again_must_be_passed(chat: ChatSemGrad, calibration: Calibration) -> None:
    assert calibration.binding is not None
    foreign = calibration.binding.model_copy(update={"estimator": "oracle"})
    unknown = calibrate([0.1] * 100, [True] * 100, alpha=0.2, delta=0.2, binding=foreign)
    with pytest.raises(CalibrationError, match="Pass the estimator itself"):
        UncertaintyRouter(chat, Policy.from_calibration(unknown))
    with pytest.raises(CalibrationError, match="Pass the estimator itself"):
        ChatSemGrad(estimator=unknown)


@pytest.mark.parametrize("way", ["invoke", "stream", "batch", "ainvoke", "chain"])
async def test_questions_have_a_kind_while_the_context_lasts(chat: ChatSemGrad, way: str) -> None:
    router = UncertaintyRouter(chat, Policy(threshold=1e9))
    with questions_of_kind("law"):
        answers: dict[str, Any] = {
            "invoke": lambda: router.invoke(QUESTION),
            "stream": lambda: functools.reduce(operator.add, router.stream(QUESTION)),
            "batch": lambda: router.batch([QUESTION, QUESTION])[1],
            "chain": lambda: (RunnableLambda(lambda text: text) | router).invoke(QUESTION),
        }
        message = await router.ainvoke(QUESTION) if way == "ainvoke" else answers[way]()
    assert get_verdict(message).kind == "law"
    assert get_verdict(router.invoke(QUESTION)).kind is None

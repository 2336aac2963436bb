"""A promise covers the calls that were calibrated: their options, their prompts, and one score of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, calibrate_chain, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.records import Verdict
from tests.pairwise import in_turn

from .support import policy_for_another_model

QUESTIONS = [f"Who is number {number} of {number % 7}?" for number in range(20)]
RATES = {"alpha": 0.2, "delta": 0.1, "progress": False, "grid": [1e9], "max_concurrency": 20}


def right(text: str, answers: Sequence[str]) -> bool:
    """A grader by function: everything is right."""
    return True


def policy_of(chain: Runnable[Any, Any], **how: Any) -> Policy:
    return Policy.from_calibration(calibrate_chain(chain, [(q, "x") for q in QUESTIONS], right, **RATES, **how))


def verdict_of(message: Any) -> Verdict:
    verdict = get_verdict(message)
    assert verdict is not None
    return verdict


class ServerClient(FakeListChatModel):
    """Another server's client, with options in its fields."""

    temperature: float | None = None
    top_p: float | None = None
    stop: list[str] | None = None
    model_kwargs: dict[str, Any] = {}  # noqa: RUF012 - a field


def served(**fields: Any) -> ServerClient:
    return ServerClient(responses=["An answer."], **fields)


def guarding(model: LanguageModel, policy: Policy, **fields: Any) -> GuardedChatModel:
    return GuardedChatModel(served(**fields), policy, scorer=model)


@pytest.fixture(scope="module")
def of_the_chat(language_model: LanguageModel) -> Policy:
    """The promise of a model that answers itself."""
    return policy_of(ChatSemGrad.from_model(language_model, max_tokens=12))


@pytest.fixture(scope="module")
def of_the_server(language_model: LanguageModel) -> Policy:
    """The promise of another server's model."""
    return policy_of(guarding(language_model, Policy(threshold=0.0)))


WAYS: dict[str, Callable[..., Verdict]] = {
    "call": lambda guard, options: verdict_of(guard.invoke(QUESTIONS[3], **options)),
    "bound": lambda guard, options: verdict_of(guard.bind(**options).invoke(QUESTIONS[3])),
    "bound inside": lambda guard, options: verdict_of(
        guard.model_copy(update={"model": guard.model.bind(**options)}).invoke(QUESTIONS[3])
    ),
    "streamed": lambda guard, options: verdict_of(sum_of(guard.stream(QUESTIONS[3], **options))),
}


def sum_of(chunks: Iterator[Any]) -> Any:
    whole = next(chunks)
    for chunk in chunks:
        whole = whole + chunk
    return whole


@in_turn(way=WAYS, name=[None, "chat"])
def test_options_of_a_call_to_a_server(
    of_the_chat: Policy, of_the_server: Policy, language_model: LanguageModel, way: str, name: Any
) -> None:
    policy = of_the_server if name is None else of_the_chat
    guard = GuardedChatModel(served(), policy, scorer=language_model, prompt_template=name, mode="annotate")
    assert WAYS[way](guard, {}).promised
    for options in (
        {"temperature": 1.5},
        {"model": "other"},
        {"stop": ["x"]},
        {"logit_bias": {"1": 9}},
        {"max_tokens": 1},
    ):
        verdict = WAYS[way](guard, options)
        assert not verdict.promised, options
        assert f"the option {next(iter(options))} of the call" in verdict.unfamiliar[-1]


@pytest.mark.parametrize(
    "fields", [{"temperature": 1.0}, {"model_kwargs": {"typical_p": 0.5}}, {"stop": ["n"]}, {"top_p": 0.5}]
)
def test_options_in_the_models_fields(
    of_the_server: Policy, language_model: LanguageModel, fields: dict[str, Any]
) -> None:
    own = policy_of(guarding(language_model, Policy(threshold=0.0), **fields))
    for policy, promised in ((of_the_server, False), (own, True)):  # calibrated without them, and with them
        guard = guarding(language_model, policy, **fields)
        assert verdict_of(guard.invoke(QUESTIONS[3])).promised is promised


class Semantic(BaseCache):
    """The answer to a similar prompt: to any other."""

    def __init__(self) -> None:
        self.kept: Any = None

    def lookup(self, prompt: str, llm_string: str) -> Any:
        return self.kept

    def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
        self.kept = self.kept or return_val

    def clear(self, **kwargs: Any) -> None:
        self.kept = None


def test_an_answer_to_another_question_from_a_cache_is_not_promised(chat: ChatSemGrad, of_the_chat: Policy) -> None:
    guard = GuardedChatModel(chat, of_the_chat)
    set_llm_cache(Semantic())
    try:
        first, same, other = (verdict_of(guard.invoke(QUESTIONS[i])) for i in (3, 3, 4))
    finally:
        set_llm_cache(None)
    assert (first.promised, same.promised, other.promised) == (True, True, False)
    assert other.unfamiliar == ("the answer was given to another prompt (it comes from a cache, say)",)


def test_nor_is_one_of_a_server_behind_such_a_cache(language_model: LanguageModel, of_the_server: Policy) -> None:
    for cache, promised in ((InMemoryCache(), True), (Semantic(), False)):
        set_llm_cache(cache)
        try:
            verdict = verdict_of(guarding(language_model, of_the_server).invoke(QUESTIONS[3]))
        finally:
            set_llm_cache(None)
        assert verdict.promised is promised
        assert promised or "the option cache of the call is 'Semantic'" in verdict.unfamiliar[0]


def test_the_worst_of_several_scores_is_no_score_of_one(chat: ChatSemGrad) -> None:
    again = ChatPromptTemplate.from_template("again {text}")
    chain = chat | (lambda reply: {"text": reply.text[:20]}) | again | chat
    policy = policy_of(chain, aggregate="max")
    with pytest.raises(BindingMismatchError, match="'aggregate': 'max'"):
        GuardedChatModel(chat, policy).invoke(QUESTIONS[3])


def test_a_field_that_is_set_later_holds(language_model: LanguageModel) -> None:
    """The guard scores by a copy of the model, which follows the model."""
    chat = ChatSemGrad.from_model(language_model, max_tokens=12)
    guard = GuardedChatModel(chat, policy_for_another_model())
    first = guard._inner.model
    assert guard._inner.model is first
    chat.max_tokens = 3
    assert (first.max_tokens, guard._inner.model.max_tokens) == (12, 3)

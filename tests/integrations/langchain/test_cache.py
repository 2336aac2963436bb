"""LangChain's cache holds drafts, each judged anew by whichever router is attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from semgrad_guard import HybridGrad, LanguageModel, SemGrad
from semgrad_guard.engine.worker import Request, Ticket
from semgrad_guard.errors import BindingMismatchError

from .support import EVERYTHING, NOTHING, QUESTION, ROUTES, metadata_of, policy_for_another_model, save_tiny, text_of

CACHED = ("invoke", "ainvoke", "batch", "abatch")


@pytest.fixture
def counted(chat: ChatSemGrad, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the answers that the model really generates."""
    generated: list[int] = []
    original = LanguageModel.submit

    def submit(self: LanguageModel, request: Request[Any]) -> Ticket[Any]:
        generated.append(1)
        return original(self, request)

    monkeypatch.setattr(LanguageModel, "submit", submit)
    return generated


@pytest.mark.parametrize("name", CACHED)
def test_a_cached_draft_is_judged_anew(
    chat: ChatSemGrad, name: str, draft: str, cache: InMemoryCache, counted: list[int]
) -> None:
    route = ROUTES[name]
    strict = UncertaintyRouterCallback(policy=NOTHING, abstain_message="No.")
    helped = UncertaintyRouterCallback(policy=NOTHING, escalate_to=RunnableLambda(lambda _: "Help."))
    lenient = UncertaintyRouterCallback(policy=EVERYTHING)
    reply = [text_of(route(chat, QUESTION, {"callbacks": [r]})) for r in (strict, helped, lenient, strict)]
    assert [*reply, text_of(route(chat, QUESTION, {}))] == ["No.", "Help.", draft, "No.", draft]
    assert counted == [1]
    (cached,) = cache._cache.values()
    (generation,) = cached
    assert generation.text == draft
    record: Any = generation.message.response_metadata["semgrad_guard"]  # type: ignore[union-attr]
    assert (record["action"], record["threshold"]) == ("answer", None), "no decision is stored"


def test_streams_leave_the_cache_alone(chat: ChatSemGrad, draft: str, cache: InMemoryCache) -> None:
    for name in ("stream", "astream"):
        cache.clear()
        ROUTES[name](chat, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING)]})
        assert all(generation.text == draft for entry in cache._cache.values() for generation in entry)


def test_a_cached_draft_is_bound_to_what_made_it(chat: ChatSemGrad, cache: InMemoryCache) -> None:
    """The record comes back from the cache with its binding: a policy for something else is refused."""
    chat.invoke(QUESTION)
    with pytest.raises(BindingMismatchError):
        chat.invoke(QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=policy_for_another_model())]})


def test_a_cached_answer_of_another_time_has_no_score(chat: ChatSemGrad, cache: InMemoryCache) -> None:
    """A cache written before there were scores: the policy decides."""
    chat.invoke(QUESTION)
    for entry in cache._cache.values():
        entry[0].message = AIMessage(content="old")  # type: ignore[union-attr]
    pieces = ROUTES["invoke"](chat, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=EVERYTHING)]})
    assert text_of(pieces) == "I don't know."
    (record,) = metadata_of(pieces)
    assert (record["status"], record["action"]) == ("unscored", "abstain")


CHANGES: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 5},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "seed": {"seed": 7},
    "stop": {"stop": ["x"]},
    "estimator": {"estimator": SemGrad()},
    "estimator settings": {"estimator": HybridGrad(tau=0.5)},
    "prompt template": {"prompt_template": "other"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_setting_that_moves_an_answer_or_its_score_is_in_the_key(
    language_model: LanguageModel, change: str
) -> None:
    plain = ChatSemGrad.from_model(language_model)
    other = ChatSemGrad.from_model(language_model, **CHANGES[change])
    assert plain._get_llm_string() != other._get_llm_string()
    assert plain._get_llm_string() == ChatSemGrad.from_model(language_model)._get_llm_string()


def test_other_weights_and_call_options_are_in_the_key(language_model: LanguageModel, larger: LanguageModel) -> None:
    chat = ChatSemGrad.from_model(language_model)
    keys = [
        chat._get_llm_string(),
        chat._get_llm_string(stop=["x"]),
        chat._get_llm_string(max_tokens=3),
        ChatSemGrad.from_model(larger)._get_llm_string(),
    ]
    assert len(set(keys)) == 4


def test_other_weights_of_the_same_name_are_in_the_key(
    language_model: LanguageModel, tiny: str, tmp_path: Path
) -> None:
    retrained = LanguageModel.from_pretrained(str(save_tiny(tmp_path / Path(tiny).name, seed=2)))
    assert retrained.name == language_model.name
    keys = {ChatSemGrad.from_model(model)._get_llm_string() for model in (language_model, retrained)}
    assert len(keys) == 2


def test_the_verdict_survives_the_cache(chat: ChatSemGrad, cache: InMemoryCache) -> None:
    first, second = chat.invoke(QUESTION), chat.invoke(QUESTION)
    assert get_verdict(first) == get_verdict(second) is not None

"""Several inputs: one generation, but a run, a decision and an error for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import EmptyPromptError, PromptTooLongError

from .support import NOTHING, QUESTION, Ledger, Wire

QUESTIONS = [QUESTION, "hello", "x", "What is the capital of France?"]

Batch = Callable[..., list[Any]]


def _abatch(model: Any, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
    return asyncio.run(model.abatch(inputs, config, **kwargs))


@pytest.fixture(params=["batch", "abatch"])
def batch(request: pytest.FixtureRequest) -> Batch:
    return _abatch if request.param == "abatch" else lambda model, *args, **kwargs: model.batch(*args, **kwargs)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every batch the model generates."""
    seen: list[int] = []
    original = LanguageModel.generate_batch

    def generate_batch(self: LanguageModel, conversations: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(conversations))
        return original(self, conversations, *args, **kwargs)

    monkeypatch.setattr(LanguageModel, "generate_batch", generate_batch)
    return seen


@pytest.fixture
def alone(chat: ChatSemGrad) -> list[Any]:
    """The answers, one by one."""
    return [chat.invoke(question) for question in QUESTIONS]


def _uncertainty(message: Any) -> float:
    return message.response_metadata["semgrad_guard"]["uncertainty"]


def test_one_generation_for_all(
    chat: ChatSemGrad, batch: Batch, alone: list[Any], sizes: list[int], wire: Wire, ledger: Ledger
) -> None:
    together = batch(chat, QUESTIONS, {"callbacks": [wire, ledger]})
    assert sizes == [4]
    assert [m.text for m in together] == [m.text for m in alone]
    assert [_uncertainty(m) for m in together] == pytest.approx([_uncertainty(m) for m in alone], rel=1e-4)
    assert [m.usage_metadata for m in together] == [m.usage_metadata for m in alone]
    assert len(set(wire.started)) == 4
    assert wire.started == wire.ended, "each run ends before the next begins"
    ledger.assert_balanced()


def test_each_answer_has_its_own_decision_and_escalations_run_as_a_batch(
    chat: ChatSemGrad, larger: LanguageModel, batch: Batch, alone: list[Any], sizes: list[int]
) -> None:
    scores = sorted(map(_uncertainty, alone))
    policy = Policy(threshold=(scores[1] + scores[2]) / 2)
    target = ChatSemGrad.from_model(larger, max_tokens=9)
    helped = batch(chat, QUESTIONS, {"callbacks": [UncertaintyRouterCallback(policy=policy, escalate_to=target)]})
    assert sizes == [4, 2]
    for before, after in zip(alone, helped, strict=True):
        kept = _uncertainty(before) <= policy.threshold  # type: ignore[operator]
        assert (after.text == before.text) is kept
        assert after.response_metadata["semgrad_guard"]["action"] == ("answer" if kept else "escalate")


def test_a_chain_around_the_target_runs_as_a_batch(
    chat: ChatSemGrad, larger: LanguageModel, batch: Batch, sizes: list[int]
) -> None:
    target = RunnableLambda(lambda messages: messages) | ChatSemGrad.from_model(larger, max_tokens=9)
    router = UncertaintyRouterCallback(policy=NOTHING, escalate_to=target)
    prompt = ChatPromptTemplate.from_messages([("human", "{question}")])
    reply = batch(prompt | chat | StrOutputParser(), [{"question": q} for q in QUESTIONS], {"callbacks": [router]})
    assert sizes == [4, 4]
    assert len(set(reply)) == 4


def test_each_input_may_have_its_own_config(chat: ChatSemGrad, batch: Batch, alone: list[Any]) -> None:
    routers = [UncertaintyRouterCallback(policy=NOTHING, abstain_message=f"No, {i}.") for i in range(2)]
    configs = [{"callbacks": [routers[0]]}, {}, {"callbacks": [routers[1]]}]
    reply = [m.text for m in batch(chat, QUESTIONS[:3], configs)]
    assert reply == ["No, 0.", alone[1].text, "No, 1."]


@pytest.mark.parametrize(("config", "field", "expected"), [({}, 3, [3, 1]), ({"max_concurrency": 2}, 16, [2, 2])])
def test_the_size_of_a_generation_is_bounded(
    language_model: LanguageModel, batch: Batch, sizes: list[int], config: Any, field: int, expected: list[int]
) -> None:
    batch(ChatSemGrad.from_model(language_model, max_tokens=3, max_batch_size=field), QUESTIONS, config)
    assert sizes == expected


def test_an_error_ends_the_run_it_belongs_to(
    chat: ChatSemGrad, batch: Batch, alone: list[Any], wire: Wire, ledger: Ledger
) -> None:
    inputs = [QUESTION, "  ", "long " * 100, "hello"]
    outcomes = batch(chat, inputs, {"callbacks": [wire, ledger]}, return_exceptions=True)
    assert [getattr(o, "text", None) for o in outcomes] == [alone[0].text, None, None, alone[1].text]
    assert isinstance(outcomes[1], EmptyPromptError)
    assert isinstance(outcomes[2], PromptTooLongError)
    assert [how for how, _ in ledger.closed] == ["end", "error", "error", "end"]
    ledger.assert_balanced()
    with pytest.raises(EmptyPromptError):
        batch(chat, inputs)


def test_an_error_in_one_escalation_leaves_the_others(chat: ChatSemGrad, batch: Batch) -> None:
    def target(messages: Any) -> str:
        if messages[0].content == "hello":
            raise LookupError("no hello")
        return "Help."

    config = {"callbacks": [UncertaintyRouterCallback(policy=NOTHING, escalate_to=RunnableLambda(target))]}
    outcomes = batch(chat, QUESTIONS[:3], config, return_exceptions=True)
    assert [getattr(o, "text", None) for o in outcomes] == ["Help.", None, "Help."]
    with pytest.raises(LookupError):
        batch(chat, QUESTIONS[:3], config)


def test_the_same_question_twice(language_model: LanguageModel, batch: Batch, sizes: list[int]) -> None:
    sampled = ChatSemGrad.from_model(language_model, max_tokens=8, temperature=1.5, seed=3)
    first, second = batch(sampled, [QUESTION, QUESTION])
    assert sizes == [2]
    assert first.text != second.text, "row i of a batch draws from seed + i"


def test_cached_answers_are_not_generated_again(
    chat: ChatSemGrad, batch: Batch, sizes: list[int], cache: InMemoryCache
) -> None:
    batch(chat, QUESTIONS[:2])
    batch(chat, QUESTIONS)
    assert sizes == [2, 2]


def test_generate_gives_a_run_to_each_list(chat: ChatSemGrad, alone: list[Any], sizes: list[int], wire: Wire) -> None:
    prompts: list[Any] = [[HumanMessage(q)] for q in QUESTIONS]
    result = chat.generate(prompts, callbacks=[wire])
    later = asyncio.run(chat.agenerate(prompts, callbacks=[wire]))
    assert [g[0].text for g in result.generations] == [g[0].text for g in later.generations] == [m.text for m in alone]
    assert [info.run_id for r in (result, later) for info in r.run or []] == wire.started == wire.ended
    assert sizes == [4, 4]


def test_nothing_in_nothing_out(chat: ChatSemGrad, batch: Batch) -> None:
    assert batch(chat, []) == []
    assert chat.generate([]).generations == []


def test_batch_as_completed_is_enforced(chat: ChatSemGrad) -> None:
    router = UncertaintyRouterCallback(policy=NOTHING, abstain_message="No.")
    assert {m.text for _, m in chat.batch_as_completed(QUESTIONS[:2], {"callbacks": [router]})} == {"No."}

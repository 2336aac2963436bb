"""Several inputs: shared steps of the model, but a run, a decision and an error for each."""

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

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import DeadlineExceededError, EmptyPromptError, PromptTooLongError
from tests.steps import Gate, Steps, until

from .support import NOTHING, QUESTION, Ledger, Wire

QUESTIONS = [QUESTION, "hello", "x", "What is the capital of France?"]

Batch = Callable[..., list[Any]]


def _abatch(model: Any, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
    return asyncio.run(model.abatch(inputs, config, **kwargs))


@pytest.fixture(params=["batch", "abatch"])
def batch(request: pytest.FixtureRequest) -> Batch:
    return _abatch if request.param == "abatch" else lambda model, *args, **kwargs: model.batch(*args, **kwargs)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Counts the requests to models, and holds them back until they are so many."""
    return Gate(monkeypatch)


@pytest.fixture
def alone(chat: ChatSemGrad) -> list[Any]:
    """The answers, one by one."""
    return [chat.invoke(question) for question in QUESTIONS]


def _uncertainty(message: Any) -> float:
    found = get_verdict(message)
    assert found is not None
    assert found.uncertainty is not None
    return found.uncertainty


def test_inputs_share_steps(
    chat: ChatSemGrad, batch: Batch, alone: list[Any], gate: Gate, wire: Wire, ledger: Ledger
) -> None:
    one = Steps(chat.language_model)
    chat.invoke(QUESTION)
    longest = one.in_all()
    steps = Steps(chat.language_model)
    gate.opens_at(4, steps)
    together = batch(chat, QUESTIONS, {"callbacks": [wire, ledger]})
    assert steps.in_all() <= 2 * longest, "prompts are read as they come, and the steps are common"
    assert [m.text for m in together] == [m.text for m in alone]
    assert [_uncertainty(m) for m in together] == pytest.approx([_uncertainty(m) for m in alone], rel=2e-5)
    assert [m.usage_metadata for m in together] == [m.usage_metadata for m in alone]
    assert len(set(wire.started)) == 4
    assert sorted(wire.started, key=str) == sorted(wire.ended, key=str)
    ledger.assert_balanced()


@pytest.mark.parametrize("by", ["ainvoke", "threads", "agenerate"])
def test_calls_of_several_callers_share_steps(chat: ChatSemGrad, gate: Gate, by: str) -> None:
    questions = [f"{question} {i}" for i in range(2) for question in QUESTIONS]
    one = Steps(chat.language_model)
    alone = [chat.invoke(question) for question in questions]
    sequential = one.in_all()
    steps = Steps(chat.language_model)
    gate.opens_at(8, steps)

    async def tasks() -> list[Any]:
        return await asyncio.gather(*(chat.ainvoke(question) for question in questions))

    async def lists() -> list[Any]:
        made = await chat.agenerate([[HumanMessage(question)] for question in questions])
        return [generations[0].message for generations in made.generations]  # type: ignore[attr-defined]

    if by == "threads":
        together = [made for _, made in sorted(chat.batch_as_completed(questions, {"max_concurrency": 8}))]
    else:
        together = asyncio.run(tasks() if by == "ainvoke" else lists())
    assert steps.in_all() <= sequential / 3
    assert [m.text for m in together] == [m.text for m in alone]
    assert [_uncertainty(m) for m in together] == pytest.approx([_uncertainty(m) for m in alone], rel=2e-5)


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_caller_that_leaves_stops_the_model(language_model: LanguageModel, how: str) -> None:
    chat = ChatSemGrad.from_model(language_model, max_tokens=6)
    long = chat.model_copy(update={"max_tokens": 60, "timeout": 0.5 if how == "late" else None})
    expected = (await chat.ainvoke("hello")).text
    left: list[bool] = []
    steps = Steps(language_model)
    steps.at(3, lambda: until(lambda: left))
    leaving = asyncio.create_task(long.ainvoke(QUESTION))
    if how == "cancelled":
        await asyncio.to_thread(steps.reached.wait)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else DeadlineExceededError):
        await leaving
    left.append(True)
    assert (await chat.ainvoke("hello")).text == expected
    assert steps.in_all() <= 3 + 2 + 7, "the row that was left has ended"


def test_each_answer_has_its_own_decision_and_escalations_share_steps(
    chat: ChatSemGrad, larger: LanguageModel, batch: Batch, alone: list[Any]
) -> None:
    scores = sorted(map(_uncertainty, alone))
    policy = Policy(threshold=(scores[1] + scores[2]) / 2)
    target = ChatSemGrad.from_model(larger, max_tokens=9)
    helped = batch(chat, QUESTIONS, {"callbacks": [UncertaintyRouterCallback(policy=policy, escalate_to=target)]})
    for before, after in zip(alone, helped, strict=True):
        kept = _uncertainty(before) <= policy.threshold  # type: ignore[operator]
        assert (after.text == before.text) is kept
        assert after.response_metadata["semgrad_guard"]["action"] == ("answer" if kept else "escalate")


def test_a_chain_around_the_target_answers_every_input(
    chat: ChatSemGrad, larger: LanguageModel, batch: Batch, gate: Gate
) -> None:
    target = RunnableLambda(lambda messages: messages) | ChatSemGrad.from_model(larger, max_tokens=9)
    router = UncertaintyRouterCallback(policy=NOTHING, escalate_to=target)
    prompt = ChatPromptTemplate.from_messages([("human", "{question}")])
    reply = batch(prompt | chat | StrOutputParser(), [{"question": q} for q in QUESTIONS], {"callbacks": [router]})
    assert len(gate.came) == 8
    assert len(set(reply)) == 4


def test_each_input_may_have_its_own_config(chat: ChatSemGrad, batch: Batch, alone: list[Any]) -> None:
    routers = [UncertaintyRouterCallback(policy=NOTHING, abstain_message=f"No, {i}.") for i in range(2)]
    configs = [{"callbacks": [routers[0]]}, {}, {"callbacks": [routers[1]]}]
    reply = [m.text for m in batch(chat, QUESTIONS[:3], configs)]
    assert reply == ["No, 0.", alone[1].text, "No, 1."]


@pytest.mark.parametrize(("config", "field", "expected"), [({}, 3, 3), ({"max_concurrency": 2}, 16, 2)])
def test_the_runs_under_way_are_bounded(
    language_model: LanguageModel, gate: Gate, config: Any, field: int, expected: int
) -> None:
    steps = Steps(language_model)
    gate.opens_at(expected, steps)
    ChatSemGrad.from_model(language_model, max_tokens=3, max_batch_size=field).batch(QUESTIONS, config)
    steps.in_all()
    assert gate.most == expected


def test_an_error_ends_the_run_it_belongs_to(
    chat: ChatSemGrad, batch: Batch, alone: list[Any], wire: Wire, ledger: Ledger
) -> None:
    inputs = [QUESTION, "  ", "long " * 100, "hello"]
    outcomes = batch(chat, inputs, {"callbacks": [wire, ledger]}, return_exceptions=True)
    assert [getattr(o, "text", None) for o in outcomes] == [alone[0].text, None, None, alone[1].text]
    assert isinstance(outcomes[1], EmptyPromptError)
    assert isinstance(outcomes[2], PromptTooLongError)
    assert sorted(how for how, _ in ledger.closed) == ["end", "end", "error", "error"]
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


def test_the_same_question_twice(language_model: LanguageModel, batch: Batch) -> None:
    """Every input is a call of its own: a seed gives the text of a single call."""
    sampled = ChatSemGrad.from_model(language_model, max_tokens=8, temperature=1.5, seed=3)
    expected = sampled.invoke(QUESTION).text
    assert [m.text for m in batch(sampled, [QUESTION, QUESTION])] == [expected, expected]
    seedless = sampled.model_copy(update={"seed": None})
    first, second = batch(seedless, [QUESTION, QUESTION])
    assert first.text != second.text


def test_cached_answers_are_not_generated_again(
    chat: ChatSemGrad, batch: Batch, gate: Gate, cache: InMemoryCache
) -> None:
    batch(chat, QUESTIONS[:2])
    batch(chat, QUESTIONS)
    assert len(gate.came) == 4


def test_generate_gives_a_run_to_each_list(chat: ChatSemGrad, alone: list[Any], wire: Wire) -> None:
    prompts: list[Any] = [[HumanMessage(q)] for q in QUESTIONS]
    result = chat.generate(prompts, callbacks=[wire])
    later = asyncio.run(chat.agenerate(prompts, callbacks=[wire]))
    assert [g[0].text for g in result.generations] == [g[0].text for g in later.generations] == [m.text for m in alone]
    assert [info.run_id for r in (result, later) for info in r.run or []] == wire.started == wire.ended


def test_nothing_in_nothing_out(chat: ChatSemGrad, batch: Batch) -> None:
    assert batch(chat, []) == []
    assert chat.generate([]).generations == []


def test_batch_as_completed_is_enforced(chat: ChatSemGrad) -> None:
    router = UncertaintyRouterCallback(policy=NOTHING, abstain_message="No.")
    assert {m.text for _, m in chat.batch_as_completed(QUESTIONS[:2], {"callbacks": [router]})} == {"No."}

"""`guarded`: branches, fallbacks and agents are judged as the scorer's answer; retries and fallbacks in an agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import ConfigurableField, Runnable, RunnableBranch, RunnableLambda

from langchain_semgrad_guard import (
    ChatSemGrad,
    LowConfidenceError,
    UncertaintyMiddleware,
    calibrate_chain,
    get_verdict,
    guarded,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import InputError

from .agents import ASKED, ToolCaller, counting_tool, spoken, streamed
from .served import ServedModel
from .support import EVERYTHING, NOTHING, QUESTION, collect, text_of

SECRET = "Vienna"


def failing(_given: Any) -> AIMessage:
    raise ConnectionError("no route")


AGENT: Any = create_agent(ServedModel(), [])
CHAINS: dict[str, Runnable[Any, Any]] = {
    "function": RunnableLambda(lambda _given: SECRET),
    "branch": RunnableBranch((lambda given: given == "?", ServedModel()), ServedModel() | StrOutputParser()),
    "fallback": RunnableLambda(failing).with_fallbacks([ServedModel()]),
    "agent": RunnableLambda(lambda given: {"messages": [("human", str(given))]}) | AGENT,
    "answer": RunnableLambda(lambda _given: {"answer": SECRET, "context": []}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_anything_that_ends_in_a_message_is_judged(name: str, language_model: LanguageModel) -> None:
    let_through = guarded(CHAINS[name], EVERYTHING, scorer=language_model)
    withheld = guarded(CHAINS[name], NOTHING, scorer=language_model)
    for guard, text in ((let_through, SECRET), (withheld, "I don't know.")):
        answers = [
            guard.invoke(QUESTION),
            asyncio.run(guard.ainvoke(QUESTION)),
            *guard.batch([QUESTION, "Who?"]),
            *asyncio.run(guard.abatch([QUESTION])),
        ]
        assert [answer.text for answer in answers] == [text] * len(answers)
        assert text_of(list(guard.stream(QUESTION))) == text_of(collect(guard.astream(QUESTION))) == text
        verdict = get_verdict(answers[0])
        assert verdict is not None
        assert verdict.status == "scored"
        assert verdict.uncertainty == pytest.approx(language_model_score(language_model), rel=1e-3)


def language_model_score(model: LanguageModel) -> float | None:
    """The uncertainty of the chains' answer as the scorer's own to the question."""
    verdict = get_verdict(ChatSemGrad.from_model(model).score(QUESTION, SECRET))
    return None if verdict is None else verdict.uncertainty


def test_the_question_is_found_in_the_usual_inputs(language_model: LanguageModel) -> None:
    guard = guarded(CHAINS["function"], EVERYTHING, scorer=language_model)
    inputs = [QUESTION, HumanMessage(QUESTION), [("human", QUESTION)], {"question": QUESTION, "k": 2}, ASKED]
    prompts = {get_verdict(guard.invoke(given)).prompt for given in inputs}  # type: ignore[union-attr]
    assert len(prompts) == 1
    with pytest.raises(InputError, match="question=lambda"):
        guard.invoke({"topic": QUESTION})
    named = guarded(CHAINS["function"], EVERYTHING, scorer=language_model, question=lambda given: given["topic"])
    assert named.invoke({"topic": QUESTION}).text == SECRET


def test_modes_errors_and_calibration(language_model: LanguageModel) -> None:
    with pytest.raises(LowConfidenceError):
        guarded(CHAINS["function"], NOTHING, scorer=language_model, mode="raise").invoke(QUESTION)
    with pytest.raises(InputError, match="the chain returned a int"):
        guarded(RunnableLambda(lambda _given: 3), EVERYTHING, scorer=language_model).invoke(QUESTION)
    guard = guarded(CHAINS["function"], Policy(threshold=0.0), scorer=language_model)
    examples = [(f"What is town {number}?", [SECRET]) for number in range(40)]
    calibration = calibrate_chain(guard, examples, "contains", alpha=0.4, delta=0.2, progress=False)
    policy = Policy.from_calibration(calibration)
    verdict = get_verdict(guarded(CHAINS["function"], policy, scorer=language_model).invoke("What is town 3?"))
    assert verdict is not None
    assert (verdict.calibration_id, verdict.familiar) == (policy.calibration_id, True)


def test_no_cache_and_no_handler_holds_a_withheld_answer(language_model: LanguageModel) -> None:
    events: list[Any] = []
    guard = guarded(CHAINS["agent"], NOTHING, scorer=language_model)
    for event in collect(guard.astream_events(QUESTION, version="v2")):
        events.append(event)
    assert events
    assert SECRET not in repr(events)


def wrapped(kind: str, chat: Any) -> Any:
    if kind == "retry":
        return chat.with_retry()
    if kind == "configurable":
        return chat.configurable_fields(ignores=ConfigurableField(id="ignores"))
    return ServedFailing().with_fallbacks([chat])


class ServedFailing(ServedModel):
    """A server that is down."""

    def _answer(self, messages: Any, **options: Any) -> AIMessage:
        raise ConnectionError("no route")


@pytest.mark.parametrize("kind", ["retry", "fallbacks", "configurable"])
@pytest.mark.parametrize("policy", [EVERYTHING, NOTHING])
def test_an_agents_model_may_retry_and_fall_back(kind: str, policy: Policy, language_model: LanguageModel) -> None:
    runs: list[str] = []
    chat = ToolCaller(scored=ChatSemGrad.from_model(language_model, max_tokens=8))
    tools = [counting_tool("pay", runs)]
    agent = create_agent(wrapped(kind, chat), tools, middleware=[UncertaintyMiddleware(policy)])
    given: Any = ASKED
    message = agent.invoke(given)["messages"][-1]
    verdict = get_verdict(message)
    assert verdict is not None
    assert runs == (["pay"] if policy is EVERYTHING else [])
    assert (message.text == "I don't know.") == (policy is NOTHING)
    assert spoken(streamed(agent, ASKED, sync=True)).endswith(message.text)
    if kind == "configurable":
        runs.clear()
        agent.invoke(given, {"configurable": {"ignores": ("pay",)}})
        assert runs == []

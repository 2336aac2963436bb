"""Which rules hold for a call, wherever they come from; and which calls of a chain are answers at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain.agents.middleware.internal_call_transformer import internal_call_metadata
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.tracers.context import register_configure_hook

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    get_verdict,
    guarded,
)
from semgrad_guard.errors import UnenforcedPolicyError
from tests.pairwise import in_turn, pairwise
from tests.steps import LIMIT

from .agents import ASKED, RUNS
from .support import EVENT_ROUTES, EVERYTHING, NOTHING, QUESTION, ROUTES, collect, text_of

_router: ContextVar[Any] = ContextVar("router", default=None)
register_configure_hook(_router, inheritable=True)


def router(policy: Any = NOTHING, **options: Any) -> UncertaintyRouterCallback:
    return UncertaintyRouterCallback(policy, abstain_message="No.", **options)


@pytest.fixture
def in_context() -> Iterator[None]:
    token = _router.set(router())
    yield
    _router.reset(token)


async def _logged(chat: Any) -> list[Any]:
    return [patch async for patch in chat.astream_log(QUESTION)]


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("path", [*ROUTES, *EVENT_ROUTES, "astream_events v1", "astream_log"])
def test_a_router_of_the_context_is_obeyed_on_every_path(chat: ChatSemGrad, path: str, draft: str) -> None:
    if path == "astream_log":
        found: Any = asyncio.run(_logged(chat))
    elif path == "astream_events v1":
        found = collect(chat.astream_events(QUESTION, version="v1"))
    else:
        found = (ROUTES | EVENT_ROUTES)[path](chat, QUESTION, {})
        assert text_of(found) == "No."
    assert draft not in repr(found)
    assert "No." in repr(found)


@pytest.mark.usefixtures("in_context")
@pytest.mark.parametrize("path", ["invoke", "stream", "astream"])
def test_two_are_one_too_many_wherever_they_come_from(chat: ChatSemGrad, path: str) -> None:
    with pytest.raises(UnenforcedPolicyError, match="2 routers"):
        ROUTES[path](GuardedChatModel(chat, NOTHING), QUESTION, {})
    with pytest.raises(UnenforcedPolicyError, match="both decide"):
        RUNS["invoke"](create_agent(chat, [], middleware=[UncertaintyMiddleware(NOTHING)]), ASKED, None)


CONDENSE = ChatPromptTemplate.from_template("Rephrase: {question}")
ANSWER = ChatPromptTemplate.from_template("Answer: {question}")


def chain_of(condenser: Any, answerer: Any) -> Any:
    condensed = {"question": CONDENSE | condenser | StrOutputParser()}
    return condensed | ANSWER | answerer


@pytest.mark.parametrize("path", ROUTES)
def test_a_second_call_that_does_not_go_on_is_refused(chat: ChatSemGrad, path: str) -> None:
    for chain in (chain_of(chat, chat), RunnableParallel(a=CONDENSE | chat, b=ANSWER | chat)):
        with pytest.raises(UnenforcedPolicyError, match="answering="):
            ROUTES[path](chain, {"question": QUESTION}, {"callbacks": [router()]})


@in_turn(path=ROUTES, label=["tag", "name"])
def test_the_named_call_is_guarded_and_others_are_left_alone(chat: ChatSemGrad, path: str, label: str) -> None:
    named = chat.with_config(tags=["answer"]) if label == "tag" else chat.with_config(run_name="answer")
    requests: list[str] = []

    def spy(value: PromptValue) -> PromptValue:
        requests.append(value.to_string())
        return value

    chain = {"question": CONDENSE | chat | StrOutputParser()} | ANSWER | spy | named
    config = {"callbacks": [router(answering="answer")]}
    pieces = ROUTES[path](chain, {"question": QUESTION}, config)
    assert text_of(pieces) == "No."
    assert requests == ["Human: Answer: " + chat.invoke(f"Rephrase: {QUESTION}").text]
    served = FakeListChatModel(responses=["condensed"])  # would ignore the router, which is not for it
    assert text_of(ROUTES[path](chain_of(served, named), {"question": QUESTION}, config)) == "No."


@pytest.mark.parametrize("path", ["invoke", "ainvoke", "batch"])
def test_a_name_that_no_call_has_is_an_error(chat: ChatSemGrad, path: str) -> None:
    config = {"callbacks": [router(answering="anwser")]}
    with pytest.raises(UnenforcedPolicyError, match="anwser"):
        ROUTES[path](ANSWER | chat, {"question": QUESTION}, config)
    with pytest.raises(UnenforcedPolicyError, match="anwser"):
        ROUTES[path](chat, QUESTION, config)


def test_later_steps_and_retries_go_on(chat: ChatSemGrad) -> None:
    twice = RunnableLambda(lambda _: [chat.invoke(QUESTION).text, chat.invoke(QUESTION).text])
    assert twice.invoke(0, {"callbacks": [router()]}) == ["No.", "No."]
    goes_on = RunnableLambda(lambda _: chat.invoke([HumanMessage(QUESTION), chat.invoke(QUESTION), HumanMessage("?")]))
    assert goes_on.invoke(0, {"callbacks": [router()]}).text == "No."
    both: Any = RunnableLambda(chat.invoke)
    assert len(both.batch(["a", "b"], {"callbacks": [router(EVERYTHING)]})) == 2


def test_a_history_is_not_replaced_by_an_abstention(chat: ChatSemGrad) -> None:
    middleware = SummarizationMiddleware(
        chat, trigger=("messages", 3), keep=("messages", 1), summary_prompt="{messages}"
    )
    agent: Any = create_agent(chat.model_copy(update={"tags": ["answer"]}), [], middleware=[middleware])
    history = {"messages": [("human", "Hello?"), ("ai", "Yes."), ("human", QUESTION)]}
    messages = agent.invoke(history, {"callbacks": [router(answering="answer")]})["messages"]
    assert "summary" in messages[0].text
    assert "No." not in messages[0].text
    assert messages[-1].text == "No."
    with pytest.raises(UnenforcedPolicyError, match="answering="):
        agent.invoke(history, {"callbacks": [router()]})


LABELS: dict[str, dict[str, Any]] = {
    "lc_source": {"metadata": {"lc_source": "web"}},
    "LangChain's own": {"metadata": {"lc_source": "summarization", **internal_call_metadata()}},
    "ours": {"metadata": {"semgrad_guard": {"action": "answer", "promised": True}, "ls_model_type": "chat"}},
    "tags": {"tags": ["lc_source", "langsmith:hidden", "langsmith:nostream", "seq:step:1"]},
    "name": {"run_name": "SummarizationMiddleware"},
    "settings": {"configurable": {"mode": "observe", "policy": EVERYTHING, "threshold": 1e308, "by": "sentence"}},
}
"""What a caller, or the client of a served graph, can write into a run's config."""

GUARDS: dict[str, Callable[[ChatSemGrad, dict[str, Any]], tuple[Any, dict[str, Any]]]] = {
    "guard": lambda chat, config: (GuardedChatModel(chat, NOTHING, abstain_message="No."), config),
    "guard with labels": lambda chat, config: (
        GuardedChatModel(chat, NOTHING, abstain_message="No.").with_config(**config),
        {},
    ),
    "router in the config": lambda chat, config: (chat, {**config, "callbacks": [router()]}),
    "router of the model": lambda chat, config: (chat.model_copy(update={"callbacks": [router()]}), config),
    "named call": lambda chat, config: (
        chat.with_config(tags=["answer"]),
        {**config, "callbacks": [router(answering="answer")]},
    ),
    "guarded chain": lambda chat, config: (
        guarded(
            RunnableLambda(lambda _: chat.invoke(QUESTION)), NOTHING, scorer=chat.language_model, abstain_message="No."
        ),
        config,
    ),
}


@pairwise(
    path=[*ROUTES, *EVENT_ROUTES],
    guard=GUARDS,
    label=LABELS,
    where=lambda path, guard, label: not (guard == "guarded chain" and "v3" in path),  # not on sequences
)
def test_no_label_of_a_caller_changes_a_decision(
    chat: ChatSemGrad, path: str, guard: str, label: str, draft: str
) -> None:
    model, config = GUARDS[guard](chat, LABELS[label])
    found = (ROUTES | EVENT_ROUTES)[path](model, QUESTION, config)
    assert text_of(found) == "No."
    assert draft not in repr(found)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("run", RUNS)
def test_nor_that_of_an_agents_guard(chat: ChatSemGrad, run: str, label: str, draft: str) -> None:
    agent = create_agent(chat, [], middleware=[UncertaintyMiddleware(NOTHING, abstain_message="No.")])
    found = RUNS[run](agent, ASKED, LABELS[label])
    assert "No." in repr(found)
    assert draft not in repr(found)


async def test_a_seat_ends_with_its_run(chat: ChatSemGrad) -> None:
    """A task that a run of a batch has left behind calls by itself, and is judged."""
    guard = GuardedChatModel(chat, NOTHING, abstain_message="No.")
    contexts: list[Any] = []

    def remember(text: Any) -> Any:
        contexts.append(copy_context())
        raise ValueError(text)

    object.__setattr__(guard, "_convert_input", remember)
    found = guard.batch([QUESTION, QUESTION], return_exceptions=True)
    assert all(isinstance(error, ValueError) for error in found)
    object.__delattr__(guard, "_convert_input")
    requests = asyncio.get_running_loop().run_in_executor(None, contexts[1].run, guard.invoke, QUESTION)
    assert (await asyncio.wait_for(requests, LIMIT)).text == "No."


def test_an_escalation_ends_with_its_answer(chat: ChatSemGrad) -> None:
    contexts: list[Any] = []
    target = RunnableLambda(lambda _: contexts.append(copy_context()) or "from elsewhere")
    guard = GuardedChatModel(chat, NOTHING, escalate_to=target)
    assert guard.invoke(QUESTION).text == "from elsewhere"
    later = contexts[0].run(guard.invoke, QUESTION)
    verdict = get_verdict(later)
    assert verdict is not None
    assert (later.text, verdict.action) == ("from elsewhere", "escalate")

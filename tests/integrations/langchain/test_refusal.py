"""A router attached to something that would ignore it refuses before anything is generated."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.prompts import ChatPromptTemplate

from langchain_semgrad_guard import UncertaintyRouterCallback
from semgrad_guard.errors import InputError, UnenforcedPolicyError

from .support import EVERYTHING, QUESTION, ROUTES, Ledger, Route, collect


class Foreign(FakeListChatModel):
    """A chat model that knows nothing of routers, and notes when it is made to answer."""

    requests: list[str] = []  # noqa: RUF012 - a pydantic field

    def _call(self, *args: Any, **kwargs: Any) -> str:
        self.requests.append("call")
        return super()._call(*args, **kwargs)

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        self.requests.append("stream")
        yield ChatGenerationChunk(message=AIMessageChunk(content="unguarded"))

    async def _astream(self, *args: Any, **kwargs: Any) -> Any:
        self.requests.append("astream")
        yield ChatGenerationChunk(message=AIMessageChunk(content="unguarded"))


@pytest.fixture
def foreign() -> Foreign:
    return Foreign(responses=["unguarded"], requests=[])


@pytest.fixture
def router() -> UncertaintyRouterCallback:
    return UncertaintyRouterCallback(policy=EVERYTHING)


def test_a_model_that_does_not_enforce(foreign: Foreign, route: Route, router: UncertaintyRouterCallback) -> None:
    with pytest.raises(UnenforcedPolicyError, match=r"Foreign would ignore .* Use ChatSemGrad"):
        route(foreign, QUESTION, {"callbacks": [router]})
    assert foreign.requests == []


def test_a_model_that_does_not_enforce_in_its_own_callbacks(
    foreign: Foreign, route: Route, router: UncertaintyRouterCallback
) -> None:
    with pytest.raises(UnenforcedPolicyError):
        route(foreign.model_copy(update={"callbacks": [router]}), QUESTION, {})
    assert foreign.requests == []


def test_a_model_that_does_not_enforce_inside_a_chain(
    foreign: Foreign, route: Route, router: UncertaintyRouterCallback
) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "{question}")]) | foreign | StrOutputParser()
    with pytest.raises(UnenforcedPolicyError):
        route(chain, {"question": QUESTION}, {"callbacks": [router]})
    assert foreign.requests == []


def test_an_async_refusal_opens_no_run(foreign: Foreign, router: UncertaintyRouterCallback, ledger: Ledger) -> None:
    for name in ("ainvoke", "astream"):
        with pytest.raises(UnenforcedPolicyError):
            ROUTES[name](foreign, QUESTION, {"callbacks": [ledger, router]})
    assert ledger.opened == []


def test_a_text_model(route: Route, router: UncertaintyRouterCallback) -> None:
    with pytest.raises(UnenforcedPolicyError):
        route(FakeListLLM(responses=["unguarded"]), QUESTION, {"callbacks": [router]})


@pytest.mark.parametrize("claim", [{"metadata": {"semgrad_guard": "enforces"}}, {"tags": ["semgrad_guard"]}])
def test_metadata_and_tags_cannot_claim_enforcement(
    foreign: Foreign, router: UncertaintyRouterCallback, claim: dict[str, Any]
) -> None:
    with pytest.raises(UnenforcedPolicyError):
        foreign.invoke(QUESTION, {"callbacks": [router], **claim})


def test_event_streams_of_a_model_that_does_not_enforce(foreign: Foreign, router: UncertaintyRouterCallback) -> None:
    with pytest.raises(UnenforcedPolicyError):
        collect(foreign.astream_events(QUESTION, {"callbacks": [router]}, version="v2"))
    assert foreign.requests == []


def test_protocol_events_of_a_model_that_does_not_enforce(foreign: Foreign, router: UncertaintyRouterCallback) -> None:
    config: Any = {"callbacks": [router]}

    async def events() -> list[Any]:
        return [event async for event in await foreign.astream_events(QUESTION, config, version="v3")]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # version 3 is in beta
        with pytest.raises(UnenforcedPolicyError):
            list(foreign.stream_events(QUESTION, config, version="v3"))
        with pytest.raises(UnenforcedPolicyError):
            asyncio.run(events())
    assert foreign.requests == []


def test_a_router_needs_a_policy_a_runnable_and_a_known_mode() -> None:
    with pytest.raises(InputError, match="needs a policy"):
        UncertaintyRouterCallback(policy=0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="RunnableLambda"):
        UncertaintyRouterCallback(policy=EVERYTHING, escalate_to=lambda messages: "x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one of 'enforce', 'annotate', 'observe', 'raise'"):
        UncertaintyRouterCallback(policy=EVERYTHING, mode="warn")  # type: ignore[arg-type]

"""Where the modes differ in kind: those that act refuse models that would ignore them, an observer goes with any."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel, FakeListLLM

from langchain_semgrad_guard import (
    ChatSemGrad,
    UncertaintyRouter,
    UncertaintyRouterCallback,
)
from semgrad_guard.errors import UnenforcedPolicyError

from .router_kit import ABSTENTION, PROMPT
from .support import (
    EVERYTHING,
    NOTHING,
    QUESTION,
    Ledger,
    Route,
    collect,
    policy_for_another_model,
    text_of,
)


@pytest.mark.parametrize("mode", ["enforce", "annotate", "raise"])
def test_modes_that_act_refuse_models_that_would_ignore_them(route: Route, mode: Any) -> None:
    with pytest.raises(UnenforcedPolicyError):
        route(
            FakeListChatModel(responses=["x"]),
            QUESTION,
            {"callbacks": [UncertaintyRouterCallback(EVERYTHING, mode=mode)]},
        )


@pytest.mark.parametrize("model", [FakeListChatModel(responses=["said"]), FakeListLLM(responses=["said"])])
def test_an_observer_goes_with_any_model(route: Route, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    observer = UncertaintyRouterCallback(EVERYTHING, mode="observe")
    with caplog.at_level(logging.INFO, logger="semgrad_guard"):
        assert text_of(route(model, QUESTION, {"callbacks": [observer]})) == "said"
    (logged,) = caplog.records
    assert logged.semgrad_guard["status"] == "unscored"  # type: ignore[attr-defined]
    if isinstance(model, FakeListChatModel):
        assert text_of(route(UncertaintyRouter(model, EVERYTHING, mode="observe"), QUESTION, {})) == "said"


def test_an_observer_ends_nothing_but_says_that_it_failed(
    chat: ChatSemGrad, route: Route, draft: str, caplog: pytest.LogCaptureFixture, ledger: Ledger
) -> None:
    observer = UncertaintyRouterCallback(policy_for_another_model(), mode="observe")
    assert text_of(route(chat, QUESTION, {"callbacks": [observer, ledger]})) == draft
    (logged,) = [record for record in caplog.records if record.name == "semgrad_guard"]
    assert logged.levelno == logging.ERROR
    assert "model is" in caplog.text
    ledger.assert_balanced()


def test_observers_stand_beside_a_router(chat: ChatSemGrad, route: Route, caplog: pytest.LogCaptureFixture) -> None:
    observers = [UncertaintyRouterCallback(EVERYTHING, mode="observe") for _ in range(2)]
    router = UncertaintyRouterCallback(NOTHING, abstain_message=ABSTENTION)
    with caplog.at_level(logging.INFO, logger="semgrad_guard"):
        assert text_of(route(chat, QUESTION, {"callbacks": [*observers, router]})) == ABSTENTION
    assert [record.semgrad_guard["action"] for record in caplog.records] == ["answer"] * 2  # type: ignore[attr-defined]


class Listener(BaseCallbackHandler):
    """Writes down custom events."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.noted.append((name, data["action"]))


def test_an_observers_decision_is_a_custom_event_of_the_chain(chat: ChatSemGrad, route: Route) -> None:
    listener, observer = Listener(), UncertaintyRouterCallback(NOTHING, mode="observe")
    config = {"callbacks": [listener, observer]}
    route(PROMPT | chat, {"question": QUESTION}, config)
    assert listener.noted == [("semgrad_guard", "abstain")]
    route(chat, QUESTION, config)
    assert len(listener.noted) == 1, "a model alone has no run around it that the event could belong to"


def test_an_observers_decision_reaches_event_streams(chat: ChatSemGrad) -> None:
    chain = PROMPT | UncertaintyRouter(chat, NOTHING, mode="observe")
    events = collect(chain.astream_events({"question": QUESTION}, version="v2"))
    (custom,) = [event for event in events if event["event"] == "on_custom_event"]
    assert custom["name"] == "semgrad_guard"
    assert custom["data"]["action"] == "abstain"

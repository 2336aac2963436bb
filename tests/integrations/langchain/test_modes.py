"""The matrix: every path times every mode, around both kinds of model, for answers let through and withheld."""

from __future__ import annotations

import asyncio
import logging
import warnings
from typing import Any
from uuid import UUID

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tracers._streaming import _V2StreamingCallbackHandler

from langchain_semgrad_guard import (
    ChatSemGrad,
    LowConfidenceError,
    UncertaintyRouter,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import BindingMismatchError, UnenforcedPolicyError

from .served import Served
from .support import (
    EVENT_ROUTES,
    EVERYTHING,
    NOTHING,
    QUESTION,
    ROUTES,
    Ledger,
    Route,
    Wire,
    collect,
    metadata_of,
    policy_for_another_model,
    text_of,
)

PROMPT = ChatPromptTemplate.from_messages([("human", "{question}")])
ABSTENTION, ELSEWHERE = "I would rather not say.", "from elsewhere"
PATHS = ROUTES | EVENT_ROUTES
LIVE = frozenset({"stream", "astream", *EVENT_ROUTES})
MODES = ("enforce", "annotate", "observe", "raise")


class Kit:
    """A router around one kind of model, and all that listens to a call of it."""

    def __init__(self, model: dict[str, Any], wire: Wire, ledger: Ledger) -> None:
        self.model, self.wire, self.ledger = model, wire, ledger

    def router(self, policy: Policy, **settings: Any) -> UncertaintyRouter:
        return UncertaintyRouter(**self.model, policy=policy, abstain_message=ABSTENTION, **settings)

    def call(self, path: str, router: Runnable[Any, Any]) -> list[Any]:
        """Through a chain, but for version 3 of the event streams, which chains do not have."""
        config = {"callbacks": [self.wire, self.ledger]}
        if path.endswith("v3"):
            return PATHS[path](router, QUESTION, config)
        return PATHS[path](PROMPT | router, {"question": QUESTION}, config)

    def assert_closed(self) -> None:
        """Every run that was opened was closed exactly once, for handlers and for tracers."""
        assert self.ledger.models(), "no run of a model was traced"
        assert sorted(map(str, self.wire.started)) == sorted(map(str, self.wire.ended))
        self.ledger.assert_balanced()


@pytest.fixture(params=["ChatSemGrad", "served elsewhere"])
def kit(
    request: pytest.FixtureRequest, chat: ChatSemGrad, language_model: LanguageModel, wire: Wire, ledger: Ledger
) -> Kit:
    if request.param == "ChatSemGrad":
        return Kit({"llm": chat}, wire, ledger)
    return Kit({"llm": Served(weights=language_model), "scorer": language_model}, wire, ledger)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def _record(pieces: list[Any]) -> dict[str, Any]:
    (record,) = metadata_of(pieces)
    assert metadata_of(pieces[-1:]) == [record], "the verdict stands on the last piece"
    return record


# Not let through.


def test_enforce_withholds(kit: Kit, path: str, draft: str) -> None:
    pieces = kit.call(path, kit.router(NOTHING))
    record = _record(pieces)
    assert [piece.text for piece in pieces if piece.text] == [ABSTENTION], "one chunk"
    assert (record["action"], record["enforced"], record["threshold"]) == ("abstain", True, -1.0)
    assert "".join(kit.wire.tokens) in ("", ABSTENTION), "tokens of the draft went out"
    assert draft not in repr(pieces)
    kit.assert_closed()


def test_enforce_escalates(kit: Kit, path: str, draft: str) -> None:
    target = RunnableLambda(lambda messages: AIMessage(content=ELSEWHERE))
    pieces = kit.call(path, kit.router(NOTHING, escalate_to=target))
    assert text_of(pieces) == ELSEWHERE
    assert _record(pieces)["escalated"]["model"] == "external"
    assert draft not in repr(pieces)
    kit.assert_closed()


def test_annotate_delivers_live_and_says_what_it_would_have_done(kit: Kit, path: str, draft: str) -> None:
    def unasked(messages: Any) -> str:
        raise AssertionError("an annotating router asks no target")

    pieces = kit.call(path, kit.router(NOTHING, mode="annotate", escalate_to=RunnableLambda(unasked)))
    record = _record(pieces)
    assert text_of(pieces) == draft
    assert (record["action"], record["enforced"], record["threshold"]) == ("escalate", False, -1.0)
    assert record["promised"] is False
    assert "above the threshold" in record["reason"]
    assert (len(pieces) > 5) == (path in LIVE), "streams are live, token by token"
    kit.assert_closed()
    end = _message(kit.ledger.models()[0].outputs)
    assert end["response_metadata"]["semgrad_guard"]["action"] == "escalate", "traced as delivered"


def _message(outputs: Any) -> dict[str, Any]:
    return outputs["generations"][0][0]["message"]["kwargs"]


def test_observe_leaves_the_answer_and_reports(
    kit: Kit, path: str, draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="semgrad_guard"):
        pieces = kit.call(path, kit.router(NOTHING, mode="observe"))
    record = _record(pieces)
    assert text_of(pieces) == draft
    assert (record["action"], record["enforced"], record["threshold"], record["reason"]) == ("answer", True, None, None)
    assert (len(pieces) > 5) == (path in LIVE)
    (logged,) = [each for each in caplog.records if each.name == "semgrad_guard"]
    assert logged.levelno == logging.WARNING
    assert logged.semgrad_guard["action"] == "abstain"  # type: ignore[attr-defined]
    assert logged.semgrad_guard["uncertainty"] == record["uncertainty"]  # type: ignore[attr-defined]
    assert logged.semgrad_guard["enforced"] is False  # type: ignore[attr-defined]
    kit.assert_closed()


def test_raise_raises_before_anything_leaves(kit: Kit, path: str, draft: str) -> None:
    with pytest.raises(LowConfidenceError, match="above the threshold") as caught:
        kit.call(path, kit.router(NOTHING, mode="raise"))
    verdict = caught.value.verdict
    assert (verdict.action, verdict.text, verdict.draft) == ("abstain", "", draft)
    assert kit.wire.tokens == []
    assert kit.wire.results == [], "the model's run ends with the error"
    assert draft not in str(caught.value)
    kit.assert_closed()
    model = kit.ledger.models()[0]
    assert "LowConfidenceError" in str(model.error)
    assert draft not in str(model.error)


@pytest.mark.parametrize("how", ["output", "events"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_raise_reaches_every_reader_of_version_3(
    chat: ChatSemGrad, ledger: Ledger, how: str, asynchronous: bool
) -> None:
    router, config = UncertaintyRouter(chat, NOTHING, mode="raise"), {"callbacks": [ledger]}

    async def aread() -> None:
        stream = await router.astream_events(QUESTION, config, version="v3")  # type: ignore[call-overload]
        await stream.output if how == "output" else [event async for event in stream]

    def read() -> None:
        stream = router.stream_events(QUESTION, config, version="v3")  # type: ignore[call-overload]
        _ = stream.output if how == "output" else list(stream)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # version 3 is in beta
        with pytest.raises(LowConfidenceError):
            asyncio.run(aread()) if asynchronous else read()
    ledger.assert_balanced()


# Let through.


@pytest.mark.parametrize("mode", MODES)
def test_what_is_let_through_is_delivered_in_every_mode(kit: Kit, path: str, mode: str, draft: str) -> None:
    pieces = kit.call(path, kit.router(EVERYTHING, mode=mode))
    record = _record(pieces)
    assert text_of(pieces) == draft
    assert record["action"] == "answer"
    assert record["threshold"] == (None if mode == "observe" else 1e308)
    assert record["enforced"] == (mode != "annotate")
    kit.assert_closed()


# Where the modes differ in kind.


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
    (logged,) = [each for each in caplog.records if each.name == "semgrad_guard"]
    assert logged.levelno == logging.ERROR
    assert "model is" in caplog.text
    ledger.assert_balanced()


def test_observers_stand_beside_a_router(chat: ChatSemGrad, route: Route, caplog: pytest.LogCaptureFixture) -> None:
    observers = [UncertaintyRouterCallback(EVERYTHING, mode="observe") for _ in range(2)]
    router = UncertaintyRouterCallback(NOTHING, abstain_message=ABSTENTION)
    with caplog.at_level(logging.INFO, logger="semgrad_guard"):
        assert text_of(route(chat, QUESTION, {"callbacks": [*observers, router]})) == ABSTENTION
    assert [each.semgrad_guard["action"] for each in caplog.records] == ["answer"] * 2  # type: ignore[attr-defined]


class Listener(BaseCallbackHandler):
    """Writes down custom events."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.heard.append((name, data["action"]))


def test_an_observers_decision_is_a_custom_event_of_the_chain(chat: ChatSemGrad, route: Route) -> None:
    listener, observer = Listener(), UncertaintyRouterCallback(NOTHING, mode="observe")
    config = {"callbacks": [listener, observer]}
    route(PROMPT | chat, {"question": QUESTION}, config)
    assert listener.heard == [("semgrad_guard", "abstain")]
    route(chat, QUESTION, config)
    assert len(listener.heard) == 1, "a model alone has no run around it that the event could belong to"


def test_an_observers_decision_reaches_event_streams(chat: ChatSemGrad) -> None:
    chain = PROMPT | UncertaintyRouter(chat, NOTHING, mode="observe")
    events = collect(chain.astream_events({"question": QUESTION}, version="v2"))
    (custom,) = [event for event in events if event["event"] == "on_custom_event"]
    assert custom["name"] == "semgrad_guard"
    assert custom["data"]["action"] == "abstain"


@pytest.mark.parametrize("mode", ["annotate", "raise"])
def test_a_foreign_calibration_is_refused(kit: Kit, path: str, mode: str) -> None:
    with pytest.raises(BindingMismatchError):
        kit.call(path, kit.router(policy_for_another_model(), mode=mode))
    kit.assert_closed()


# Batches, fallbacks, caches.

QUESTIONS = [{"question": text} for text in ("Who are you?", "Where?", "When did it begin?", "Why so?")]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_raise_in_batches(kit: Kit, asynchronous: bool) -> None:
    drafts = (PROMPT | kit.router(EVERYTHING)).batch(QUESTIONS)
    lower, upper = sorted(_uncertainty(message) for message in drafts)[1:3]
    router = kit.router(Policy(threshold=(lower + upper) / 2), mode="raise")
    config: Any = {"callbacks": [kit.wire, kit.ledger]}

    def batch(model: Any, inputs: Any, **settings: Any) -> list[Any]:
        call = model.abatch if asynchronous else model.batch
        found = call(inputs, config, **settings)
        return asyncio.run(found) if asynchronous else found

    for model, inputs in ((PROMPT | router, QUESTIONS), (router, [each["question"] for each in QUESTIONS])):
        found = batch(model, inputs, return_exceptions=True)
        for answer, known in zip(found, drafts, strict=True):
            if _uncertainty(known) <= lower:
                assert answer.text == known.text
            else:
                assert isinstance(answer, LowConfidenceError)
                assert answer.verdict.draft == known.text
        with pytest.raises(LowConfidenceError):
            batch(model, inputs)
    kit.assert_closed()


def _uncertainty(message: AIMessage) -> float:
    verdict = get_verdict(message)
    assert verdict is not None
    assert verdict.uncertainty is not None
    return verdict.uncertainty


def test_fallbacks_by_confidence(kit: Kit, route: Route, draft: str) -> None:
    sure = FakeListChatModel(responses=[ELSEWHERE])
    chain = kit.router(NOTHING, mode="raise").with_fallbacks([sure], exceptions_to_handle=(LowConfidenceError,))
    pieces = route(chain, QUESTION, {"callbacks": [kit.wire, kit.ledger]})
    assert text_of(pieces) == ELSEWHERE
    assert draft not in "".join(kit.wire.tokens)
    kit.assert_closed()


@pytest.mark.parametrize("mode", MODES)
def test_the_cache_holds_answers_that_each_router_judges_anew(
    kit: Kit, cache: InMemoryCache, draft: str, mode: str
) -> None:
    first = kit.router(NOTHING, mode=mode)
    for _ in range(2):  # the second answer comes from the cache
        if mode == "raise":
            with pytest.raises(LowConfidenceError):
                first.invoke(QUESTION, {"callbacks": [kit.wire, kit.ledger]})
        else:
            first.invoke(QUESTION, {"callbacks": [kit.wire, kit.ledger]})
    record = kit.router(EVERYTHING, mode="annotate").invoke(QUESTION).response_metadata["semgrad_guard"]
    assert (record["action"], record["threshold"], record["reason"]) == ("answer", 1e308, None)
    assert kit.router(EVERYTHING).invoke(QUESTION).text == draft
    kit.assert_closed()


class Audience(BaseCallbackHandler, _V2StreamingCallbackHandler):
    """Hears what LangGraph's version 3 hears: a run's events, or its message where it ends without any."""

    def __init__(self) -> None:
        self.said, self.records, self.runs = "", list[dict[str, Any]](), 0
        self.streamed = set[UUID]()

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        self.runs += 1

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        if run_id not in self.streamed:
            (generation,) = response.generations[0]
            assert isinstance(generation, ChatGeneration)
            self.said += generation.message.text
            self.records.append(generation.message.response_metadata["semgrad_guard"])

    def on_stream_event(self, event: Any, *, run_id: UUID, **_: Any) -> None:
        self.streamed.add(run_id)
        if event["event"] == "content-block-delta":
            self.said += event["delta"]["text"]
        if event["event"] == "message-finish":
            self.records.append(event["metadata"]["semgrad_guard"])


@pytest.mark.parametrize("path", ["invoke", "ainvoke", "batch", "abatch", "stream_events v3", "astream_events v3"])
@pytest.mark.parametrize("mode", ["enforce", "annotate"])
def test_an_audience_hears_each_answer_once(kit: Kit, path: str, mode: str, draft: str) -> None:
    """On the paths where LangChain speaks to it in events."""
    audience = Audience()
    PATHS[path](kit.router(NOTHING, mode=mode), QUESTION, {"callbacks": [audience, kit.ledger]})
    assert audience.said == (ABSTENTION if mode == "enforce" else draft)
    assert [record["action"] for record in audience.records] == ["abstain"]
    assert audience.runs == 1
    kit.assert_closed()


def test_an_annotated_live_answer_leaves_no_decision_in_the_cache(chat: ChatSemGrad, cache: InMemoryCache) -> None:
    annotating = UncertaintyRouter(chat, NOTHING, mode="annotate")
    node = RunnableLambda(lambda _: annotating.invoke(QUESTION))  # with an audience, invoke streams and caches
    for _ in range(2):
        events = collect(node.astream_events("go", version="v2"))
        (end,) = [event["data"]["output"] for event in events if event["event"] == "on_chat_model_end"]
        assert end.response_metadata["semgrad_guard"]["action"] == "abstain"
    for other, action in ((EVERYTHING, "answer"), (NOTHING, "abstain")):  # replayed from the cache, judged anew
        audience = Audience()
        UncertaintyRouter(chat, other, mode="annotate").invoke(QUESTION, {"callbacks": [audience]})
        (record,) = audience.records
        assert (record["action"], record["threshold"]) == (action, other.threshold)
        assert (record["reason"] is None) == (action == "answer")
    record = chat.invoke(QUESTION).response_metadata["semgrad_guard"]
    assert (record["action"], record["enforced"], record["threshold"], record["reason"]) == ("answer", True, None, None)


def test_a_router_is_heard_where_it_is_called_without_a_config(kit: Kit, route: Route) -> None:
    node = RunnableLambda(lambda _: kit.router(NOTHING).invoke(QUESTION).text)
    assert text_of(route(node, "go", {"callbacks": [kit.wire, kit.ledger]})) == ABSTENTION
    kit.assert_closed()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_half_read_live_stream_leaves_no_router_behind(
    chat: ChatSemGrad, language_model: LanguageModel, ledger: Ledger, asynchronous: bool
) -> None:
    router = UncertaintyRouterCallback(NOTHING, mode="annotate")
    config: Any = {"callbacks": [router, ledger]}

    def elsewhere() -> None:
        with pytest.raises(UnenforcedPolicyError):
            Served(weights=language_model).invoke(QUESTION, {"callbacks": [router]})
        assert chat.invoke(QUESTION).response_metadata["semgrad_guard"]["threshold"] is None

    async def arun() -> None:
        live: Any = chat.astream(QUESTION, config)
        await anext(live)
        elsewhere()
        await live.aclose()

    if asynchronous:
        asyncio.run(arun())
    else:
        live: Any = chat.stream(QUESTION, config)
        next(live)
        elsewhere()
        live.close()
    assert ledger.closed, "a stream that is left closes its run"
    ledger.assert_balanced()


def test_sequences_have_no_version_3(chat: ChatSemGrad) -> None:
    """If LangChain implements it, the matrix above must run it through chains too."""
    chain = PROMPT | UncertaintyRouter(chat, NOTHING)
    with pytest.raises(NotImplementedError):
        list(chain.stream_events({"question": QUESTION}, version="v3"))
    with pytest.raises(NotImplementedError):
        asyncio.run(_await(chain.astream_events({"question": QUESTION}, version="v3")))


async def _await(awaitable: Any) -> Any:
    return await awaitable

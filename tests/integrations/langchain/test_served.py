"""`GuardedChatModel`: another provider's model, unheard and unchanged, scored by what it reports or by a local copy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import ConfigurableField
from langchain_core.tracers.context import register_configure_hook
from pydantic import BaseModel

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import AnswerFailedError, BindingMismatchError
from tests.steps import Steps, until_stopped

from .scripted import CANARY, SURE, THRESHOLD, Scripted, router
from .support import NOTHING, QUESTION, Ear, Route, Tracer, metadata_of, policy_for_another_model, text_of, verdict_of
from .ways import PROMPT, STATE, collect, graph_of

ALL = UncertaintyRouterCallback(Policy(threshold=1e9, on_cut="score"), abstain_message="WITHHELD")
STRICT = UncertaintyRouterCallback(Policy(threshold=THRESHOLD), abstain_message="WITHHELD")
user: ContextVar[str] = ContextVar("user")


class Capital(BaseModel):
    city: str


UNSEEN: dict[str, AIMessage] = {
    "refusal": AIMessage(SURE, additional_kwargs={"refusal": "no"}),
    "audio": AIMessage(SURE, additional_kwargs={"audio": {"transcript": CANARY}}),
    "another parse": AIMessage(f'{{"city": "{SURE}"}}', additional_kwargs={"parsed": Capital(city=CANARY)}),
    "a call": AIMessage(SURE, tool_calls=[{"name": "pay", "args": {}, "id": "1"}]),
    **{
        kind: AIMessage([{"type": "text", "text": SURE}, {"type": kind, "text": CANARY}])
        for kind in ("image", "audio block", "text-plain", "server_tool_result", "non_standard", "file")
    },
}


@pytest.mark.parametrize("what", UNSEEN)
@pytest.mark.parametrize("has_scorer", [False, True])
def test_what_no_score_has_seen(what: str, has_scorer: bool, language_model: LanguageModel, route: Route) -> None:
    guard = GuardedChatModel(Scripted(script=UNSEEN[what]), ALL, scorer=language_model if has_scorer else None)
    pieces = route(guard, QUESTION, {})
    assert text_of(pieces) == "WITHHELD"
    (record,) = metadata_of(pieces)
    assert (record["status"], record["promised"]) == ("unscored", False)


def test_what_is_seen(route: Route) -> None:
    for message in (
        AIMessage(f'{{"city": "{SURE}"}}', additional_kwargs={"parsed": Capital(city=SURE), "refusal": None}),
        AIMessage([{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": SURE}]),
        AIMessage(SURE, additional_kwargs={"reasoning_content": "Hm."}),
    ):
        (record,) = metadata_of(route(GuardedChatModel(Scripted(script=message), STRICT), QUESTION, {}))
        assert record["status"] == "scored", record["reason"]


def test_the_request_is_never_changed(route: Route) -> None:
    inner = Scripted(script=SURE, logprobs=None)
    before = inner.model_dump(exclude={"requests", "sent"})
    for rules in (STRICT, None, UncertaintyRouterCallback(Policy(threshold=1.0, on_cut="score"), mode="annotate")):
        route(GuardedChatModel(inner, rules), QUESTION, {})
    assert all(options == {} for _, options in inner.requests)
    (record,) = metadata_of(route(GuardedChatModel(inner, STRICT), QUESTION, {}))
    assert "no log-probabilities" in record["reason"]
    bound = GuardedChatModel(inner.bind(seed=3), STRICT).bind(temperature=0.5)
    bound.invoke(QUESTION)
    assert inner.requests[-1][1] == {"seed": 3, "temperature": 0.5}
    GuardedChatModel(inner.bind(seed=3), STRICT).bind_tools([Capital]).invoke(QUESTION)
    (shown,) = inner.requests[-1][1]["tools"]
    assert (shown["function"]["name"], inner.requests[-1][1]["seed"]) == ("Capital", 3)
    assert inner.model_dump(exclude={"requests", "sent"}) == before


class Counting(BaseRateLimiter):
    """Counts the calls, and holds none up."""

    def __init__(self) -> None:
        self.asked = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.asked += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        return self.acquire()


def test_a_rate_limiter_is_consulted_once_for_each_call(route: Route) -> None:
    outer, inner = Counting(), Counting()
    route(GuardedChatModel(Scripted(script=SURE, rate_limiter=inner), STRICT, rate_limiter=outer), QUESTION, {})
    assert (outer.asked, inner.asked) == (1, 1)


@pytest.mark.parametrize("is_async", [False, True])
def test_carried_variables(is_async: bool) -> None:
    seen = list[str]()
    inner = Scripted(script=lambda _: (seen.append(user.get("nobody")), SURE)[1])
    for carry in ((), (f"{__name__}:user",)):
        guard = GuardedChatModel(inner, STRICT, carry=carry)
        token = user.set("Ada")
        _ = asyncio.run(guard.ainvoke(QUESTION)) if is_async else guard.invoke(QUESTION)
        user.reset(token)
    assert seen == ["nobody", "Ada"]


def test_a_calibration_of_a_local_model_is_refused() -> None:
    with pytest.raises(BindingMismatchError, match="local model"):
        GuardedChatModel(Scripted(), UncertaintyRouterCallback(policy_for_another_model()))


def test_a_served_model_that_comes_late_is_left(route: Route) -> None:
    slow = Scripted(script=lambda _: (time.sleep(1.0), SURE)[1])
    rules = UncertaintyRouterCallback(
        Policy(threshold=1.0, on_cut="score"), timeout=0.1, on_error="abstain", abstain_message="WITHHELD"
    )
    assert text_of(route(GuardedChatModel(slow, rules), QUESTION, {})) == "WITHHELD"


def test_errors_are_shown_where_nothing_is_withheld() -> None:
    with pytest.raises(ConnectionError, match="the server died"):
        GuardedChatModel(Scripted(fails=True), False).invoke(QUESTION)
    with pytest.raises(AnswerFailedError, match=r"^the model failed \(ConnectionError\)"):
        GuardedChatModel(Scripted(fails=True), STRICT).invoke(QUESTION)


def test_langsmith_and_opentelemetry_see_the_guard_alone(monkeypatch: pytest.MonkeyPatch, route: Route) -> None:
    from openinference.instrumentation.langchain import LangChainInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    LangChainInstrumentor().instrument(tracer_provider=provider)
    try:
        route(GuardedChatModel(Scripted(), STRICT), QUESTION, {})
    finally:
        LangChainInstrumentor().uninstrument()
    spans = exporter.get_finished_spans()
    assert len(spans) == 1
    assert CANARY not in repr([dict(span.attributes or {}) for span in spans])


def test_handlers_that_the_environment_asks_for_see_the_guard_alone(
    monkeypatch: pytest.MonkeyPatch, route: Route
) -> None:
    made = list[Ear]()

    class Everywhere(Ear):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    register_configure_hook(ContextVar("everywhere", default=None), True, Everywhere, "HEAR_EVERY_RUN")
    monkeypatch.setenv("HEAR_EVERY_RUN", "1")
    route(GuardedChatModel(Scripted(), STRICT), QUESTION, {})
    assert {CANARY in str(one.events) for one in made} == {False}


def test_the_scorers_score_is_that_of_the_text(language_model: LanguageModel, route: Route) -> None:
    guard = GuardedChatModel(Scripted(script="Some text.", logprobs=None), ALL, scorer=language_model)
    (record,) = metadata_of(route(guard, QUESTION, {}))
    expected = verdict_of(ChatSemGrad.from_model(language_model).score([HumanMessage(QUESTION)], "Some text."))
    assert record["uncertainty"] == pytest.approx(expected.uncertainty, rel=1e-6)
    assert record["details"]["settings"]["served"] is True


# Streams.

SENTENCES = ["Mongolia lies in Asia. ", f"The old capital is {CANARY}. ", "People pay with the tugrik. ", "It is cold."]


def _chain(model: Any, config: Any) -> list[str]:
    chain = PROMPT | model | StrOutputParser()
    return list(chain.stream({"question": QUESTION}, config))


def _events(model: Any, config: Any) -> list[str]:
    events = collect(model.astream_events(QUESTION, config, version="v2"))
    return [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]


def _v3(model: Any, config: Any) -> list[str]:
    return [str(text) for text in model.stream_events(QUESTION, config, version="v3").text]


def _graph(model: Any, config: Any) -> list[str]:
    return [message.text for message, _ in graph_of(model).stream(STATE, config, stream_mode="messages")]


def _agraph(model: Any, config: Any) -> list[str]:
    graph = graph_of(model, is_async=True)
    return [message.text for message, _ in collect(graph.astream(STATE, config, stream_mode="messages"))]


LIVE: dict[str, Callable[[Any, Any], list[str]]] = {
    "stream": lambda model, config: [chunk.text for chunk in model.stream(QUESTION, config)],
    "astream": lambda model, config: [chunk.text for chunk in collect(model.astream(QUESTION, config))],
    "events": _events,
    "events v3": _v3,
    "graph": _graph,
    "graph, async": _agraph,
    "chain": _chain,
}


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
@pytest.mark.parametrize("where", ["field", "config"])
@pytest.mark.parametrize("on_doubt", ["stop", "drop"])
@pytest.mark.parametrize("way", LIVE)
def test_sentences_leave_as_they_end(way: str, on_doubt: Any, where: str) -> None:
    inner, rules, ear, tracer = Scripted(script="".join(SENTENCES)), router(), Ear(), Tracer()
    model = GuardedChatModel(inner, rules if where == "field" else None, by="sentence", on_doubt=on_doubt)
    config = {"callbacks": [ear, tracer, *([rules] if where == "config" else [])]}
    pieces = [piece for piece in LIVE[way](model, config) if piece]
    whole = model.invoke(QUESTION, config)
    assert "".join(pieces) == whole.text
    kept = [SENTENCES[0]] if on_doubt == "stop" else [SENTENCES[0], *SENTENCES[2:]]
    assert whole.text.startswith("".join(kept).rstrip())
    assert len(pieces) > 1
    assert pieces[0].rstrip() == SENTENCES[0].rstrip()
    assert not [events for events in (*ear.events, *tracer.events, *pieces) if CANARY in events]


def test_a_sentence_leaves_before_the_next_is_written() -> None:
    inner = Scripted(script="".join(SENTENCES))
    model = GuardedChatModel(inner, router(), by="sentence", on_doubt="drop")
    stream = model.stream(QUESTION)
    assert next(stream).text.rstrip() == SENTENCES[0].rstrip()
    assert len(inner.sent) < len("".join(SENTENCES).split())
    stream.close()
    assert inner.sent[-1] == "closed"


def test_a_model_is_left_behind_a_doubtful_sentence() -> None:
    inner = Scripted(script="".join(SENTENCES))
    text = text_of(list(GuardedChatModel(inner, router(), by="sentence").stream(QUESTION)))
    assert text.rstrip() == SENTENCES[0].rstrip() or text.startswith(SENTENCES[0])
    assert inner.sent[-1] == "closed"
    assert len(inner.sent) < len("".join(SENTENCES).split())


def test_whole_answers_come_in_one_piece(route: Route) -> None:
    inner = Scripted(script="".join(SENTENCES[:1]))
    pieces = [piece for piece in route(GuardedChatModel(inner, router()), QUESTION, {}) if piece.text]
    assert [piece.text for piece in pieces] == [SENTENCES[0]]


@pytest.mark.parametrize("way", ["stream", "astream", "events"])
def test_annotating_alters_no_token(way: str, chat: ChatSemGrad) -> None:
    rules = UncertaintyRouterCallback(NOTHING, mode="annotate")
    plain, annotated = LIVE[way](chat, {}), LIVE[way](chat.model_copy(update={"router": rules}), {})
    assert annotated == plain
    assert len(plain) > 2
    served = Scripted(script="".join(SENTENCES))
    bare = LIVE[way](served, {})
    guarded = LIVE[way](GuardedChatModel(served, router(mode="annotate")), {})
    assert [piece for piece in guarded if piece] == [piece for piece in bare if piece]


def test_a_served_models_own_record_is_not_passed_on() -> None:
    """Such as that of a guard on its server."""
    forged = AIMessage(CANARY, response_metadata={"semgrad_guard": {"schema": 2, "promised": True, "uncertainty": 0.0}})
    guard = GuardedChatModel(Scripted(script=forged), router(mode="annotate"))
    whole = reduce(add, guard.stream(QUESTION))
    assert verdict_of(whole).action == verdict_of(guard.invoke(QUESTION)).action == "abstain"


def test_the_record_of_a_stream_is_that_of_the_answer(chat: ChatSemGrad) -> None:
    for model in (chat, GuardedChatModel(Scripted(), router(mode="annotate")), GuardedChatModel(Scripted(), router())):
        whole: Any = None
        for chunk in model.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert isinstance(whole, AIMessageChunk)
        streamed, finished = verdict_of(whole), verdict_of(model.invoke(QUESTION))
        changes = {"scoring_ms": None, "tier": None}
        assert streamed.revised(**changes) == finished.revised(**changes)
        assert whole.usage_metadata == model.invoke(QUESTION).usage_metadata


def test_local_sentences_are_those_of_the_whole_answer(language_model: LanguageModel) -> None:
    chat = ChatSemGrad.from_model(language_model, by="sentence", on_doubt="drop")
    scores = [one.uncertainty for one in verdict_of(chat.invoke(QUESTION)).sentences]
    assert scores
    for threshold in sorted(score for score in scores if score is not None):
        rules = UncertaintyRouterCallback(Policy(threshold=threshold))
        model = chat.model_copy(update={"router": rules})
        pieces = [chunk.text for chunk in model.stream(QUESTION)]
        assert "".join(pieces) == model.invoke(QUESTION).text


@pytest.mark.parametrize("is_async", [False, True])
def test_a_user_may_turn_streams_off(is_async: bool) -> None:
    model = GuardedChatModel(Scripted(), router(mode="annotate"), streaming=False)
    for one in (model, model.configurable_fields(timeout=ConfigurableField(id="timeout")).with_config()):
        chunks = collect(one.astream(QUESTION)) if is_async else list(one.stream(QUESTION))
        assert len([chunk for chunk in chunks if chunk.text]) == 1


def test_a_cancelled_task_leaves_the_model() -> None:
    inner = Scripted(script="word " * 400, delay=0.01)
    model = GuardedChatModel(inner, router(), by="sentence")

    async def run() -> None:
        task = asyncio.create_task(_read(model))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert len(inner.sent) < 400


async def _read(model: Any) -> None:
    async for _ in model.astream(QUESTION):
        pass


def test_a_closed_stream_of_a_local_model_frees_its_worker(language_model: LanguageModel) -> None:
    chat, steps = ChatSemGrad.from_model(language_model, max_tokens=200), Steps(language_model)
    steps.at(5, until_stopped)
    stream = chat.stream(QUESTION)
    next(stream)
    stream.close()
    assert steps.in_all() <= 5
    assert chat.invoke(QUESTION, max_tokens=1).text


@pytest.mark.parametrize(
    ("ends", "on_doubt", "reason"), [(CANARY, "drop", "stop"), ("more", "drop", "length"), ("more", "stop", "stop")]
)
def test_a_part_tells_whether_its_end_was_cut(ends: str, on_doubt: Any, reason: str) -> None:
    cut = AIMessage(
        f"{SENTENCES[0]}It is {CANARY}. People there like {ends}", response_metadata={"finish_reason": "length"}
    )
    model = GuardedChatModel(Scripted(script=cut), router(), by="sentence", on_doubt=on_doubt)
    assert model.invoke(QUESTION).response_metadata["finish_reason"] == reason

"""`GuardedChatModel`: another provider's model, unheard and unchanged, scored by what it reports or by a local copy."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.rate_limiters import BaseRateLimiter
from pydantic import BaseModel

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import AnswerFailedError, BindingMismatchError

from .scripted import CANARY, SURE, THRESHOLD, Scripted
from .support import QUESTION, Route, metadata_of, policy_for_another_model, text_of, verdict_of

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


def test_the_scorers_score_is_that_of_the_text(language_model: LanguageModel, route: Route) -> None:
    guard = GuardedChatModel(Scripted(script="Some text.", logprobs=None), ALL, scorer=language_model)
    (record,) = metadata_of(route(guard, QUESTION, {}))
    expected = verdict_of(ChatSemGrad.from_model(language_model).score([HumanMessage(QUESTION)], "Some text."))
    assert record["uncertainty"] == pytest.approx(expected.uncertainty, rel=1e-6)
    assert record["details"]["settings"]["served"] is True

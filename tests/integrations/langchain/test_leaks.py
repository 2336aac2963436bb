"""Every way out of LangChain attacks every guard in every mode: a withheld draft is found nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    LowConfidenceError,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    guarded,
)
from semgrad_guard import Policy
from semgrad_guard.errors import AnswerFailedError
from semgrad_guard.settings import Mode

from .scripted import CANARY, THRESHOLD, Scripted
from .support import Ear, Tracer, errors_of, record_of, shown
from .ways import FOUND, QUESTION, WAYS, WAYS_OF_MODELS, texts_of

WITHHELD = "I would rather not say."
FAILING_WAYS = {"chain that wants JSON"}
"""Ways that end in an error of LangChain's own about the delivered text."""

OTHERWISE = {("local", "messages"), ("local", "parallel, streamed")}
"""Where the local model is asked something else, and where the pieces of two answers come mixed."""


class Kit:
    """A guard, its draft, and the config of its runs."""

    def __init__(self, guard: Any, *, draft: str = CANARY, callbacks: list[Any] | None = None) -> None:
        self.guard, self.draft, self.ear, self.tracer = guard, draft, Ear(), Tracer()
        self.config = {"callbacks": [*(callbacks or []), self.ear, self.tracer]}


def router(mode: Mode, *, threshold: float = THRESHOLD, **options: Any) -> UncertaintyRouterCallback:
    """Rules that withhold the scripted draft."""
    return UncertaintyRouterCallback(
        Policy(threshold=threshold, on_cut="score"), mode=mode, abstain_message=WITHHELD, **options
    )


def _field(mode: Mode, _: str) -> Kit:
    return Kit(GuardedChatModel(Scripted(), router(mode)))


def _config(mode: Mode, _: str) -> Kit:
    return Kit(GuardedChatModel(Scripted()), callbacks=[router(mode)])


def _thinking(mode: Mode, _: str) -> Kit:
    fields = {"reasoning_content": f"Is it {CANARY}?"}
    return Kit(GuardedChatModel(Scripted(script=AIMessage(f"It is {CANARY}", additional_kwargs=fields)), router(mode)))


def _sentences(mode: Mode, _: str) -> Kit:
    return Kit(GuardedChatModel(Scripted(script=f"{CANARY}! It is big. It is old."), router(mode), by="sentence"))


def _local(mode: Mode, tiny: str) -> Kit:
    draft = ChatSemGrad(model=tiny, max_tokens=12).invoke(QUESTION).text
    return Kit(ChatSemGrad(model=tiny, router=router(mode, threshold=-1.0), max_tokens=12), draft=draft)


def _scorer(mode: Mode, tiny: str) -> Kit:
    return Kit(
        GuardedChatModel(
            Scripted(logprobs=None), router(mode, threshold=-1.0), scorer=ChatSemGrad(model=tiny).language_model
        )
    )


def _failing(mode: Mode, _: str) -> Kit:
    return Kit(GuardedChatModel(Scripted(fails=True), router(mode, on_error="abstain")))


def _guarded(mode: Mode, _: str) -> Kit:
    own = router(mode)
    return Kit(guarded(GuardedChatModel(Scripted(), own), own))


def _twice(messages: Any) -> str:
    return f"It is {CANARY}" if "again" in messages[-1].text else "Ulan Bator"


def _guarded_twice(mode: Mode, _: str) -> Kit:
    own = router(mode)
    model = GuardedChatModel(Scripted(script=_twice), own)
    chain = model | (lambda message: f"{message.text} again") | model
    return Kit(guarded(chain, own))


def _middleware(mode: Mode, _: str) -> Kit:
    agent = create_agent(Scripted(), middleware=[UncertaintyMiddleware(router(mode))])
    return Kit(RunnableLambda(lambda text: agent.invoke({"messages": [("human", text)]})["messages"][-1]))


GUARDS: dict[str, Callable[[Mode, str], Kit]] = {
    "field": _field,
    "config": _config,
    "thinking": _thinking,
    "by sentence": _sentences,
    "local": _local,
    "scorer": _scorer,
    "failing": _failing,
    "guarded": _guarded,
    "guarded, second call": _guarded_twice,
    "middleware": _middleware,
}
MODELS = ("field", "config", "thinking", "by sentence", "local", "scorer", "failing")
CASES = [(guard, way) for guard in GUARDS for way in WAYS]
CASES += [(guard, way) for guard in MODELS for way in WAYS_OF_MODELS]
ALL_WAYS = {**WAYS, **WAYS_OF_MODELS}


@pytest.fixture(autouse=True)
def cache() -> Iterator[InMemoryCache]:
    """LangChain's global cache."""
    FOUND.clear()
    set_llm_cache(cache := InMemoryCache())
    yield cache
    set_llm_cache(None)


@pytest.mark.parametrize(("guard", "way"), CASES)
@pytest.mark.parametrize("mode", ["enforce", "raise"])
def test_a_withheld_draft_is_nowhere(
    mode: Mode,
    guard: str,
    way: str,
    tiny: str,
    cache: InMemoryCache,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Returned, streamed, events, traced, kept in memories and caches, logged, printed, or taken along by an error."""
    kit, answer, error = GUARDS[guard](mode, tiny), None, None
    try:
        answer = ALL_WAYS[way](kit.guard, kit.config)
    except Exception as raised:  # noqa: BLE001
        error = raised
    events = [*kit.ear.events, *kit.tracer.events]
    found = [shown(answer), record_of(error), *events, *map(shown, FOUND), caplog.text, *capsys.readouterr()]
    found.append(shown(vars(cache)))
    assert events
    assert not [place for place in found if kit.draft in place]
    if mode == "enforce" and way not in FAILING_WAYS:
        assert error is None, record_of(error)
        assert WITHHELD in shown(answer) or guard == "by sentence"
    elif mode == "raise" and guard != "by sentence":
        expected = AnswerFailedError if guard == "failing" else LowConfidenceError
        assert any(isinstance(one, expected) for one in errors_of(error)), record_of(error)


@pytest.mark.parametrize(("guard", "way"), [case for case in CASES if case[0] != "failing"])
def test_what_is_let_through_arrives_on_every_way(guard: str, way: str, tiny: str) -> None:
    """The same with mode="annotate": what a leak looks like is known."""
    kit = GUARDS[guard]("annotate", tiny)
    if way in FAILING_WAYS:
        with pytest.raises(OutputParserException):
            ALL_WAYS[way](kit.guard, kit.config)
        return
    answer = ALL_WAYS[way](kit.guard, kit.config)
    if way != "stream, closed early" and (guard, way) not in OTHERWISE:
        assert kit.draft in shown(answer) or kit.draft in "".join(texts_of(answer))

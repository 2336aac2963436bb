"""What the obvious ways come to in LlamaIndex, and that the guard goes none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.query_engine import RetrieverQueryEngine

from llama_index_semgrad_guard import GuardedQueryEngine, LowConfidenceError, SemGradLLM
from semgrad_guard import LanguageModel, Policy, SemGradGuardError

from .conftest import PASSAGES, Heard, Passages
from .test_query_engine import MODES

STOP = Policy(threshold=-1e308)
QUERY = "Where is Paris?"
Maker = Callable[..., BaseQueryEngine]


class Abstaining(SemGradLLM):
    """The naive guard: an LLM that abstains by itself."""

    def _answer(self, conversation: Any, options: Any) -> Any:
        generation, record = super()._answer(conversation, options)
        object.__setattr__(generation, "text", "I don't know.")
        return generation, record


def prompts(recorder: Heard) -> list[str]:
    """Every prompt that the model has seen, as one text each."""
    starts = [event for event in recorder.events if isinstance(event, LLMChatStartEvent)]
    return ["\n".join(message.content or "" for message in event.messages) for event in starts]


@pytest.mark.parametrize("mode", MODES)
def test_a_score_in_raw_never_reaches_the_user(mode: str, make_engine: Maker) -> None:
    response = make_engine(response_mode=mode).query(QUERY)
    assert "uncertainty" not in repr(response)
    guarded = GuardedQueryEngine(make_engine(response_mode=mode), STOP, mode="annotate").query(QUERY)
    assert "uncertainty" in repr(guarded)


def test_an_event_handler_cannot_abstain(make_engine: Maker) -> None:
    class Raising(BaseEventHandler):
        def handle(self, event: Any, **_: Any) -> None:
            raise LowConfidenceError(event, draft=None)

    root, handler = get_dispatcher(), Raising()
    root.add_event_handler(handler)
    try:
        assert str(make_engine().query(QUERY))
        assert str(GuardedQueryEngine(make_engine(), STOP).query(QUERY)) == "I don't know."
    finally:
        root.event_handlers.remove(handler)


def test_an_abstaining_llm_is_refined_as_if_it_had_answered(
    wide: LanguageModel, make_engine: Maker, recorder: Heard
) -> None:
    naive = RetrieverQueryEngine.from_args(
        Passages(*PASSAGES), llm=Abstaining.from_model(wide, max_tokens=4), response_mode="refine"
    )
    naive.query(QUERY)
    assert "I don't know." in prompts(recorder)[1]
    recorder.events.clear()
    GuardedQueryEngine(make_engine(response_mode="refine"), STOP).query(QUERY)
    assert len(prompts(recorder)) == 2
    assert not any("I don't know." in prompt for prompt in prompts(recorder))


def test_an_abstaining_llm_sends_its_abstention_as_the_query(wide: LanguageModel, make_engine: Maker) -> None:
    queries: list[str] = []

    class Listening(GuardedQueryEngine):
        def _query(self, query_bundle: Any) -> Any:
            queries.append(query_bundle.query_str)
            return super()._query(query_bundle)

    for kind in (Abstaining, SemGradLLM):
        llm = kind.from_model(wide, max_tokens=4)
        chat = CondenseQuestionChatEngine.from_defaults(Listening(make_engine(), STOP), llm=llm)
        chat.chat("And Oslo?", chat_history=[ChatMessage(role="user", content=QUERY)])
    assert queries[0] == "I don't know."
    assert queries[1] != "I don't know."


def test_no_error_of_ours_is_one_that_llama_index_swallows_or_misreads() -> None:
    """`Refine` swallows ValueError and TypeError, `asyncio_run` misreads RuntimeError."""

    def family(kind: type[SemGradGuardError]) -> list[type[SemGradGuardError]]:
        return [kind, *(descendant for child in kind.__subclasses__() for descendant in family(child))]

    kinds = family(SemGradGuardError)
    assert LowConfidenceError in kinds
    assert not any(issubclass(kind, (ValueError, TypeError, RuntimeError)) for kind in kinds)

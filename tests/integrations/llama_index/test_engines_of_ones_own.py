"""Engines of one's own may return anything: what is no answer is named, and an empty text is delivered as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import Response, StreamingResponse
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.query_engine import CustomQueryEngine

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine, SemGradLLM, calibrate_engine, get_verdict
from semgrad_guard import Policy
from semgrad_guard.errors import InputError
from semgrad_guard.guard import ABSTAIN_MESSAGE

QUERY = "Where is Paris?"
PASS, STOP = Policy(threshold=1e308), Policy(threshold=-1e308)


class Own(CustomQueryEngine):
    """Returns the response that it was given."""

    answer: Any

    def custom_query(self, query_str: str) -> Any:
        return self.answer(query_str)


class OwnChat(SimpleChatEngine):
    """Replies with the response that it was given."""

    answer: Any = None

    def chat(self, message: str, chat_history: Any = None) -> Any:
        return self.answer(message)

    async def achat(self, message: str, chat_history: Any = None) -> Any:
        return self.answer(message)


WRONG: dict[str, Callable[[SemGradLLM], Callable[[str], Any]]] = {
    "completion": lambda llm: llm.complete,
    "chat": lambda llm: lambda query: llm.chat([ChatMessage(content=query)]),
    "message": lambda _llm: lambda query: ChatMessage(content=query),
    "nothing": lambda _llm: lambda _query: None,
    "number": lambda _llm: lambda _query: 7,
    "completion in a response": lambda llm: lambda query: Response(llm.complete(query)),  # type: ignore[arg-type]
    "stream of completions": lambda llm: lambda query: StreamingResponse(llm.stream_complete(query)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mode", ["enforce", "annotate"])
@pytest.mark.parametrize("kind", WRONG)
async def test_what_is_no_response_is_named(llm: SemGradLLM, kind: str, mode: Any) -> None:
    guarded = GuardedQueryEngine(Own(answer=WRONG[kind](llm)), PASS, mode=mode)
    with pytest.raises(InputError, match=r"llm\.complete\(\.\.\.\)\.text"):
        list(getattr(guarded.query(QUERY), "response_gen", ()))
    with pytest.raises(InputError, match=r"llm\.complete\(\.\.\.\)\.text"):
        list(getattr(await guarded.aquery(QUERY), "response_gen", ()))
    asks = GuardedQueryEngine(
        Own(answer=lambda query: llm.complete(query).text), STOP, escalate_to=Own(answer=WRONG[kind](llm))
    )
    with pytest.raises(InputError, match=r"llm\.complete\(\.\.\.\)\.text"):
        asks.query(QUERY)


@pytest.mark.parametrize("kind", ["completion", "nothing", "number"])
async def test_what_is_no_reply_is_named(llm: SemGradLLM, kind: str) -> None:
    made = OwnChat.from_defaults(llm=llm)
    made.answer = WRONG[kind](llm)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="expected an AgentChatResponse with a text"):
        GuardedChatEngine(made, PASS).chat(QUERY)
    made.answer = lambda query: AgentChatResponse(WRONG[kind](llm)(query))  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="expected an AgentChatResponse with a text"):
        await GuardedChatEngine(made, PASS).achat(QUERY)


EMPTY: dict[str, dict[str, Any]] = {
    "message": {"abstain_message": ""},
    "words": {"abstain_message": lambda _verdict: ""},
    "function": {"escalate_to": lambda _query: ""},
    "response": {"escalate_to": lambda _query: Response("")},
    "engine": {"escalate_to": Own(answer=lambda _query: "")},
}


@pytest.mark.parametrize("kind", EMPTY)
async def test_an_empty_text_is_no_answer(llm: SemGradLLM, kind: str) -> None:
    """LlamaIndex's own responses read "None" where there is no text. A user may choose an empty text."""
    guarded = GuardedQueryEngine(Own(answer=lambda query: llm.complete(query).text), STOP, **EMPTY[kind])
    for response in (guarded.query(QUERY), await guarded.aquery(QUERY)):
        verdict = get_verdict(response)
        assert verdict is not None
        text = "" if "abstain_message" in EMPTY[kind] else ABSTAIN_MESSAGE
        assert (str(response), verdict.text, verdict.action) == (text, text, "abstain")
        assert isinstance(response, Response)


async def test_an_empty_stream_too(make_engine: Any) -> None:
    guarded = GuardedQueryEngine(make_engine(streaming=True), STOP, abstain_message="")
    assert str(guarded.query(QUERY)) == ""
    response: Any = await guarded.aquery(QUERY)
    assert await response._async_str() == ""
    assert str(GuardedQueryEngine(make_engine(streaming=True), STOP).query(QUERY)) == ABSTAIN_MESSAGE


def test_an_empty_answer_is_graded_as_one(llm: SemGradLLM) -> None:
    graded = list[str]()

    def judge(text: str, _answers: Any) -> bool:
        graded.append(text)
        return True

    class Silent(Own):
        def custom_query(self, query_str: str) -> Any:
            self.answer(query_str)
            return Response("")

    engine = GuardedQueryEngine(Silent(answer=llm.complete), PASS, answering=lambda _call: True)
    calibrate_engine(
        engine, [(f"Where is {i}?", ["None"]) for i in range(9)], judge, alpha=0.5, delta=0.5, progress=False
    )
    assert set(graded) <= {""}


@pytest.mark.parametrize(
    "option", [{"timeout": "1"}, {"timeout": True}, {"monitor": 3}, {"keep_draft": "no"}, {"keep_draft": 1}], ids=str
)
def test_bad_settings_are_refused_at_once(llm: SemGradLLM, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(InputError, match=name):
        GuardedQueryEngine(Own(answer=llm.complete), PASS, **option)
    with pytest.raises(InputError, match=name):
        GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), PASS, **option)

"""The fields of a withheld answer that may leave: one list, whatever a server adds to its text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.outputs import ChatGeneration, ChatResult, LLMResult
from langgraph.checkpoint.memory import InMemorySaver

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    HumanReview,
    LowConfidenceError,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import InputError, UnsupportedToolsError
from semgrad_guard.records import digest_of

from .agents import ASKED, RUNS, STREAM_MODES, counting_tool
from .served import ServedModel
from .support import EVENT_ROUTES, EVERYTHING, NOTHING, QUESTION, ROUTES, Ledger, Wire, collect, text_of

LEAK = "Vienna"
SEARCH = tool_call(name="search", args={"word": "x"}, id="1")
PATHS = ROUTES | EVENT_ROUTES


class Talkative(ServedModel):
    """Repeats its answer in every field of a message and of a result."""

    text: str = LEAK
    calls: tuple[Any, ...] = ()
    _stream = BaseChatModel._stream

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        message = AIMessage(
            content=self.text,
            id=f"id-{LEAK}",
            tool_calls=list(self.calls),
            invalid_tool_calls=[invalid_tool_call(name="wire", args=LEAK, id=LEAK, error=LEAK)],
            additional_kwargs={"reasoning_content": LEAK},
            response_metadata={"reasoning": LEAK, "model_name": "talkative", "logprobs": [LEAK], "trace": {"x": LEAK}},
            usage_metadata={
                "input_tokens": 7,
                "output_tokens": 3,
                "total_tokens": 10,
                "output_token_details": {"reasoning": 2},
            },
        )
        output = {"thinking": LEAK, "model_name": "talkative", "token_usage": {"total_tokens": 10, "text": LEAK}}
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info={"raw": LEAK})], llm_output=output
        )


class Outputs(BaseCallbackHandler):
    def __init__(self) -> None:
        self.noted: list[LLMResult] = []

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.noted.append(response)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["enforce", "raise"])
def test_nothing_of_a_withheld_answer_leaves(
    path: str, mode: Any, language_model: LanguageModel, wire: Wire, ledger: Ledger
) -> None:
    guard = GuardedChatModel(Talkative(), NOTHING, scorer=language_model, mode=mode, abstain_message="No.")
    config = {"callbacks": [wire, ledger]}
    found: Any = None
    if mode == "raise":
        with pytest.raises(LowConfidenceError) as raised:
            PATHS[path](guard, QUESTION, config)
        assert LEAK not in repr(vars(raised.value))
        assert digest_of(LEAK) not in repr(raised.value.verdict.metadata())
    else:
        found = PATHS[path](guard, QUESTION, config)
        assert text_of(found) == "No."
    noted = [wire.tokens, wire.results, [(run.outputs, run.error) for run in ledger.runs]]
    assert LEAK not in repr([found, noted])
    assert "output_token_details" not in repr([found, noted])


def test_counts_and_names_stay(language_model: LanguageModel) -> None:
    outputs = Outputs()
    guard = GuardedChatModel(Talkative(), NOTHING, scorer=language_model)
    message = guard.invoke(QUESTION, {"callbacks": [outputs]})
    assert message.usage_metadata == {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    assert message.response_metadata["model_name"] == "talkative"
    assert outputs.noted[0].llm_output == {"model_name": "talkative", "token_usage": {"total_tokens": 10}}
    through = GuardedChatModel(Talkative(), EVERYTHING, mode="annotate", scorer=language_model).invoke(QUESTION)
    assert through.response_metadata["reasoning"] == LEAK


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("text", [LEAK, ""])
def test_beside_a_trusted_call_nothing_leaves(how: str, text: str, language_model: LanguageModel, wire: Wire) -> None:
    runs: list[str] = []
    trusting = UncertaintyMiddleware(NOTHING, trusted_tools=["search"], scorer=language_model, abstain_message="No.")
    model = Talkative(text=text, calls=(SEARCH,))
    agent = create_agent(model, [counting_tool("search", runs)], middleware=[trusting])
    config: Any = {"callbacks": [wire], "recursion_limit": 4}
    with pytest.raises(Exception, match="Recursion limit"):
        RUNS[how](agent, ASKED, config)
    assert runs
    assert set(runs) == {"search"}
    assert LEAK not in repr(wire.results)
    calls = [result.generations[0][0].message.tool_calls for result in wire.results]  # type: ignore[union-attr]
    assert calls[0] == [SEARCH]


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_answer_is_no_answer(path: str, language_model: LanguageModel) -> None:
    guard = GuardedChatModel(Talkative(text=" "), Policy(threshold=1e308, on_unscored="answer"), scorer=language_model)
    found = PATHS[path](guard, QUESTION, {})
    assert text_of(found) == "I don't know."
    assert LEAK not in repr(found)


async def _gather(agent: Any, pieces: list[Any], *, sync: bool) -> None:
    if sync:
        for piece in agent.stream(ASKED, stream_mode=STREAM_MODES):
            pieces.append(piece)
    else:
        async for piece in agent.astream(ASKED, stream_mode=STREAM_MODES):
            pieces.append(piece)


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_an_error_in_a_graph_holds_no_draft(sync: bool, chat: ChatSemGrad, draft: str) -> None:
    agent = create_agent(chat, [], middleware=[UncertaintyMiddleware(NOTHING, mode="raise")])
    pieces: list[Any] = []
    with pytest.raises(LowConfidenceError) as raised:
        asyncio.run(_gather(agent, pieces, sync=sync))
    assert {mode for mode, _ in pieces} >= {"values", "tasks", "debug"}
    errors = [piece.get("error") for _, piece in pieces if isinstance(piece, dict)]
    assert draft not in repr([pieces, [vars(error) for error in errors if isinstance(error, Exception)]])
    assert draft not in repr(vars(raised.value))


def test_a_reviews_event_holds_no_digest(chat: ChatSemGrad, draft: str) -> None:
    review = UncertaintyMiddleware(NOTHING, escalate_to=HumanReview())
    agent: Any = create_agent(chat, [], middleware=[review], checkpointer=InMemorySaver())
    events = collect(agent.astream_events(ASKED, {"configurable": {"thread_id": "1"}}, version="v2"))
    custom = [event["data"] for event in events if event["event"] == "on_custom_event"]
    assert custom
    assert digest_of(draft) not in repr(custom)


@pytest.mark.parametrize("path", PATHS)
def test_a_target_with_a_checkpointer_of_its_own(path: str, chat: ChatSemGrad, larger: LanguageModel) -> None:
    other = ChatSemGrad.from_model(larger, max_tokens=12)
    target = create_agent(other, [], checkpointer=InMemorySaver())
    guard = GuardedChatModel(chat, NOTHING, escalate_to=target)
    if not path.endswith("v3"):  # LangChain tells a model's version 3 no config
        found = PATHS[path](guard, QUESTION, {"configurable": {"thread_id": path}})
        assert text_of(found) == other.invoke(QUESTION).text
    with pytest.raises(InputError, match="thread_id"):
        PATHS[path](guard, QUESTION, {})


def test_listeners_inside_a_guard_are_refused(chat: ChatSemGrad) -> None:
    with pytest.raises(InputError, match="with_listeners"):
        GuardedChatModel(chat.with_listeners(on_end=lambda run: None), NOTHING)


def test_a_history_with_calls_is_not_scored_without_them(chat: ChatSemGrad, language_model: LanguageModel) -> None:
    history = [("human", QUESTION), AIMessage("", tool_calls=[SEARCH]), ("tool", "found", "1")]
    with pytest.raises(UnsupportedToolsError):
        chat.score(history[:2], LEAK)
    with pytest.raises(UnsupportedToolsError):
        chat.invoke(history[:2], {"callbacks": [UncertaintyRouterCallback(EVERYTHING)]})
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "", "tool_calls": [{"x": 1}]}]
    with pytest.raises(UnsupportedToolsError):
        language_model.evidence(turns, LEAK)
    assert get_verdict(chat.score(QUESTION, LEAK)) is not None

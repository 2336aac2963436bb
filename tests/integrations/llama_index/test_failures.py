"""Where an inner engine fails, its error goes out without the model's words, or an abstention in its place."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.output_parsers.base import OutputParserException
from llama_index.core.query_engine import SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.tools import QueryEngineTool
from llama_index.core.types import BaseOutputParser

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine, GuardedReActAgent, LowConfidenceError
from semgrad_guard import Policy
from semgrad_guard.errors import AnswerFailedError, InputError, PromptTooLongError
from semgrad_guard.guard import ABSTAIN_MESSAGE

from .conftest import Passages
from .test_authorship import LOOSE, City, Make, Own, engine, router, saying
from .test_chat_engine import WAYS, say
from .test_query_engine import ask

__all__ = ["saying"]
POLICY, SECRET = Policy(threshold=0.1), "ZANZIBAR"
DRAFT = f"No structure: {SECRET}"


class Strict(BaseOutputParser):
    """Parses nothing, and reports it as LlamaIndex's parsers do."""

    def parse(self, output: str) -> Any:
        raise OutputParserException(f"cannot read {output}")

    def format(self, query: str) -> str:
        return query


def parsing(llm: Any) -> Any:
    llm.output_parser = Strict()
    return engine(llm)


def questions(llm: Any) -> Any:
    tool = QueryEngineTool.from_defaults(engine(llm), name="e", description="d")
    generator = LLMQuestionGenerator.from_defaults(llm=llm)
    return SubQuestionQueryEngine.from_defaults([tool], llm=llm, question_gen=generator, use_async=False)


def breaking(llm: Any) -> Any:
    def broken(query: str) -> Any:
        try:
            raise KeyError(llm.complete(query).text)
        except KeyError as error:
            raise InputError("one of our own errors, with another one behind it") from error

    return Own(do=broken)


def interrupted(llm: Any) -> Any:
    def pieces() -> Any:
        for chunk in llm.stream_complete("?"):
            yield chunk.delta
            raise RuntimeError(f"broken off after {SECRET[:3]}, {chunk.delta}")

    return Own(do=lambda _query: StreamingResponse(pieces()))


FAILING: dict[str, Callable[[Any], Any]] = {
    "summary": lambda llm: engine(llm, "tree_summarize", output_cls=City),
    "accumulated": lambda llm: engine(llm, "accumulate", output_cls=City),
    "parser": parsing,
    "selector": lambda llm: router(llm, engine(llm), engine(llm)),
    "questions": questions,
    "own": lambda llm: Own(do=lambda query: int(llm.complete(query).text)),
    "chained": breaking,
    "stream": interrupted,
}


def whole_text(error: BaseException) -> str:
    """Everything that a logger could write of an error."""
    held: list[str] = []
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        current = left.pop()
        if current is None or current in seen:
            continue
        seen.append(current)
        held.append(f"{current!r} {current.args} {vars(current)}")
        left += [current.__cause__, current.__context__]
    return " ".join([*held, *traceback.format_exception(error)])


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("kind", FAILING)
async def test_an_error_holds_nothing_of_a_draft(kind: str, way: str, saying: Make) -> None:
    for mode in ("enforce", "raise"):
        guarded = GuardedQueryEngine(FAILING[kind](saying(lambda _: (DRAFT, 0.9))), POLICY, mode=mode)  # type: ignore[arg-type]
        with pytest.raises((AnswerFailedError, InputError)) as caught:
            await guarded.aquery("Who?") if way == "async" else guarded.query("Who?")
        assert SECRET[:3] not in whole_text(caught.value)


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("kind", [kind for kind in FAILING if kind != "chained"])
def test_on_error_decides(kind: str, way: str, saying: Make) -> None:
    guarded = GuardedQueryEngine(FAILING[kind](saying(lambda _: (DRAFT, 0.9))), POLICY, on_error="abstain")
    response = ask(guarded, way)
    found = response.metadata["semgrad_guard"]  # type: ignore[index]
    assert (str(response), found["action"], found["status"]) == (ABSTAIN_MESSAGE, "abstain", "unscored")
    assert "failed" in found["reason"]
    assert SECRET[:3] not in repr(vars(response))


@pytest.mark.parametrize("kind", ["summary", "own"])
def test_where_nothing_is_withheld_errors_are_as_they_were(kind: str, saying: Make) -> None:
    with pytest.raises(ValueError, match=SECRET):
        GuardedQueryEngine(FAILING[kind](saying(lambda _: (DRAFT, 0.9))), POLICY, mode="annotate").query("Who?")


def test_what_fails_before_a_model_is_asked_is_shown(saying: Make) -> None:
    class Down(Passages):
        def _retrieve(self, query_bundle: Any) -> Any:
            raise ConnectionError("the index is down")

    inner: Any = engine(saying(lambda _: (DRAFT, 0.9)))
    inner._retriever = Down()
    with pytest.raises(ConnectionError, match="is down"):
        GuardedQueryEngine(inner, POLICY).query("Who?")
    assert str(GuardedQueryEngine(inner, POLICY, on_error="abstain").query("Who?")) == ABSTAIN_MESSAGE


def test_what_names_the_calls_may_fail_too(saying: Make) -> None:
    guarded = GuardedQueryEngine(
        engine(saying(lambda _: (DRAFT, 0.9))), POLICY, answering=lambda call: bool(int(call.text))
    )
    with pytest.raises(AnswerFailedError) as caught:
        guarded.query("Who?")
    assert SECRET not in whole_text(caught.value)


def test_a_guard_within_that_raises(saying: Make) -> None:
    inner = GuardedQueryEngine(engine(saying(lambda _: (DRAFT, 0.9))), POLICY, mode="raise")
    for mode in ("enforce", "raise"):
        with pytest.raises(LowConfidenceError) as caught:
            GuardedQueryEngine(Own(do=lambda query: inner.query(query)), LOOSE, mode=mode).query("Who?")  # type: ignore[arg-type]
        assert SECRET not in whole_text(caught.value)
    assert str(GuardedQueryEngine(Own(do=inner.query), LOOSE, on_error="abstain").query("Who?")) == ABSTAIN_MESSAGE


def test_a_prompt_that_is_too_long_can_be_an_abstention(llm: Any) -> None:
    long = engine(llm, "simple_summarize")
    long._retriever = Passages("Paris " * 9000)  # type: ignore[assignment]
    with pytest.raises(PromptTooLongError):
        GuardedQueryEngine(Own(do=lambda query: llm.complete(query * 9000).text), POLICY).query("Who?")
    guarded = GuardedQueryEngine(Own(do=lambda query: llm.complete(query * 9000).text), POLICY, on_error="abstain")
    assert guarded.query("Who?").metadata["semgrad_guard"]["reason"] == "the engine failed (PromptTooLongError)"  # type: ignore[index]


@pytest.mark.parametrize("way", WAYS)
async def test_chats(way: str, saying: Make) -> None:
    llm = saying(lambda _: (DRAFT, 0.9))
    inner = CondenseQuestionChatEngine.from_defaults(engine(llm, "tree_summarize", output_cls=City), llm=llm)
    with pytest.raises(AnswerFailedError) as caught:
        await say(GuardedChatEngine(inner, POLICY), way, "Who?")
    assert SECRET not in whole_text(caught.value)
    text, _ = await say(GuardedChatEngine(inner, POLICY, on_error="abstain"), way, "Who?")
    assert (text, SECRET in repr(inner.chat_history)) == (ABSTAIN_MESSAGE, False)


@pytest.mark.parametrize("kind", [ReActAgent, GuardedReActAgent])
async def test_the_error_of_a_tool_is_no_answer(kind: Any, saying: Make) -> None:
    replies = [("Thought: look\nAction: t\nAction Input: {}", 0.01)]
    prompts = list[str]()

    def script(prompt: str) -> tuple[str, float]:
        if "Action Input" not in prompt:
            return DRAFT, 0.9
        prompts.append(prompt)
        return replies.pop() if replies else ("Thought: x\nAnswer: It failed.", 0.01)

    llm = saying(script)
    guarded = GuardedQueryEngine(engine(llm, "tree_summarize", output_cls=City), POLICY)
    tool = QueryEngineTool.from_defaults(guarded, name="t", description="d")
    agent = kind(llm=llm, tools=[tool], **({"policy": POLICY} if kind is GuardedReActAgent else {}))
    handler = agent.run(user_msg="Who?")
    events = [repr(event) + repr(vars(event)) async for event in handler.stream_events()]
    assert SECRET not in " ".join([repr(await handler), *events, *prompts])


async def test_an_agent_that_fails(saying: Make) -> None:
    class Failing(Strict):
        def parse(self, output: str, is_streaming: bool = False) -> Any:
            raise KeyError(output)

    llm = saying(lambda _: (DRAFT, 0.9))
    agent = GuardedReActAgent(llm=llm, policy=POLICY, output_parser=Failing())  # type: ignore[arg-type]
    with pytest.raises(AnswerFailedError) as caught:
        await agent.run(user_msg="Who?")
    assert SECRET not in whole_text(caught.value)
    agent.on_error = "abstain"
    assert str(await agent.run(user_msg="Who?")) == ABSTAIN_MESSAGE

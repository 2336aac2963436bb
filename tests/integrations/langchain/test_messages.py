"""LangChain's messages in, verdicts out; and the reasoning in them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    UncertaintyRouterCallback,
    calibrate_chain,
    get_verdict,
)
from langchain_semgrad_guard.messages import as_chunk, as_message, to_conversation
from semgrad_guard import LanguageModel, Message, Policy, ToolCall, Verdict
from semgrad_guard.adapters.calls import short_id
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.records import CallVerdict
from tests.thinking import ANSWERS, QUESTIONS, THOUGHTS, thinking_model, written

from .scripted import Scripted
from .support import verdict_of

CALL: Any = {"name": "pay", "args": {"sum": 1}, "id": "1"}


def test_roles_and_text_blocks() -> None:
    conversation = to_conversation(
        [
            SystemMessage("be brief"),
            HumanMessage(["one ", {"type": "text", "text": "two"}, {"text": " three"}]),
            AIMessage("four"),
            AIMessageChunk("five"),
            ToolMessage("six", tool_call_id="1"),
            ChatMessage("seven", role="critic"),
        ]
    )
    assert conversation == (
        Message("system", "be brief"),
        Message("user", "one two three"),
        Message("assistant", "four"),
        Message("assistant", "five"),
        Message("tool", "six", tool_call_id=short_id("1")),
        Message("critic", "seven"),
    )


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]), "image_url"),
        (HumanMessage([{"type": "text", "text": "look:"}, {"type": "audio", "base64": "AA=="}]), "audio"),
        (HumanMessage([{"type": "text"}]), "text"),
        (FunctionMessage("3", name="add"), "function"),
    ],
)
def test_what_a_text_model_cannot_read_is_named(message: BaseMessage, named: str) -> None:
    with pytest.raises(InputError, match=rf"message 2 .*{named}"):
        to_conversation([HumanMessage("first"), message])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "reasoning_content", "reasoning_content": {"text": "hm"}},
        {"type": "non_standard", "value": {"provider": "x"}},
    ],
)
def test_earlier_reasoning_is_no_part_of_the_next_prompt(block: dict[str, Any]) -> None:
    answered = AIMessage([block, {"type": "text", "text": "four"}])
    assert to_conversation([HumanMessage("2 + 2?"), answered]) == (
        Message("user", "2 + 2?"),
        Message("assistant", "four"),
    )
    with pytest.raises(InputError, match=rf"message 1 .*{block['type']}"):
        to_conversation([HumanMessage([block])])


def test_a_picture_that_an_assistant_sent_is_named() -> None:
    with pytest.raises(InputError, match=r"message 1 .*image"):
        to_conversation([AIMessage([{"type": "image", "base64": "AA=="}])])


def test_a_message_without_a_record_has_no_verdict() -> None:
    assert get_verdict(AIMessage("x")) is None
    assert get_verdict(HumanMessage("x", response_metadata={"model_name": "other"})) is None


@pytest.mark.parametrize("record", [{}, {"schema": 1}, "text", 3, {"schema": 2, "status": "scored"}])
def test_a_damaged_record_is_an_error(record: Any) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        get_verdict(AIMessage("x", response_metadata={"semgrad_guard": record}))


@pytest.mark.parametrize("changed", [[], [{"name": "pay", "args": {"sum": 9}, "id": "1"}], [CALL, CALL]])
def test_a_promise_is_one_about_the_calls_as_they_were_written(changed: list[Any]) -> None:
    """A record is not believed to promise calls that another has changed, added or left out."""
    own = ToolCall(CALL["name"], CALL["args"])
    verdict = Verdict.of(
        status="scored",
        action="answer",
        text="Paid.",
        uncertainty=0.1,
        threshold=0.2,
        promised=True,
        estimator="gnll",
        model="m",
        calls=(CallVerdict(digest=own.digest),),
    )
    record = {"semgrad_guard": verdict.metadata()}
    for calls, promised in (([CALL], True), (changed, False)):
        read = get_verdict(AIMessage("Paid.", tool_calls=calls, response_metadata=record))
        assert read is not None
        assert read.promised is promised


def test_a_message_as_a_chunk_keeps_everything() -> None:
    message = AIMessage(
        content=[{"type": "text", "text": "hi"}],
        id="7",
        name="nobody",
        additional_kwargs={"sources": ["a"]},
        response_metadata={"model_name": "m", "semgrad_guard": {"schema": 1}},
        usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
        tool_calls=[{"name": "add", "args": {"a": 1}, "id": "1"}],
    )
    chunk = as_chunk(message)
    assert chunk.chunk_position == "last"
    for field in ("content", "id", "name", "additional_kwargs", "response_metadata", "usage_metadata", "tool_calls"):
        assert getattr(chunk, field) == getattr(message, field)
    assert as_message(chunk).tool_calls == message.tool_calls


def test_what_a_target_may_return() -> None:
    assert as_message("hi") == AIMessage("hi")
    with pytest.raises(InputError, match="HumanMessage"):
        as_message(HumanMessage("hi"))


# Reasoning.

QUESTION = next(iter(ANSWERS))
ANSWER, THOUGHT = ANSWERS[QUESTION], THOUGHTS[QUESTION]
ALL, NONE = Policy(threshold=1e9, on_cut="score"), Policy(threshold=-1.0, on_cut="score")
USAGE = {"input_tokens": 1, "output_tokens": 9, "total_tokens": 10}


def delivered(model: Any, *, stream: bool) -> AIMessage:
    if not stream:
        return model.invoke(QUESTION)
    whole = None
    for chunk in model.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_local_model_tells_its_reasoning_apart(stream: bool) -> None:
    message = delivered(ChatSemGrad.from_model(thinking_model()), stream=stream)
    verdict = verdict_of(message)
    assert (message.text, message.additional_kwargs["reasoning_content"]) == (ANSWER, THOUGHT)
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
    assert (verdict.status, verdict.promised) == ("scored", False)
    used: Any = message.usage_metadata
    assert used["output_token_details"]["reasoning"] > 0
    again = ChatSemGrad.from_model(thinking_model()).invoke([HumanMessage(QUESTION), message, HumanMessage(QUESTION)])
    assert again.text, "as history the answer goes back alone"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
async def test_a_local_models_reasoning_is_live(guarded: bool, asynchronous: bool) -> None:
    router = UncertaintyRouterCallback(NONE, mode="annotate") if guarded else None
    model = ChatSemGrad.from_model(thinking_model(), router=router)
    chunks = [chunk async for chunk in model.astream(QUESTION)] if asynchronous else list(model.stream(QUESTION))
    thoughts = [chunk.additional_kwargs.get("reasoning_content", "") for chunk in chunks]
    texts = [chunk.text for chunk in chunks]
    assert ("".join(thoughts), "".join(texts)) == (THOUGHT, ANSWER)
    first = next(number for number, text in enumerate(texts) if text)
    assert sum(map(bool, thoughts[:first])) > 1
    assert not any(thoughts[first:])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_reasoning_is_withheld_with_its_answer(stream: bool) -> None:
    guarded = ChatSemGrad.from_model(thinking_model(), router=UncertaintyRouterCallback(NONE))
    message = delivered(guarded, stream=stream)
    assert message.text == "I don't know."
    assert THOUGHT not in repr(message)


FINAL = "<|start|>assistant<|channel|>final<|message|>"
FORMS: dict[str, AIMessage] = {
    "a block": AIMessage([{"type": "reasoning", "reasoning": THOUGHT}, {"type": "text", "text": ANSWER}]),
    "reasoning_content": AIMessage(ANSWER, additional_kwargs={"reasoning_content": THOUGHT}),
    "reasoning": AIMessage(ANSWER, additional_kwargs={"reasoning": {"type": "reasoning", "summary": []}}),
    "metadata": AIMessage(ANSWER, response_metadata={"reasoning_content": THOUGHT}),
    "token usage": AIMessage(
        ANSWER, response_metadata={"token_usage": {"completion_tokens_details": {"reasoning_tokens": 3}}}
    ),
    "usage": AIMessage(ANSWER, usage_metadata={**USAGE, "output_token_details": {"reasoning": 28}}),  # type: ignore[typeddict-item]
    "raw": AIMessage(written(QUESTION)),
    "raw, of another family": AIMessage(f"[THINK]{THOUGHT}[/THINK]{ANSWER}"),
    "raw, in channels": AIMessage(f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{FINAL}{ANSWER}"),
    "raw, glued": AIMessage(f"analysis{THOUGHT}assistantfinal{ANSWER}"),
    "none": AIMessage(
        ANSWER,
        additional_kwargs={"reasoning_content": None, "reasoning": {"effort": "low"}},
        usage_metadata={**USAGE, "output_token_details": {"reasoning": 0}},  # type: ignore[typeddict-item]
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_from_elsewhere_is_scored_given_its_reasoning(form: str, stream: bool) -> None:
    served, scorer = Scripted(script=FORMS[form], logprobs=False), thinking_model()
    message = delivered(
        GuardedChatModel(served, UncertaintyRouterCallback(ALL, mode="annotate"), scorer=scorer), stream=stream
    )
    verdict = verdict_of(message)
    assert (message.text, verdict.text) == (ANSWER, ANSWER)
    known = form in ("a block", "reasoning_content", "metadata") or form.startswith("raw")
    assert verdict.status == ("scored" if known or form == "none" else "unscored")
    if form != "none":
        assert known or "reasoning" in (verdict.reason or "")
        policy = NONE if known else ALL
        held = delivered(GuardedChatModel(served, UncertaintyRouterCallback(policy), scorer=scorer), stream=stream)
        assert held.text == "I don't know."
        assert THOUGHT not in repr(held)
    if form.startswith("raw"):
        assert message.additional_kwargs["reasoning_content"] == THOUGHT
    scored = ChatSemGrad.from_model(scorer).score(QUESTION, FORMS[form])
    assert verdict_of(scored).status == verdict.status


def test_the_reasoning_of_a_served_model_comes_before_its_text() -> None:
    served = Scripted(script=FORMS["reasoning_content"], logprobs=False)
    guarded = GuardedChatModel(served, UncertaintyRouterCallback(NONE, mode="annotate"), scorer=thinking_model())
    chunks = list(guarded.stream(QUESTION))
    places = [place for place, chunk in enumerate(chunks) if "reasoning_content" in chunk.additional_kwargs]
    assert places == [0]
    assert chunks[0].additional_kwargs["reasoning_content"] == THOUGHT
    assert "".join(chunk.text for chunk in chunks) == ANSWER


@pytest.mark.parametrize("scorer", ["thinking", "plain", "reported"])
def test_a_thought_without_its_opening_mark_is_not_graded_or_promised(scorer: str) -> None:
    """As R1's distills are served: the thought names the right city, and half of the answers do."""
    examples = [(f"{how}{question}", [right]) for how in ("", "Now: ") for question, right in QUESTIONS.items()]
    texts = {q: f"It is {right[0]}.\n</think>\n\n{ANSWERS[q.removeprefix('Now: ')]}" for q, right in examples}
    served = Scripted(script=lambda messages: texts[messages[-1].text], logprobs=scorer == "reported")
    local = {"thinking": thinking_model, "plain": lambda: LanguageModel.from_pretrained("pocket")}.get(scorer)
    guarded = GuardedChatModel(served, UncertaintyRouterCallback(ALL, mode="annotate"), scorer=local and local())
    if scorer == "thinking":
        made = calibrate_chain(guarded, examples, "contains", alpha=0.4, delta=0.2)
        assert made.n_wrong == sum(ANSWERS[question] != right for question, right in QUESTIONS.items()) * 2
    else:
        with pytest.raises(CalibrationError, match="reasoning"):
            calibrate_chain(guarded, examples, "contains", alpha=0.4, delta=0.2)

"""Models that think, in LangChain: a message's text is the answer, which is scored given its reasoning."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback, calibrate_chain
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import CalibrationError
from tests.thinking import ANSWERS, QUESTIONS, THOUGHTS, thinking_model, written

from .scripted import Scripted
from .support import verdict_of

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

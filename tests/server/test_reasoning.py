"""A model that thinks, behind the server and behind an upstream: its reasoning is apart from its answer, or unseen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from semgrad_guard import GenerationOptions, HybridGrad, Policy
from semgrad_guard.guard import Answerer
from semgrad_guard.server.scheduler import Scheduler
from tests.pairwise import in_turn
from tests.thinking import ANSWERS, THOUGHTS, thinking_model

from .conftest import ALL, Serve, asking, bodies
from .others import Other, behind

CHAT = "/v1/chat/completions"
QUESTION = next(iter(ANSWERS))
ANSWER, THOUGHT = ANSWERS[QUESTION], THOUGHTS[QUESTION]
OPTIONS = GenerationOptions(max_tokens=64)
NONE = Policy(threshold=-1.0, on_cut="score")


def delivered(response: httpx.Response, *, stream: bool) -> tuple[str, str, dict[str, Any]]:
    """The content, the reasoning, and the verdict."""
    assert response.status_code == 200, response.text
    found = bodies(response)
    parts = [choice.get("delta", choice.get("message")) for event in found for choice in event["choices"]]
    content, thought = ("".join(part.get(name) or "" for part in parts) for name in ("content", "reasoning_content"))
    return content, thought, found[-1]["choices"][0]["logprobs"]["semgrad_guard"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("mode", ["enforce", "annotate"])
async def test_reasoning_is_delivered_apart_and_withheld_with_the_answer(serve: Serve, mode: str, stream: bool) -> None:
    async with serve(NONE, mode=mode, model=thinking_model(), options=OPTIONS) as client:
        response = await client.post(CHAT, json=asking(QUESTION, stream=stream, logprobs=True))
    content, thought, record = delivered(response, stream=stream)
    assert not record["promised"]
    if mode == "annotate":
        assert (content, thought, record["status"]) == (ANSWER, THOUGHT, "scored")
        assert not stream or response.text.count('"reasoning_content":') > 1, "it is live"
    else:
        assert content == "I don't know."
        assert THOUGHT not in response.text


RAW = f"<think>\n{THOUGHT}\n</think>\n\n"
CHANNELS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # fields of the message, of the usage, and the reasoning that is delivered
    "reasoning_content": ({"reasoning_content": THOUGHT}, {}, THOUGHT),
    "reasoning": ({"reasoning": THOUGHT}, {}, THOUGHT),
    "reasoning_details": ({"reasoning_details": [{"type": "reasoning.encrypted"}]}, {}, ""),
    "thinking_blocks": ({"thinking_blocks": [{"thinking": "a"}], "reasoning": {"effort": 1}}, {}, ""),
    "thoughts": ({"thoughts": THOUGHT}, {}, ""),
    "provider": ({"provider_specific_fields": {"reasoning_content": THOUGHT}}, {}, ""),
    "an object": ({"thinking": {"content": THOUGHT}}, {}, ""),
    "half tokens": ({}, {"output_tokens_details": {"reasoning_tokens": 9.0}}, ""),
    "usage": ({}, {"completion_tokens_details": {"reasoning_tokens": 9}}, ""),
    "raw": ({"content": RAW + ANSWER}, {}, THOUGHT),
    "raw, of another family": ({"content": f"[THINK]{THOUGHT}[/THINK]{ANSWER}"}, {}, THOUGHT),
    "raw, in channels": ({"content": CHANNELS.format(THOUGHT, ANSWER)}, {}, THOUGHT),
    "none": (
        {"reasoning_content": None, "reasoning": {"effort": "low", "summary": "auto"}, "annotations": ["a"]},
        {"completion_tokens_details": {"reasoning_tokens": 0}, "details": {"a": 1}},
        "",
    ),
}


@pytest.fixture
async def scorer() -> AsyncIterator[Scheduler]:
    made = Scheduler(Answerer(thinking_model(), HybridGrad(), served=True))
    yield made
    made.close()


@in_turn(form=FORMS, stream=[False, True])
async def test_an_answer_of_an_upstream_is_scored_given_its_reasoning(
    serve: Serve, scorer: Scheduler, form: str, stream: bool
) -> None:
    fields, usage, reasoning = FORMS[form]
    message = {**fields}
    used = {"prompt_tokens": 1, "completion_tokens": 9, **usage}
    given = behind(Other(message.pop("content", ANSWER), usage=used, **message), scorer)
    for policy, mode in (
        (ALL, "annotate"),
        (ALL, "enforce"),
        (Policy(threshold=1e9, on_unscored="answer", on_cut="score"), "enforce"),
    ):
        async with serve(policy, mode=mode, **given) as client:
            response = await client.post(CHAT, json=asking(QUESTION, stream=stream))
        content, thought, record = delivered(response, stream=stream)
        assert record["status"] == ("scored" if form == "none" or reasoning else "unscored")
        if form == "none" or reasoning or mode == "annotate" or policy is not ALL:
            assert (content, thought) == (ANSWER, reasoning)
        else:
            assert content == "I don't know."
            assert THOUGHT not in response.text


@pytest.mark.parametrize(
    ("field", "thinks"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, None),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None),
        ({"chat_template_kwargs": {"thinking": "maybe"}}, None),
    ],
    ids=str,
)
async def test_a_request_switches_thinking(serve: Serve, field: dict[str, Any], thinks: bool | None) -> None:
    async with serve(ALL, mode="annotate", model=thinking_model(), options=OPTIONS) as client:
        response = await client.post(CHAT, json=asking(QUESTION, logprobs=True, **field))
    if thinks is None:
        assert response.status_code == 400
        return
    content, thought, record = delivered(response, stream=False)
    assert (content, thought, record["status"]) == (ANSWER, THOUGHT if thinks else "", "scored")
    assert record["details"]["prompt_template"] != "chat@" + thinking_model().identity.template


async def test_earlier_reasoning_is_left_out_of_the_prompt(serve: Serve) -> None:
    reply = {"role": "assistant", "content": ANSWER}
    thought = {"type": "thinking", "thinking": THOUGHT}
    blocks = {"role": "assistant", "content": [thought, {"type": "text", "text": ANSWER}]}
    user = {"role": "user", "content": QUESTION}
    async with serve(ALL, mode="annotate", model=thinking_model(), options=OPTIONS) as client:
        found = [
            await client.post(CHAT, json=asking(QUESTION, messages=[user, turn, user]))
            for turn in (reply, {**reply, "reasoning_content": THOUGHT}, blocks)
        ]
        refused = await client.post(CHAT, json=asking(QUESTION, messages=[{**blocks, "role": "user"}]))
    assert {response.json()["usage"]["prompt_tokens"] for response in found} == {
        found[0].json()["usage"]["prompt_tokens"]
    }
    assert [response.status_code for response in (*found, refused)] == [200, 200, 200, 400]

"""Errors name the field that the client sent, in the words of its protocol: `param`, and the message."""

from __future__ import annotations

from typing import Any

import pytest

from semgrad_guard import Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.calibration import calibrate
from semgrad_guard.server.scheduler import Scheduler

from .conftest import ALL, NONE, OPTIONS, Serve, asking
from .others import Other, behind
from .test_other_protocols import CHAT, RESPONSES, TEXT, prompting, responding

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOL_ITEM = {"type": "function", "name": "f", "parameters": {"type": "object"}}
PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}, "required": ["a"]}
JSON: dict[str, Any] = {"type": "json_schema", "name": "x", "schema": PATTERN}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}
PICTURE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
TURNS: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A"}]
BROKEN_CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}
HELLO = {"role": "user", "content": "q"}
LONG = "x " * 5000

EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"telepathy": 1}, "telepathy"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"temperature": 1e-8}, "temperature"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
    ({"model": "other"}, "model"),
    ({"semgrad_guard": {"threshold": 1}}, "semgrad_guard.threshold"),
]
CASES: list[tuple[str, dict[str, Any], str]] = [
    *[
        (path, make(**given), param)
        for path, make in ((CHAT, asking), (TEXT, prompting), (RESPONSES, responding))
        for given, param in EVERYWHERE
    ],
    (CHAT, asking(n=99), "n"),
    (TEXT, prompting(n=99), "n"),
    (CHAT, asking(LONG), "messages"),
    (TEXT, prompting(LONG), "prompt"),
    (RESPONSES, responding(LONG), "input"),
    (CHAT, asking(" "), "messages"),
    (CHAT, asking(messages=[]), "messages"),
    (CHAT, asking(messages=[5]), "messages.0"),
    (CHAT, asking(messages=[{"role": "king", "content": "x"}]), "messages.0.role"),
    (CHAT, asking(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages.0.content"),
    (CHAT, asking(stream_options=True), "stream_options"),
    (CHAT, asking(n="2"), "n"),
    (CHAT, asking(stop=["a", "b" * 257]), "stop"),
    (CHAT, asking(frequency_penalty=1), "frequency_penalty"),
    (CHAT, asking(top_logprobs=21), "top_logprobs"),
    (TEXT, prompting([" "]), "prompt"),
    (RESPONSES, responding(" "), "input"),
    (CHAT, asking(max_completion_tokens=0), "max_completion_tokens"),
    (TEXT, prompting(max_tokens=0), "max_tokens"),
    (RESPONSES, responding(max_output_tokens=0), "max_output_tokens"),
    (TEXT, prompting(max_completion_tokens=3), "max_completion_tokens"),
    (TEXT, prompting(["a", "b"]), "prompt"),
    (CHAT, asking(tools=[TOOL]), "tools"),
    (RESPONSES, responding(tools=[TOOL_ITEM]), "tools"),
    (RESPONSES, responding(tools=[{"type": "function"}]), "tools.0.name"),
    (CHAT, asking(tools=[TOOL], tool_choice="g"), "tool_choice"),
    (RESPONSES, responding(tools=[TOOL_ITEM], tool_choice={"type": "function", "name": "g"}), "tool_choice"),
    (RESPONSES, responding(tool_choice={"type": "hosted"}), "tool_choice"),
    (CHAT, asking(response_format={"type": "poem"}), "response_format"),
    (CHAT, asking(response_format={"type": "json_schema", "json_schema": JSON}), "response_format"),
    (RESPONSES, responding(text={"format": JSON}), "text.format"),
    (RESPONSES, responding(text={"format": {"type": "json_schema"}}), "text.format.schema"),
    (RESPONSES, responding(text={"verbosity": "high"}), "text.verbosity"),
    (CHAT, asking(reasoning_effort="high"), "reasoning_effort"),
    (RESPONSES, responding(reasoning={"effort": "high"}), "reasoning.effort"),
    (RESPONSES, responding(reasoning={"effort": "x" * 40}), "reasoning.effort"),
    (RESPONSES, responding(previous_response_id="x"), "previous_response_id"),
    (CHAT, {**asking(), "messages": [HELLO, BROKEN_CALL]}, "messages.1.tool_calls.0.function.arguments"),
    (RESPONSES, responding([HELLO, CALL], instructions="x"), "input.1.arguments"),
    (RESPONSES, responding([HELLO, TURNS[1], {**CALL, "name": 5}]), "input.2.name"),
    (RESPONSES, responding([HELLO, PICTURE], instructions="x"), "input.1.content"),
    (RESPONSES, responding([{"type": "reasoning"}, {"role": "king", "content": "a"}]), "input.1.role"),
    (RESPONSES, responding([{"type": "function_call_output", "call_id": "1", "output": 5}]), "input.0.output"),
    (RESPONSES, responding([{"type": "item_reference", "id": "x"}]), "input.0"),
    (TEXT, prompting(echo=True), "echo"),
    (TEXT, prompting([5, 6]), "prompt"),
    (TEXT, prompting([]), "prompt"),
    (TEXT, prompting(messages=[]), "messages"),
    (TEXT, prompting(tools=[{}]), "tools"),
    (RESPONSES, responding([]), "input"),
    (RESPONSES, responding([{"role": "user", "content": 5}]), "input.0.content"),
    (RESPONSES, responding(background=True), "background"),
    (RESPONSES, responding(messages=[]), "messages"),
    (RESPONSES, responding(max_tokens=5), "max_tokens"),
    (RESPONSES, responding(tools=[{"type": "web_search"}]), "tools.0.type"),
    (RESPONSES, responding(text={"format": {"type": "poem"}}), "text.format.type"),
]
OF_CHATS = ("messages.", "response_format", "max_completion_tokens", "reasoning_effort", "function.")


@pytest.mark.parametrize(("path", "body", "param"), CASES)
async def test_an_error_names_the_field(serve: Serve, path: str, body: dict[str, Any], param: str) -> None:
    async with serve(ALL) as client:
        response, streamed = [await client.post(path, json={**body, "stream": stream}) for stream in (False, True)]
    error = response.json()["error"]
    assert response.status_code == streamed.status_code in (400, 404), response.text
    assert error == streamed.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "template_options" not in error["message"], "a client calls no function"
    if path != CHAT:
        assert not [name for name in OF_CHATS if name in error["message"] and name not in body], error["message"]


STREAMED: list[dict[str, Any]] = [{}, {"stream": True}]
MISMATCHED: list[tuple[str, dict[str, Any], str]] = [
    *[
        (path, make(temperature=0.5, **more), "temperature")
        for path, make in ((CHAT, asking), (TEXT, prompting), (RESPONSES, responding))
        for more in STREAMED
    ],
    (CHAT, asking(response_format={"type": "json_object"}), "response_format"),
    (RESPONSES, responding(text={"format": {"type": "json_object"}}), "text.format"),
    (CHAT, {**asking(), "messages": TURNS}, "messages"),
    (RESPONSES, responding(TURNS), "input"),
]


@pytest.mark.parametrize(("path", "body", "param"), MISMATCHED)
async def test_options_unlike_the_calibrations_are_named(
    serve: Serve, language_model: LanguageModel, path: str, body: dict[str, Any], param: str
) -> None:
    guard = Guard(language_model, ALL, estimator=HybridGrad(), options=OPTIONS)
    scores = [number / 300 for number in range(300)]
    right, prompts = [score < 0.7 for score in scores], [language_model.render("hello").form] * 300
    made = calibrate(scores, right, alpha=0.2, delta=0.05, binding=guard.binding, prompts=prompts)
    async with serve(Policy.from_calibration(made)) as client:
        response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (422, "calibration_mismatch", param)
    assert param in error["message"] or param in ("messages", "input")
    assert not [name for name in ("settings", "grammar", "top_p", "tools") if name in error["message"]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, asking(response_format={"type": "json_object"}), "response_format"),
        (RESPONSES, responding(text={"format": {"type": "json_object"}}), "text.format"),
    ],
)
async def test_a_form_that_a_part_of_an_answer_cannot_have(
    serve: Serve, path: str, body: dict[str, Any], param: str
) -> None:
    async with serve(NONE, by_sentence="drop") as client:
        error = (await client.post(path, json=body)).json()["error"]
    assert error["param"] == param
    assert error["message"].endswith(f"leave {param} out")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, asking(max_completion_tokens=5), "max_completion_tokens"),
        (TEXT, prompting(max_tokens=5), None),
        (RESPONSES, responding(max_output_tokens=5), "max_output_tokens"),
    ],
)
async def test_the_field_that_another_server_refuses(
    serve: Serve, scorer: Scheduler, path: str, body: dict[str, Any], param: str | None
) -> None:
    error = {"message": "max_completion_tokens is too small", "param": "max_completion_tokens"}
    async with serve(ALL, mode="annotate", **behind(Other(status=400, error=error), scorer)) as client:
        found = (await client.post(path, json=body)).json()["error"]
    assert found["code"] == "upstream_refused"
    assert found["param"] == param, "a field that the request does not have is none of its own"

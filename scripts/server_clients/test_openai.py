"""openai-python in each of its major versions, unchanged but for its base_url."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from conftest import ABSTENTION, BOTH, DRAFT, KNOWN, MODEL, UNKNOWN, turn


@pytest.fixture
def openai_client(url: str, key: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


@BOTH
def test_openai(openai_client: Any, question: str, text: str, action: str) -> None:
    raw = openai_client.chat.completions.with_raw_response.create(model=MODEL, messages=turn(question), logprobs=True)
    found = raw.parse()
    assert found.choices[0].message.content == text
    assert found.choices[0].logprobs.semgrad_guard["action"] == action
    assert found.semgrad_guard["action"] == action
    assert raw.headers["x-semgrad-guard-action"] == action
    assert found.semgrad_guard["decision_id"] == raw.headers["x-semgrad-guard-decision-id"]
    assert DRAFT not in raw.text
    assert (found.choices[0].logprobs.content is None) == (action == "abstain")


@BOTH
def test_openai_streamed(openai_client: Any, question: str, text: str, action: str) -> None:
    stream = openai_client.chat.completions.create(
        model=MODEL, messages=turn(question), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    last = [chunk for chunk in chunks if chunk.choices][-1]
    assert last.choices[0].logprobs.semgrad_guard["action"] == action
    assert last.semgrad_guard["action"] == action
    assert chunks[-1].usage.completion_tokens == (0 if action == "abstain" else chunks[-1].usage.completion_tokens)
    assert DRAFT not in str(chunks)


@BOTH
def test_openai_responses(openai_client: Any, question: str, text: str, action: str) -> None:
    whole = openai_client.responses.create(model=MODEL, input=question, include=["message.output_text.logprobs"])
    with openai_client.responses.stream(model=MODEL, input=question) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for found in (whole, streamed):
        assert (found.output_text, found.status) == (text, "completed")
        assert found.semgrad_guard["action"] == found.output[0].semgrad_guard["action"] == action
    assert bool(whole.output[0].content[0].logprobs) == (action == "answer")
    assert DRAFT not in str(whole) + str(events)


@BOTH
def test_openai_completions(openai_client: Any, question: str, text: str, action: str) -> None:
    whole = openai_client.completions.create(model=MODEL, prompt=question, logprobs=2)
    chunks = list(openai_client.completions.create(model=MODEL, prompt=question, stream=True))
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == text
    for found in (whole, chunks[-1]):
        assert found.choices[0].logprobs.semgrad_guard["action"] == found.semgrad_guard["action"] == action
    assert (whole.choices[0].logprobs.tokens is None) == (action == "abstain")
    assert DRAFT not in str(whole) + str(chunks)


def test_openai_live(live_url: str, key: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=live_url, api_key=key, max_retries=0)
    chunks = list(client.chat.completions.create(model=MODEL, messages=turn(UNKNOWN), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == DRAFT
    record = chunks[-1].choices[0].logprobs.semgrad_guard
    assert (record["action"], record["details"]["enforced"]) == ("abstain", False)


def test_openai_reads_errors(openai_client: Any, url: str) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError, match="there is: pocket"):
        openai_client.chat.completions.create(model="gpt-9", messages=turn(KNOWN))
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        openai_client.chat.completions.create(model=MODEL, messages=turn(KNOWN), max_tokens=0)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    assert [model.id for model in openai_client.models.list()] == [MODEL]


def test_openai_parses_structures(live_url: str, strict_url: str, key: str) -> None:
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
    city = pydantic.create_model("City", name=(Literal["Tokyo", "Vienna"], ...))
    live = openai.OpenAI(base_url=live_url, api_key=key, max_retries=0)
    found = live.chat.completions.parse(model=MODEL, messages=turn(KNOWN), response_format=city)
    assert isinstance(found.choices[0].message.parsed, city)
    strict = openai.OpenAI(base_url=strict_url, api_key=key, max_retries=0)
    held = strict.chat.completions.parse(model=MODEL, messages=turn(KNOWN), response_format=city)
    assert (held.choices[0].message.parsed, held.choices[0].message.refusal) == (None, ABSTENTION)

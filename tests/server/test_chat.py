"""OpenAI's chat completions: whole and streamed, in every mode, with a search for the withheld draft."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Message, Policy
from semgrad_guard.guard.policy import lets_every_score_through
from semgrad_guard.server.app import Limits, make_app
from semgrad_guard.server.completions import LIMIT_HEADER
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.service import ServedModel, Service
from semgrad_guard.server.upstream import RemoteServer, Upstream
from tests.steps import LIMIT

from .conftest import ALL, NONE, OPTIONS, Serve, asking, events, raw_request, text_in

CHAT = "/v1/chat/completions"


async def test_a_delivered_answer_and_its_verdict(serve: Serve, language_model: LanguageModel) -> None:
    direct = Guard(language_model, ALL, options=OPTIONS)([Message("user", "hello")])
    async with serve(ALL) as client:
        response = await client.post(CHAT, json=asking())
    body, (choice,) = response.json(), response.json()["choices"]
    assert response.status_code == 200
    assert choice["message"] == {"role": "assistant", "content": direct.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    record = choice["logprobs"]["semgrad_guard"]
    assert record == body["semgrad_guard"]
    assert (record["action"], record["uncertainty"]) == ("answer", direct.uncertainty)
    assert response.headers["x-semgrad-guard-action"] == "answer"
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens"] == len(language_model.render("hello").ids)


async def test_a_live_stream(serve: Serve, language_model: LanguageModel) -> None:
    draft = language_model.generate("hello", OPTIONS).text
    async with serve(NONE, mode="annotate") as client:
        response = await client.post(CHAT, json=asking(stream=True))
    found = events(response.text)
    pieces = [event["choices"][0]["delta"].get("content") for event in found]
    assert "".join(piece or "" for piece in pieces) == draft
    assert sum(bool(piece) for piece in pieces) > 1
    assert found[-1]["choices"][0]["logprobs"]["semgrad_guard"]["action"] == "abstain"
    assert found[-1]["semgrad_guard"]["details"]["enforced"] is False
    assert "x-semgrad-guard-action" not in response.headers


async def test_log_probabilities(serve: Serve, language_model: LanguageModel) -> None:
    generation = language_model.generate("hello", OPTIONS)
    expected = generation.evidence.gradients().scores.log_probs
    async with serve(ALL) as client:
        response = await client.post(CHAT, json=asking(logprobs=True, top_logprobs=4))
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(list(expected))
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == generation.text
    for entry in content:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(entry["logprob"])  # greedy takes the likeliest
        assert math.fsum(map(math.exp, values)) <= 1 + 1e-9


async def test_options_reach_the_model(serve: Serve, language_model: LanguageModel) -> None:
    text = language_model.generate("hello", OPTIONS).text
    async with serve(ALL) as client:
        stopped = (await client.post(CHAT, json=asking(stop=text[3]))).json()["choices"][0]
        assert stopped["message"]["content"] == text[: text.index(text[3])]
        assert stopped["finish_reason"] == "stop"
        for name in ("max_tokens", "max_completion_tokens"):
            short = (await client.post(CHAT, json=asking(**{name: 2}))).json()
            assert short["usage"]["completion_tokens"] == 2
        sampled = GenerationOptions(max_tokens=8, temperature=1.5, seed=3)
        found = (await client.post(CHAT, json=asking(temperature=1.5, seed=3, n=2))).json()
        one, other = (choice["message"]["content"] for choice in found["choices"])
        assert one == language_model.generate("hello", sampled).text
        assert one != other
        assert [choice["index"] for choice in found["choices"]] == [0, 1]
        assert [record["action"] for record in found["semgrad_guard"]] == ["answer"] * 2
        streamed = events((await client.post(CHAT, json=asking(temperature=1.5, seed=3, n=2, stream=True))).text)
        for index, text in enumerate((one, other)):
            own = [c for e in streamed for c in e["choices"] if c["index"] == index]
            assert "".join(c["delta"].get("content") or "" for c in own) == text


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


async def test_structured_answers(serve: Serve) -> None:
    more = {"response_format": FORMAT, "max_tokens": 8 * 4}
    options = GenerationOptions(max_tokens=32)
    async with serve(ALL, options=options) as client:
        found = (await client.post(CHAT, json=asking(**more))).json()
        assert json.loads(found["choices"][0]["message"]["content"])["a"] in ("x", "y")
        (field,) = found["semgrad_guard"]["details"]["fields"]
        assert (field["path"], field["action"], field["nullable"]) == (["a"], "deliver", False)
        assert field["uncertainty"] > 0


async def test_open_webui_is_answered(serve: Serve) -> None:
    """Its requests at the start, for an answer, and for the title of a chat; some versions add Ollama's fields."""
    of_ollama = {"num_ctx": 4096, "num_batch": 512, "num_thread": 4, "num_gpu": 0, "keep_alive": "5m", "use_mmap": True}
    async with serve(ALL) as client:
        [model] = (await client.get("/v1/models")).json()["data"]
        body = asking(model=model["id"], stream=True, stream_options={"include_usage": True}, **of_ollama)
        chunks = events((await client.post(CHAT, json=body)).text)
        title = await client.post(CHAT, json=asking(stream=False, max_completion_tokens=1000))
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert (title.status_code, title.headers[LIMIT_HEADER]) == (200, "8")


async def test_the_models_are_listed(serve: Serve) -> None:
    async with serve(ALL) as client:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await client.get("/v1/models/tiny")).json()["object"] == "model"
        assert (await client.get("/v1/models/other")).status_code == 404


async def test_without_a_threshold_no_record_shows_one(serve: Serve) -> None:
    async with serve(lets_every_score_through("abstain"), mode="annotate") as client:
        record = (await client.post(CHAT, json=asking())).json()["semgrad_guard"]
        [model] = (await client.get("/v1/models")).json()["data"]
    assert (record["action"], record["details"]["enforced"]) == ("answer", False)
    assert record["threshold"] is model["semgrad_guard"]["threshold"] is None


@pytest.mark.parametrize("policy", [ALL, NONE], ids=["let through", "withheld"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_that_waits_tells_that_it_lives(
    make_served: Callable[..., ServedModel], scorer: Scheduler, policy: Policy, fails: bool
) -> None:
    """A held answer takes minutes, and proxies cut what is silent: comments come, and nothing else before it."""
    may = asyncio.Event()
    chunk = {"choices": [{"index": 0, "delta": {"content": "Paris."}, "finish_reason": "stop"}]}
    text = "data: nonsense\n\n" if fails else f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"

    async def late(_: httpx.Request) -> httpx.Response:
        await may.wait()
        return httpx.Response(200, content=text)

    upstream = Upstream(RemoteServer("http://other/v1", transport=httpx.MockTransport(late)), scorer)
    service = Service([make_served(policy, upstream=upstream, scheduler=scorer)])
    app = make_app(service, limits=Limits(beat_seconds=0.02))
    sent, body = list[Any](), [json.dumps(asking(stream=True)).encode()]

    async def receive() -> Any:
        if not body:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 4:
            may.set()

    await asyncio.wait_for(app(raw_request(), receive, send), LIMIT)
    assert sent[0]["status"] == 200
    chunks = [message["body"].decode() for message in sent[1:] if message["body"]]
    beats = [chunk for chunk in chunks if chunk == ": waiting\n\n"]
    assert len(beats) >= 4
    assert chunks[:4] == beats[:4]
    found = events("".join(chunks))
    if fails:
        assert found[-1]["error"]["code"] == "upstream_failed"
    else:
        shown = text_in(found)
        assert shown == ("Paris." if policy is ALL else "I don't know.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["enforce", "annotate"])
async def test_a_higher_limit_is_lowered_and_told(serve: Serve, mode: str, stream: bool) -> None:
    body = asking(stream=stream)
    async with serve(ALL, mode=mode) as client:
        given = ({}, {"max_tokens": 999})
        usual, more = [await client.post(CHAT, json={**body, **changes}) for changes in given]
        assert more.status_code == 200, more.text
        assert (usual.headers.get(LIMIT_HEADER), more.headers.get(LIMIT_HEADER)) == (None, "8")
        texts = [text_in(found) for found in (events(one.text) if stream else [one.json()] for one in (usual, more))]
        assert texts[0] == texts[1]

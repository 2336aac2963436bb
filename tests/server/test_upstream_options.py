"""In front of another server: the options of a request reach it, and a promise covers only those of the calibration."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from semgrad_guard import Policy, calibrate
from semgrad_guard.guard import binding_of
from semgrad_guard.records import Message
from semgrad_guard.server.scheduler import ForeignText, Scheduler
from semgrad_guard.server.upstream import RemoteServer, Upstream

from .conftest import Serve, asking, bodies

SAID = "a written answer"
CHUNK = '{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":"stop"}]}'
WHOLE = '{"choices":[{"message":{"role":"assistant","content":"%s"},"finish_reason":"stop"}]}'


class Fixed(httpx.AsyncBaseTransport):
    """A server that gives every client the same answer."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if b'"stream":true' in await request.aread():
            return httpx.Response(200, text=f"data: {CHUNK % SAID}\n\ndata: [DONE]\n\n")
        return httpx.Response(200, text=WHOLE % SAID)


async def served_policy(scorer: Scheduler) -> Policy:
    draft = await scorer.judged(ForeignText(text=SAID, conversation=(Message("user", "hello"),)))
    assert draft.prompt is not None
    scores, right = range(60), [True] * 60
    binding, prompts = binding_of(draft.verdict), [draft.prompt] * 60
    made = calibrate(scores, right, alpha=0.1, delta=0.1, binding=binding, prompts=prompts)
    return Policy.from_calibration(made)


@pytest.mark.parametrize("stream", [False, True])
async def test_options_that_the_calibration_did_not_have_are_not_promised(
    serve: Serve, scorer: Scheduler, stream: bool
) -> None:
    upstream = Upstream(RemoteServer("http://other/v1", transport=Fixed()), scorer)
    async with serve(await served_policy(scorer), mode="annotate", upstream=upstream, scheduler=scorer) as client:

        async def record_of(**more: Any) -> dict[str, Any]:
            response = await client.post("/v1/chat/completions", json=asking(stream=stream, **more))
            found = bodies(response)
            record = found[-1]["choices"][0]["logprobs"]["semgrad_guard"]
            assert record["promised"] == (record["details"]["unfamiliar"] == [])
            return record

        for neutral in ({}, {"temperature": 0}, {"user": "me"}, {"top_p": 1}, {"max_tokens": 200}):
            assert (await record_of(**neutral))["promised"], neutral
        for option in ({"temperature": 2}, {"logit_bias": {"5": 100}}, {"min_tokens": 50}, {"lora": "x"}):
            record = await record_of(**option)
            assert not record["promised"], option
            assert any(
                f"the option {name} of the call" in reason
                for name in option
                for reason in record["details"]["unfamiliar"]
            )
        for cut in ({"max_tokens": 1}, {"stop": ["x"]}):
            assert not (await record_of(**cut))["promised"], cut

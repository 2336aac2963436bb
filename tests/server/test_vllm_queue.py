"""The queue in vLLM's server, without vLLM: no caller waits for ever, and the worker learns of each that has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from semgrad_guard import GenerationOptions, HybridGrad, Message
from semgrad_guard.engine.prompts.thoughts import Codec
from semgrad_guard.errors import InputError, PromptTooLongError, ScoringError
from semgrad_guard.server.in_vllm.queue import Round, WorkerQueue
from semgrad_guard.server.in_vllm.scoring_worker import READ, Failed
from semgrad_guard.server.scheduler import AnswerRequest
from tests.random_llama import byte_tokenizer


class Client:
    """vLLM's engine, whose worker cannot be reached at first, and then refuses every request."""

    errored = False

    def __init__(self, unreachable: int) -> None:
        self.sent: list[dict[str, Any]] = []
        self._unreachable = unreachable

    async def collective_rpc(self, _: str, *, args: tuple[str, str]) -> list[str]:
        name, payload = args
        assert name == READ.name
        self.sent.append(json.loads(payload))
        if len(self.sent) <= self._unreachable:
            raise ConnectionError

        def refused(_: Any) -> Any:
            raise PromptTooLongError("the prompt is too long")

        return [READ.answered(payload, refused)]


async def test_names_of_abandoned_answers_are_sent_until_the_worker_has_them() -> None:
    client = Client(unreachable=2)
    queue = WorkerQueue(client, "tiny", HybridGrad(), Codec(byte_tokenizer()), limit=8)
    message = Message(role="user", content="hello")
    request = AnswerRequest(conversation=(message,), options=GenerationOptions(max_tokens=4))
    for error in (InputError, InputError, PromptTooLongError, PromptTooLongError):
        with pytest.raises(error):
            await queue.answer(request)
    names = [tuple(sent["names"]) for sent in client.sent]
    assert [set(sent["abandoned"]) for sent in client.sent[:3]] == [set(), {*names[0]}, {*names[0], *names[1]}]
    assert set(names[2]) <= set(client.sent[3]["abandoned"])
    assert queue.depth == 0


@pytest.mark.parametrize("results", [(), ("one",), ("one", "two", "three")])
async def test_a_reply_with_too_few_or_too_many_results_fails_every_caller(results: Sequence[str]) -> None:
    async def score(sent: list[str]) -> Sequence[str | Failed]:
        return results if len(sent) == 2 else ["later"]

    waiting = Round(score)
    found = await asyncio.wait_for(
        asyncio.gather(waiting.result("a"), waiting.result("b"), return_exceptions=True), timeout=60
    )
    assert [type(one) for one in found] == [ScoringError] * 2
    assert await waiting.result("c") == "later"

"""In front of a server that reports log-probabilities, by sentence: streams leave while the upstream writes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from semgrad_guard import Policy
from semgrad_guard.guard.reported import ReportedScorer
from semgrad_guard.server.remote import RemoteServer
from semgrad_guard.server.scheduler import ReportedQueue
from semgrad_guard.server.upstream import Upstream
from semgrad_guard.settings import CLOSING_LINE

from .conftest import Serve, asking, events

CHAT = "/v1/chat/completions"
SENTENCES = ("Paris is old. ", "Rome is new. ", "Oslo is cold.")
WORDS = ("Paris", " is", " old", ".", " Rome", " is", " new", ".", " Oslo", " is", " cold", ".")
DOUBT = (*(-0.1,) * 4, *(-2.0,) * 4, *(-0.1,) * 4)
POLICY = Policy(threshold=0.5)


class Writing(httpx.AsyncByteStream):
    """A token a chunk; `sent` are those that were taken, `apart`: log-probabilities come in the last chunk."""

    def __init__(self, words: tuple[str, ...], values: tuple[Any, ...], sent: list[str], *, apart: bool) -> None:
        self._words, self._values, self._sent, self._apart = words, values, sent, apart

    async def __aiter__(self) -> AsyncIterator[bytes]:
        entries = [{"token": word, "logprob": value} for word, value in zip(self._words, self._values, strict=True)]
        for word, entry in zip(self._words, entries, strict=True):
            self._sent.append(word)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": word}}
            choice |= {} if self._apart else {"logprobs": {"content": [entry]}}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": "stop"}
        last |= {"logprobs": {"content": entries}} if self._apart else {}
        yield f"data: {json.dumps({'choices': [last]})}\n\n".encode()
        yield b"data: [DONE]\n\n"


def upstream(
    scores: ReportedQueue,
    values: tuple[Any, ...],
    sent: list[str],
    *,
    words: tuple[str, ...] = WORDS,
    apart: bool = False,
) -> Upstream:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Writing(words, values, sent, apart=apart))

    server = RemoteServer("http://other/v1", transport=httpx.MockTransport(answer))
    return Upstream(server, scores)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("on_doubt", "values", "early", "rest"),
    [
        ("stop", DOUBT, [SENTENCES[0]], [CLOSING_LINE]),
        ("drop", DOUBT, [SENTENCES[0]], [SENTENCES[2]]),
        ("stop", (*DOUBT[:4], -0.1, None, *DOUBT[6:]), [SENTENCES[0]], [CLOSING_LINE]),
        ("drop", (*DOUBT[:4], -0.1, float("nan"), *DOUBT[6:]), [SENTENCES[0]], [SENTENCES[2]]),
        ("drop", (None,) * 12, [], ["I don't know."]),
    ],
)
async def test_sentences_leave_while_the_upstream_writes(
    serve: Serve, on_doubt: Any, values: tuple[Any, ...], early: list[str], rest: list[str], apart: bool
) -> None:
    scores, sent = ReportedQueue(ReportedScorer("tiny", by_sentence=on_doubt)), list[str]()
    other = upstream(scores, values, sent, apart=apart)
    async with serve(POLICY, upstream=other, scheduler=scores, by_sentence=on_doubt) as client:
        response = await client.post(CHAT, json=asking(stream=True))
    chunks = events(response.text)
    pieces = [text for chunk in chunks for one in chunk["choices"] if (text := one["delta"].get("content"))]
    assert pieces == [*early, *rest]  # in this form also where they leave with the end of the answer
    actions = [chunk["semgrad_guard_sentence"]["action"] for chunk in chunks if "semgrad_guard_sentence" in chunk]
    assert len(actions) == sum(piece in SENTENCES for piece in pieces)
    assert "Rome" not in response.text
    assert len(sent) == (10 if on_doubt == "stop" and not apart else len(WORDS))


async def test_a_token_across_a_border_counts_for_the_later_sentence(serve: Serve) -> None:
    """It begins in a doubtful sentence, which it would make surer."""
    words, values = ("Paris is old.", " Rome is new", ". Oslo", " is cold."), (-0.1, -0.8, -1e-4, -0.1)
    scores = ReportedQueue(ReportedScorer("tiny", by_sentence="stop"))
    other = upstream(scores, values, [], words=words)
    async with serve(POLICY, upstream=other, scheduler=scores, by_sentence="stop") as client:
        chunks = events((await client.post(CHAT, json=asking(stream=True))).text)
    pieces = [text for chunk in chunks for one in chunk["choices"] if (text := one["delta"].get("content"))]
    assert pieces == [SENTENCES[0], CLOSING_LINE]

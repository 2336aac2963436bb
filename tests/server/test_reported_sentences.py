"""In front of a server that reports log-probabilities, by sentence: streams leave while the upstream writes."""

from __future__ import annotations

from typing import Any

import pytest

from semgrad_guard import Policy
from semgrad_guard.settings import CLOSING_LINE

from .conftest import Serve, asking, events
from .others import Other, behind, tokens

CHAT = "/v1/chat/completions"
SENTENCES = ("Paris is old. ", "Rome is new. ", "Oslo is cold.")
WORDS = ("Paris", " is", " old", ".", " Rome", " is", " new", ".", " Oslo", " is", " cold", ".")
DOUBT = (*(-0.1,) * 4, *(-2.0,) * 4, *(-0.1,) * 4)
POLICY = Policy(threshold=0.5)


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
    other = Other(**tokens([*zip(WORDS, values, strict=True)]), apart=apart)
    async with serve(POLICY, by_sentence=on_doubt, **behind(other, by_sentence=on_doubt)) as client:
        response = await client.post(CHAT, json=asking(stream=True))
    chunks = events(response.text)
    pieces = [text for chunk in chunks for one in chunk["choices"] if (text := one["delta"].get("content"))]
    assert pieces == [*early, *rest]  # in this form also where they leave with the end of the answer
    actions = [chunk["semgrad_guard_sentence"]["action"] for chunk in chunks if "semgrad_guard_sentence" in chunk]
    assert len(actions) == sum(piece in SENTENCES for piece in pieces)
    assert "Rome" not in response.text
    assert other.sent == (10 if on_doubt == "stop" and not apart else len(WORDS))


async def test_a_token_across_a_border_counts_for_the_later_sentence(serve: Serve) -> None:
    """It begins in a doubtful sentence, which it would make surer."""
    words, values = ("Paris is old.", " Rome is new", ". Oslo", " is cold."), (-0.1, -0.8, -1e-4, -0.1)
    given = behind(Other(**tokens([*zip(words, values, strict=True)])), by_sentence="stop")
    async with serve(POLICY, by_sentence="stop", **given) as client:
        chunks = events((await client.post(CHAT, json=asking(stream=True))).text)
    pieces = [text for chunk in chunks for one in chunk["choices"] if (text := one["delta"].get("content"))]
    assert pieces == [SENTENCES[0], CLOSING_LINE]

"""Non-interference: what must not matter changes nothing. That is what stands in withheld sentences, and fields of a
request that name no decision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semgrad_guard import Policy

from .conftest import ALL, NONE, Serve, asking
from .others import Other, behind, tokens
from .test_other_protocols import CHAT, RESPONSES, TEXT, prompting, responding

POLICY = Policy(threshold=0.5)
SURE, DOUBT = -0.1, -2.0
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# What stands in withheld sentences.

WORD = st.text("bcdfgh", min_size=4, max_size=7)  # "A." would be an initial, which ends no sentence
SENTENCE = st.lists(WORD, min_size=1, max_size=6).map(
    lambda words: [" " + words[0].title(), *(" " + word for word in words[1:]), "."]
)
HIDDEN = st.lists(SENTENCE, min_size=1, max_size=3).map(lambda sentences: [token for one in sentences for token in one])
"""Sentences that are withheld, as tokens."""
MORE: Sequence[Mapping[str, Any]] = (
    {},
    {"logprobs": True, "top_logprobs": 2},
    {"max_tokens": 3},
    {"max_tokens": 200},
    {"stop": ["cold"]},
    {"stop": ["zz"], "stream_options": {"include_usage": True}},
)


def draft(hidden: Sequence[str], *, place: int) -> list[tuple[str, float]]:
    """Two sure sentences, and the doubtful ones at a place among them."""
    sure = [["Paris", " is", " old", "."], [" Oslo", " is", " cold", "."]]
    parts = [[(token, SURE) for token in one] for one in sure]
    parts.insert(place, [(token, DOUBT) for token in hidden])
    tokens = [token for part in parts for token in part]
    return [(tokens[0][0].lstrip(), tokens[0][1]), *tokens[1:]]


def alike(response: httpx.Response) -> tuple[Any, ...]:
    """A response without the ids and times of the request."""
    text = re.sub(r"(chatcmpl-|cmpl-|resp_|msg_|dec_)[0-9a-f]+", r"\1", response.text)
    text = re.sub(r'"(created|created_at|completed_at|scoring_ms)": ?[0-9.]+', "", text)
    return response.status_code, text, sorted(response.headers.items() - {("date", response.headers.get("date"))})


@SETTINGS
@given(
    hidden=st.lists(HIDDEN, min_size=2, max_size=2),
    finish=st.lists(st.sampled_from(["stop", "length"]), min_size=2, max_size=2),
    place=st.integers(0, 2),
    on_doubt=st.sampled_from(["stop", "drop"]),
    more=st.sampled_from(MORE),
    stream=st.booleans(),
    protocol=st.sampled_from([CHAT, TEXT, RESPONSES]),
)
async def test_nothing_of_withheld_sentences_is_in_a_response(
    serve: Serve,
    hidden: list[list[str]],
    finish: list[str],
    place: int,
    on_doubt: Any,
    more: Mapping[str, Any],
    stream: bool,
    protocol: str,
) -> None:
    """Their number, length and words, and why the whole draft ended, differ in no text, count, chunk or record."""
    found = []
    body = {CHAT: asking, TEXT: prompting, RESPONSES: responding}[protocol](stream=stream)
    if protocol == CHAT:
        body |= {name: value for name, value in more.items() if name != "stream_options" or stream}
    for own, end in zip(hidden, finish, strict=True):
        written = draft(own, place=place)
        usage = {"prompt_tokens": 4, "completion_tokens": len(written), "total_tokens": 4 + len(written)}
        other = Other(**tokens(written), finish=end, usage=usage)
        options = behind(other, by_sentence=on_doubt)
        async with serve(POLICY, by_sentence=on_doubt, **options) as client:
            found.append(alike(await client.post(protocol, json=body)))
    assert found[0] == found[1]


# Fields of a request that change no answer.

HARMLESS = {
    "user": st.text(max_size=8),
    "metadata": st.dictionaries(st.sampled_from(["kind", "sampling", "threshold"]), WORD, max_size=2),
    "store": st.booleans(),
    "service_tier": st.sampled_from(["auto", "flex"]),
    "safety_identifier": WORD,
    "prompt_cache_key": WORD,
    "parallel_tool_calls": st.booleans(),
    "semgrad_guard": st.just({}),
    "frequency_penalty": st.just(0),
    "logit_bias": st.just({}),
}
DECISION = (
    "action",
    "promised",
    "uncertainty",
    "confidence",
    "threshold",
    "status",
    "digest",
)
OF_POLICY = ("enforced", "calibration_id")


@SETTINGS
@given(more=st.fixed_dictionaries({}, optional=HARMLESS), policy=st.sampled_from([ALL, NONE]))
async def test_fields_that_change_no_answer_change_no_decision(
    serve: Serve, more: dict[str, Any], policy: Policy
) -> None:
    async with serve(policy) as client:
        plain, other = [await client.post(CHAT, json=asking(**one)) for one in ({}, more)]
    bodies = [one.json() for one in (plain, other)]
    assert bodies[0]["choices"][0]["message"] == bodies[1]["choices"][0]["message"]
    records = [one["semgrad_guard"] for one in bodies]
    assert [records[0][name] for name in DECISION] == [records[1][name] for name in DECISION]
    details = [one["details"] for one in records]
    assert [details[0][name] for name in OF_POLICY] == [details[1][name] for name in OF_POLICY]

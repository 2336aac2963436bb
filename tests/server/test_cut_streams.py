"""A client's cuts in a stream by sentence: its text is that of the whole answer, and nothing behind a cut leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.server.app import make_app
from semgrad_guard.server.service import ServedModel, Service
from tests.fixed_model import FixedModel

from .conftest import ALL, asking, events

CHAT = "/v1/chat/completions"
OPTIONS = GenerationOptions(max_tokens=120)
WRITTEN = "Tea is old.\n\nCafé crème – 茶 is hot! So is 🫖.  Milk: good. Go."


class Written(FixedModel):
    """Its grammar allows `WRITTEN` alone."""

    def fitted(self, options: GenerationOptions | None, *prompts: Prompt) -> GenerationOptions:
        text = WRITTEN.replace("\n", "\\n")
        return replace(super().fitted(options, *prompts), max_tokens=OPTIONS.max_tokens, grammar=f'start: "{text}"')


places = st.tuples(st.integers(0, len(WRITTEN) - 1), st.integers(1, 12)).map(lambda at: WRITTEN[at[0] : at[0] + at[1]])
"""Stop strings that the answer holds, as far as it is delivered."""
stops = st.lists(st.one_of(places, st.sampled_from(["zz", " \n\n", "\n\n\nA", "!x", ".  N", "\n\nAsk"])), max_size=3)
limits = st.one_of(st.none(), st.integers(1, 70))


@pytest.fixture(scope="module")
def written(language_model: LanguageModel) -> LanguageModel:
    return Written.like(language_model)


@pytest.fixture(scope="module")
def thresholds(written: LanguageModel) -> list[float]:
    verdict = Guard(written, ALL, by="sentence")("hello")
    assert verdict.text == WRITTEN
    own = [sentence.uncertainty or 0.0 for sentence in verdict.sentences]
    assert len(own) == 5
    return [score * 1.001 for score in sorted(own)]


async def both(served: ServedModel, **cuts: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    transport = httpx.ASGITransport(make_app(Service([served])))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        whole = await client.post(CHAT, json=asking(**cuts))
        stream = await client.post(CHAT, json=asking(stream=True, stream_options={"include_usage": True}, **cuts))
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
    return whole.json(), events(stream.text)


def test_a_stream_is_the_whole_answer(
    make_served: Callable[..., ServedModel], written: LanguageModel, thresholds: list[float]
) -> None:
    made = {
        on_doubt: [
            make_served(Policy(threshold=one, on_cut="score"), model=written, options=OPTIONS, by_sentence=on_doubt)
            for one in (thresholds[0] / 2, *thresholds)
        ]
        for on_doubt in ("stop", "drop")
    }

    @given(on_doubt=st.sampled_from(list(made)), number=st.integers(0, len(thresholds)), stop=stops, limit=limits)
    @example(on_doubt="stop", number=len(thresholds), stop=["\n\nCa"], limit=None)  # on both sides of a border
    @example(on_doubt="drop", number=len(thresholds), stop=[], limit=5)
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    def check(on_doubt: str, number: int, stop: list[str], limit: int | None) -> None:
        cuts = {"stop": stop or None, "max_tokens": limit}
        whole, chunks = asyncio.run(both(made[on_doubt][number], **cuts))
        choice, record, last = whole["choices"][0], whole["semgrad_guard"], chunks[-2]
        deltas = [one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"]]
        assert "".join(deltas) == choice["message"]["content"]
        assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
        own = last["semgrad_guard"]
        for name in ("digest", "action", "promised", "threshold"):
            assert own[name] == record[name], name
        for name in ("familiar", "unfamiliar"):
            assert own["details"][name] == record["details"][name], name
        assert chunks[-1]["usage"] == whole["usage"]
        ends = [(one["action"], one["start"], one["end"]) for one in record["sentences"]]
        seen = [(one["action"], one["start"], one["end"]) for one in own["sentences"]]
        assert seen == (ends[: len(seen)] if on_doubt == "stop" else ends)
        for chunk in chunks:
            if sentence := chunk.get("semgrad_guard_sentence"):
                assert sentence["end"] <= len(choice["message"]["content"])

    check()

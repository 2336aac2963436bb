"""Modes of `GuardedQueryEngine`: what is delivered, when, and where its verdict is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, StreamingResponse
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.query_engine import TransformQueryEngine

from llama_index_semgrad_guard import GuardedQueryEngine, LowConfidenceError, SemGradLLM, get_verdict
from semgrad_guard import Policy
from semgrad_guard.errors import InputError
from tests.pairwise import pairwise

from .conftest import Heard
from .scripted import BOTH, WAY
from .test_query_engine import MODES, PASS, QUERY, STOP, Structured, ask, streams

Maker = Callable[..., BaseQueryEngine]
WAYS = ("sync", "async", "stream", "async stream")


@pairwise(where=streams, mode=MODES, asynchronous=BOTH, streaming=BOTH)
def test_annotating_changes_nothing_but_the_metadata(
    mode: str, asynchronous: bool, streaming: bool, make_engine: Maker
) -> None:
    way = WAY[asynchronous, streaming]
    inner = make_engine(response_mode=mode, streaming="stream" in way)
    guarded = GuardedQueryEngine(inner, STOP, mode="annotate", escalate_to=lambda _: "elsewhere")
    response = ask(guarded, way)
    assert response.response == ask(inner, way).response
    record = response.metadata["semgrad_guard"]
    assert (record["status"], record["action"], record["enforced"]) == ("scored", "escalate", False)
    enforced = ask(GuardedQueryEngine(inner, STOP), way).metadata["semgrad_guard"]
    assert record["uncertainty"] == pytest.approx(enforced["uncertainty"])


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "simple_summarize", "generation"])
def test_an_annotated_stream_is_live_and_its_record_comes_with_the_end(mode: str, make_engine: Maker) -> None:
    inner = make_engine(response_mode=mode, streaming=True)
    response = GuardedQueryEngine(inner, STOP, mode="annotate").query(QUERY)
    assert isinstance(response, StreamingResponse)
    first = next(response.response_gen)
    assert "semgrad_guard" not in response.metadata
    text = first + "".join(response.response_gen)
    assert text == ask(inner, "stream").response
    assert response.metadata["semgrad_guard"]["action"] == "abstain"


async def test_an_annotated_async_stream_is_live(make_engine: Maker) -> None:
    response = await GuardedQueryEngine(make_engine(streaming=True), STOP, mode="annotate").aquery(QUERY)
    assert isinstance(response, AsyncStreamingResponse)
    pieces = response.async_response_gen()
    await anext(pieces)
    assert "semgrad_guard" not in response.metadata
    assert len([piece async for piece in pieces]) > 0
    verdict = get_verdict(response)
    assert verdict is not None
    assert verdict.text == response.response_txt


async def test_streams_that_are_read_in_turn_keep_their_own_scores(make_engine: Maker) -> None:
    """Both streams are lazy, and the context in which they were made is gone when they are read."""
    guarded = GuardedQueryEngine(make_engine(streaming=True, response_mode="refine"), STOP, mode="annotate")
    queries = [QUERY, "Where is Oslo?"]
    alone = [ask_for(guarded.query(query)) for query in queries]
    first, second = [guarded.query(query) for query in queries]
    for pieces in (iter(first.response_gen), iter(second.response_gen)):
        next(pieces)
    assert [ask_for(first), ask_for(second)] == pytest.approx(alone)
    third, fourth = [await guarded.aquery(query) for query in queries]
    await asyncio.gather(third.get_response(), fourth.get_response())
    scores = [response.metadata["semgrad_guard"]["uncertainty"] for response in (third, fourth)]
    assert scores == pytest.approx(alone)
    assert alone[0] != alone[1]


def ask_for(response: Any) -> float:
    """The uncertainty of a streamed response."""
    response.get_response()
    return response.metadata["semgrad_guard"]["uncertainty"]


@pytest.mark.parametrize("way", WAYS)
def test_raising_gives_the_verdict_and_a_kept_draft(way: str, make_engine: Maker) -> None:
    inner = make_engine(streaming="stream" in way)
    with pytest.raises(LowConfidenceError, match="above the threshold") as raised:
        ask(GuardedQueryEngine(inner, STOP, mode="raise", keep_draft=True, escalate_to=lambda _: "no"), way)
    verdict = raised.value.verdict
    assert (verdict.action, verdict.text) == ("escalate", "")
    assert verdict.draft == ask(inner, way).response
    passed = ask(GuardedQueryEngine(inner, PASS, mode="raise"), way)
    assert passed.metadata["semgrad_guard"]["enforced"] is True


@pytest.mark.parametrize("way", WAYS)
def test_observing_reports_to_the_event_handlers_only(way: str, make_engine: Maker, recorder: Heard) -> None:
    inner = make_engine(streaming="stream" in way)
    response = ask(GuardedQueryEngine(inner, STOP, mode="observe"), way)
    assert "semgrad_guard" not in response.metadata
    (event,) = recorder.verdicts
    assert (event.source, event.record["action"], event.record["enforced"]) == ("query_engine", "abstain", False)


def test_structures_are_annotated_like_texts(llm: SemGradLLM) -> None:
    response = GuardedQueryEngine(Structured(llm=llm), STOP, mode="annotate").query(QUERY)
    assert isinstance(response, PydanticResponse)
    assert response.metadata["semgrad_guard"]["action"] == "abstain"


def test_what_no_model_wrote_is_unscored_though_a_model_was_asked(make_engine: Maker, llm: SemGradLLM) -> None:
    """A step before retrieval rewrites the query with the model, then nothing is found."""

    class Rewritten(BaseQueryTransform):
        def _get_prompts(self) -> Any:
            return {}

        def _update_prompts(self, prompts: Any) -> None: ...

        def _run(self, query_bundle: Any, metadata: Any) -> Any:
            return type(query_bundle)(llm.complete(query_bundle.query_str).text or "?")

    engine = TransformQueryEngine(make_engine(passages=()), Rewritten())
    response = GuardedQueryEngine(engine, PASS).query(QUERY)
    assert (str(response), response.metadata["semgrad_guard"]["status"]) == ("I don't know.", "unscored")


def test_modes_and_policies_are_checked_at_once(make_engine: Maker) -> None:
    with pytest.raises(InputError, match="mode must be one of 'enforce', 'annotate', 'observe', 'raise', not 'loud'"):
        GuardedQueryEngine(make_engine(), PASS, mode="loud")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs a policy"):
        GuardedQueryEngine(make_engine(), None)  # type: ignore[arg-type]
    unscored = GuardedQueryEngine(make_engine(passages=()), Policy(threshold=1e308), mode="raise")
    with pytest.raises(LowConfidenceError, match="no SemGradLLM wrote this answer"):
        unscored.query(QUERY)

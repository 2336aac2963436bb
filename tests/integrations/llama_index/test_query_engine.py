"""`GuardedQueryEngine`: response modes x sync, async and streaming, and what happens to each draft."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, Response, StreamingResponse
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import CustomQueryEngine
from pydantic import BaseModel

from llama_index_semgrad_guard import GuardedQueryEngine, SemGradLLM, get_verdict
from llama_index_semgrad_guard.turn import Turn
from semgrad_guard import Policy
from semgrad_guard.errors import InputError, LowConfidenceError
from tests.pairwise import in_turn, pairwise

from .scripted import BOTH, WAY

MODES = ("compact", "refine", "tree_summarize", "simple_summarize", "generation", "accumulate", "compact_accumulate")
PASS, STOP = Policy(threshold=1e308), Policy(threshold=-1e308)
QUERY = "Where is Paris?"
Maker = Callable[..., BaseQueryEngine]


def ask(engine: BaseQueryEngine, way: str) -> Response:
    """The response of an engine as a whole, asked synchronously, asynchronously or by a stream of either kind."""
    if way.startswith("async"):
        return asyncio.run(_aask(engine))
    response = engine.query(QUERY)
    assert isinstance(response, Response if way == "sync" else StreamingResponse)
    return response.get_response() if isinstance(response, StreamingResponse) else response


async def _aask(engine: BaseQueryEngine) -> Response:
    response = await engine.aquery(QUERY)
    return await response.get_response() if isinstance(response, AsyncStreamingResponse) else response


def streams(mode: str, asynchronous: bool, streaming: bool) -> bool:
    return not ("accumulate" in mode and streaming)  # LlamaIndex cannot stream these


@pairwise(where=streams, mode=MODES, asynchronous=BOTH, streaming=BOTH)
def test_every_mode_in_every_way(mode: str, asynchronous: bool, streaming: bool, make_engine: Maker) -> None:
    way = WAY[asynchronous, streaming]
    inner = make_engine(response_mode=mode, streaming="stream" in way)
    plain = ask(inner, way)
    passed, stopped = ask(GuardedQueryEngine(inner, PASS), way), ask(GuardedQueryEngine(inner, STOP), way)
    assert passed.response == plain.response
    assert stopped.response == "I don't know."
    assert len(stopped.source_nodes) == len(plain.source_nodes)
    records = [response.metadata["semgrad_guard"] for response in (passed, stopped)]
    assert [record["action"] for record in records] == ["answer", "abstain"]
    assert records[0]["uncertainty"] == pytest.approx(records[1]["uncertainty"])
    assert records[1]["draft"] is None


def test_aggregates(make_engine: Maker) -> None:
    inner = make_engine(response_mode="refine")
    with Turn().open() as collector:
        inner.query(QUERY)
    scores = [call.verdict.uncertainty for call in collector.calls]
    assert len(set(scores)) == 2

    def score(engine: BaseQueryEngine, aggregate: Any = None) -> float:
        return (
            GuardedQueryEngine(engine, PASS, aggregate=aggregate).query(QUERY).metadata["semgrad_guard"]["uncertainty"]
        )

    assert score(inner) == pytest.approx(scores[-1])
    assert score(inner, "max") == pytest.approx(max(scores))
    assert score(inner, "mean") == pytest.approx(sum(scores) / 2)
    side_by_side = make_engine(response_mode="accumulate")
    assert score(side_by_side) == score(side_by_side, "max")
    with pytest.raises(InputError, match="aggregate must be"):
        score(inner, "median")


@pytest.mark.parametrize("mode", ["tree_summarize", "accumulate"])
def test_use_async_keeps_the_calls_together(mode: str, make_engine: Maker) -> None:
    response = GuardedQueryEngine(make_engine(response_mode=mode, use_async=True), PASS).query(QUERY)
    assert response.metadata["semgrad_guard"]["status"] == "scored"


async def test_eight_concurrent_queries_keep_their_scores(make_engine: Maker) -> None:
    guarded = GuardedQueryEngine(make_engine(), PASS)
    queries = [f"{QUERY} {i}" for i in range(8)]
    alone = [guarded.query(query).metadata["semgrad_guard"]["uncertainty"] for query in queries]
    together = await asyncio.gather(*map(guarded.aquery, queries))
    assert len(set(alone)) == 8
    assert [r.metadata["semgrad_guard"]["uncertainty"] for r in together] == pytest.approx(alone)


@pytest.mark.parametrize("way", ["sync", "async", "stream", "async stream"])
def test_nothing_retrieved_is_a_case_of_its_own(way: str, make_engine: Maker) -> None:
    inner = make_engine(passages=(), streaming="stream" in way)
    for on_unscored, text in (("abstain", "I don't know."), ("answer", "Empty Response"), ("escalate", "elsewhere")):
        policy = Policy(threshold=1e308, on_unscored=on_unscored)  # type: ignore[arg-type]
        engine = GuardedQueryEngine(inner, policy, escalate_to=lambda _: "elsewhere")
        response = asyncio.run(_aask(engine)) if "async" in way else _whole(engine.query(QUERY))
        assert str(response) == text
        record = response.metadata["semgrad_guard"]
        assert (record["status"], record["action"], record["promised"]) == ("unscored", on_unscored, False)


def _whole(response: Any) -> Any:
    return response.get_response() if isinstance(response, StreamingResponse) else response


def test_another_llm_is_unscored_and_not_let_through(make_engine: Maker) -> None:
    engine = GuardedQueryEngine(make_engine(), STOP)
    engine._engine._response_synthesizer._llm = MockLLM()  # type: ignore[attr-defined]
    assert str(engine.query(QUERY)) == "I don't know."


@in_turn(kind=["callable", "coroutine", "llm", "engine", "guarded"], way=["sync", "async", "stream", "async stream"])
def test_escalation(kind: str, way: str, make_engine: Maker, llm: SemGradLLM) -> None:
    if kind == "coroutine" and "async" not in way:
        return

    async def elsewhere(_: str) -> str:
        return "elsewhere"

    second = make_engine(response_mode="generation", streaming="stream" in way)
    targets: dict[str, Any] = {
        "callable": lambda _: "elsewhere",
        "coroutine": elsewhere,
        "llm": llm,
        "engine": second,
        "guarded": GuardedQueryEngine(second, PASS),
    }
    guarded = GuardedQueryEngine(make_engine(streaming="stream" in way), STOP, escalate_to=targets[kind])
    response = ask(guarded, way)
    record = response.metadata["semgrad_guard"]
    assert record["action"] == "escalate"
    assert record["uncertainty"] is not None
    expected = "elsewhere" if kind in {"callable", "coroutine"} else llm.complete(QUERY).text
    assert response.response == expected
    assert record["escalated"]["status"] == ("scored" if kind in {"llm", "guarded"} else "unscored")
    verdict = get_verdict(response)
    assert verdict is not None
    assert verdict.escalated_from is not None
    assert verdict.status == record["escalated"]["status"]


def test_a_sync_query_names_an_async_target(make_engine: Maker) -> None:
    async def elsewhere(_: str) -> str:
        return "elsewhere"

    coroutine = elsewhere(QUERY)
    with pytest.raises(InputError, match="use aquery"):
        GuardedQueryEngine(make_engine(), STOP, escalate_to=lambda _: coroutine).query(QUERY)
    coroutine.close()


class City(BaseModel):
    name: str


class Structured(CustomQueryEngine):
    """Answers with a structure, made of a model call."""

    llm: Any

    def custom_query(self, query_str: str) -> Any:
        return PydanticResponse(City(name=self.llm.complete(query_str).text), metadata={})


def test_a_structured_response_is_never_replaced_by_text(llm: SemGradLLM) -> None:
    inner, second = Structured(llm=llm), Structured(llm=MockLLM())
    passed = GuardedQueryEngine(inner, PASS).query(QUERY)
    assert isinstance(passed, PydanticResponse)
    assert passed.metadata["semgrad_guard"]["status"] == "scored"
    with pytest.raises(LowConfidenceError, match=r"above the threshold.*Text cannot stand in") as raised:
        GuardedQueryEngine(inner, STOP).query(QUERY)
    assert (raised.value.verdict.text, raised.value.verdict.draft) == ("", None)
    with pytest.raises(LowConfidenceError, match="must answer with a structure"):
        GuardedQueryEngine(inner, STOP, escalate_to=lambda _: "text").query(QUERY)
    moved = GuardedQueryEngine(inner, STOP, escalate_to=second).query(QUERY)
    assert isinstance(moved, PydanticResponse)
    assert moved.response == City(name=QUERY)


def test_drafts_are_kept_on_request_and_guards_are_not_stacked(make_engine: Maker) -> None:
    inner = make_engine()
    guarded = GuardedQueryEngine(inner, STOP, keep_draft=True, abstain_message="No.")
    response = guarded.query(QUERY)
    assert str(response) == "No."
    assert response.metadata["semgrad_guard"]["draft"] == str(inner.query(QUERY))
    with pytest.raises(InputError, match="guarded already"):
        GuardedQueryEngine(guarded, PASS)
    assert any(name.startswith("engine:") for name in guarded.get_prompts())

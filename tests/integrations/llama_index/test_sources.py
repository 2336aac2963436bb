"""What an answer was written from: sub-answers behind guards of their own, and passages that the model wrote."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from llama_index.core import ComposableGraph, Document, Settings, SummaryIndex
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index_semgrad_guard import GuardedQueryEngine, GuardedReActAgent
from semgrad_guard import GenerationOptions, Policy
from semgrad_guard.guard import ABSTAIN_MESSAGE
from tests.pairwise import pairwise

from .conftest import PASSAGES, Passages
from .test_authorship import LOOSE, WIDER, Make, Own, acc, by_prompt, engine, record, saying, sub_questions
from .test_chat_engine import say

__all__ = ["saying"]
POLICY = Policy(threshold=0.1)
DOUBTFUL = by_prompt(
    ("Sub question", ("In all: X", 0.01)), ("Rephrase", ("In all: X", 0.01)), otherwise=("It is unsure", 0.9)
)
GUARDS: dict[str, dict[str, Any]] = {
    "annotate": {"policy": POLICY, "mode": "annotate"},
    "observe": {"policy": POLICY, "mode": "observe"},
    "looser": {"policy": LOOSE},
    "twice": {"policy": LOOSE},
}


def guarded(kind: str, inner: BaseQueryEngine) -> BaseQueryEngine:
    within = GuardedQueryEngine(inner, **GUARDS[kind])
    return Own(do=lambda query: str(within.query(query))) if kind == "twice" else within


def rephrased(llm: Any, inner: BaseQueryEngine) -> BaseQueryEngine:
    return Own(do=lambda query: llm.complete("Rephrase: " + str(inner.query(query)).upper()).text)


def delegated(llm: Any, inner: BaseQueryEngine) -> BaseQueryEngine:
    return Own(do=lambda query: engine(llm).query(f"Rephrase: {inner.query(query)}"))


@pairwise(composing=[sub_questions, rephrased], kind=GUARDS, way=["sync", "async"])
def test_answers_behind_a_guard_count(composing: Any, kind: str, way: str, saying: Make) -> None:
    llm = saying(DOUBTFUL)
    outer = composing(llm, guarded(kind, engine(llm)))
    found = record(outer, way)
    if kind == "twice":  # the text was made anew by code of one's own
        assert found["status"] == "unscored" or found["uncertainty"] == 0.9
    else:
        assert (found["uncertainty"], found["settings"]["aggregate"]) == (0.9, "max")


@pytest.mark.parametrize("kind", ["annotate", "observe"])
def test_streams_behind_a_guard_count(kind: str, saying: Make) -> None:
    llm = saying(DOUBTFUL)
    assert record(sub_questions(llm, guarded(kind, engine(llm, streaming=True))))["uncertainty"] == 0.9
    assert record(sub_questions(llm, engine(llm, streaming=True)))["uncertainty"] == 0.9


def test_what_a_guard_within_keeps_back_is_no_source(saying: Make) -> None:
    llm = saying(DOUBTFUL)
    for inner in (GuardedQueryEngine(engine(llm), POLICY), GuardedQueryEngine(acc(llm), POLICY)):
        assert record(sub_questions(llm, inner))["uncertainty"] == 0.01
        assert record(rephrased(llm, inner), aggregate="max")["uncertainty"] == 0.01
    sure = saying(by_prompt(("Sub question", ("In all: X", 0.01)), otherwise=("It is sure", 0.05)))
    escalating = GuardedQueryEngine(engine(llm), POLICY, escalate_to=engine(sure))
    assert record(sub_questions(llm, escalating))["uncertainty"] == 0.05


def test_an_engine_that_was_asked_in_vain_is_no_source(saying: Make) -> None:
    llm = saying(by_prompt(("again", ("It is X", 0.01)), otherwise=("It is unsure", 0.9)))
    retrying = Own(do=lambda query: (engine(llm).query(query), engine(llm).query("again"))[1])
    assert record(retrying)["uncertainty"] == 0.01


def test_graphs_of_indices(saying: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = saying(by_prompt(("unsure", ("In all: X", 0.01)), otherwise=("It is unsure", 0.9)))
    monkeypatch.setattr(Settings, "_llm", llm)
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(embed_dim=2))
    indices = [SummaryIndex.from_documents([Document(text=text)]) for text in PASSAGES]
    graph = ComposableGraph.from_indices(SummaryIndex, indices, index_summaries=["a", "b"])
    assert record(graph.as_query_engine())["uncertainty"] == 0.9


async def test_agents_and_threads_are_sources_too(saying: Make) -> None:
    llm = saying(by_prompt(("Rephrase", ("In all: X", 0.01)), otherwise=("It is quite unsure in the end", 0.9)))
    real = llm.language_model

    def prompted(conversation: Any) -> Any:  # the scripted model's prompts are all alike
        generation = scripted(conversation)
        shown = conversation if isinstance(conversation, str) else conversation[-1].content
        return replace(generation, prompt=real.generate(shown, GenerationOptions(max_tokens=1)).prompt)

    scripted = llm._scripted
    object.__setattr__(llm, "_scripted", prompted)

    async def agents(options: dict[str, Any]) -> str:
        kind = GuardedReActAgent if options else ReActAgent
        return str(await kind(llm=llm, streaming=False, **options).run("Where?"))

    async def threads(options: dict[str, Any]) -> str:
        inner: Any = GuardedQueryEngine(engine(llm), **options) if options else engine(llm)
        with ThreadPoolExecutor(1) as pool:
            return str(pool.submit(inner.query, "Where?").result())

    class Rephrasing(Own):
        async def acustom_query(self, query_str: str) -> str:
            return llm.complete("Rephrase: " + await self.do(query_str)).text

    for source in (agents, threads):
        for options in ({}, {"policy": POLICY, "mode": "annotate"}, {"policy": LOOSE}, {"policy": POLICY}):
            rephrasing = Rephrasing(do=lambda _query, source=source, options=options: source(options))
            response: Any = await GuardedQueryEngine(rephrasing, LOOSE).aquery("Where?")
            withheld = options == {"policy": POLICY}
            assert response.metadata["semgrad_guard"]["uncertainty"] == (0.01 if withheld else 0.9)


class Writing(Passages):
    """Retrieves what the model writes: in this thread, or in a pool's."""

    def __init__(self, llm: Any, change: Any = str, *, pool: bool = False, beside: tuple[str, ...] = ()) -> None:
        super().__init__(*beside)
        self._llm, self._change, self._pool = llm, change, pool

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        text = self._threaded() if self._pool else self._llm.complete("write a passage").text
        written = NodeWithScore(node=TextNode(text=self._change(text)), score=1.0)
        return [written, *super()._retrieve(query_bundle)]

    def _threaded(self) -> str:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._llm.complete, "write a passage").result().text


class Compressing(BaseNodePostprocessor):
    """Has the model shorten passages."""

    llm: Any

    def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
        text = self.llm.complete("write a passage").text
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for _ in nodes]


SECRET = "Zanzibar is the one in doubt"
WRITES = by_prompt(("write a passage", (SECRET, 0.9)), otherwise=("It is X", 0.01))


@pairwise(
    change=[str, str.upper, lambda text: f"Summary: {text}.", lambda text: text[:21]], pool=[False, True], way=WIDER
)
def test_passages_that_a_retriever_has_written_count(way: str, pool: bool, change: Any, saying: Make) -> None:
    llm = saying(WRITES)
    inner: Any = engine(llm, streaming="stream" in way)
    inner._retriever = Writing(llm, change, pool=pool, beside=PASSAGES)
    assert record(inner, way)["uncertainty"] == 0.9
    withheld = GuardedQueryEngine(inner, POLICY).query("Where?")
    assert "zanzibar" not in repr(withheld).lower()
    assert [node.text for node in withheld.source_nodes] == ([] if not pool else list(PASSAGES))


def test_passages_that_a_postprocessor_has_written_count(saying: Make) -> None:
    llm = saying(WRITES)
    assert record(engine(llm, node_postprocessors=[Compressing(llm=llm)]))["uncertainty"] == 0.9


async def test_in_chats_too(saying: Make) -> None:
    from llama_index.core.chat_engine import ContextChatEngine

    from llama_index_semgrad_guard import GuardedChatEngine

    llm = saying(WRITES)
    chat = ContextChatEngine.from_defaults(Writing(llm), llm=llm)
    text, response = await say(GuardedChatEngine(chat, POLICY), "sync", "Where?")
    assert (text, response.metadata["semgrad_guard"]["uncertainty"]) == (ABSTAIN_MESSAGE, 0.9)


def test_what_another_model_says_in_a_thread_is_no_passage(saying: Make) -> None:
    llm, other = saying(WRITES), MockLLM()
    inner: Any = engine(llm)
    inner._retriever = Writing(other, pool=True)
    withheld = GuardedQueryEngine(inner, Policy(threshold=0)).query("Where?")
    assert withheld.source_nodes == []


def test_queries_that_a_model_writes_are_no_passages(saying: Make) -> None:
    class Asking(Passages):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return Passages(llm.complete("Paris").text, *self._texts).retrieve("rewritten")

    llm = saying(by_prompt(("Context", ("It is X", 0.5)), otherwise=("Paris", 0.9)))
    inner: Any = engine(llm)
    inner._retriever = Asking(*PASSAGES)
    assert record(inner)["uncertainty"] == 0.5


@pytest.mark.parametrize("pool", [False, True])
def test_passages_that_a_model_wrote_are_not_retrieved_past_the_guard(pool: bool, saying: Make) -> None:
    llm = saying(WRITES)
    inner: Any = engine(llm, node_postprocessors=[Marking()])
    for mode, found in (("enforce", []), ("annotate", [SECRET])):
        inner._retriever = Writing(llm, pool=pool)
        texts = [node.text for node in GuardedQueryEngine(inner, POLICY, mode=mode).retrieve(QueryBundle("Where?"))]  # type: ignore[arg-type]
        assert texts == [f"{text}!" for text in found]
    inner._retriever = Passages(*PASSAGES)
    kept = GuardedQueryEngine(inner, POLICY).retrieve(QueryBundle("Where?"))
    assert [node.text for node in kept] == [f"{text}!" for text in PASSAGES]


class Marking(BaseNodePostprocessor):
    """Changes passages without a model."""

    def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
        return [NodeWithScore(node=TextNode(text=f"{node.text}!"), score=1.0) for node in nodes]

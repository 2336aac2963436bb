"""Whose text a response is: the score is that of the calls that wrote it, and of no judge, condenser or selector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import (
    CitationQueryEngine,
    CustomQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import Refine, get_response_synthesizer
from llama_index.core.retrievers import RecursiveRetriever
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from pydantic import BaseModel

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine
from semgrad_guard import LanguageModel, Policy
from tests.pairwise import pairwise

from .conftest import PASSAGES, Passages
from .scripted import BOTH, WAY, Script, Scripted
from .test_chat_engine import WAYS, say
from .test_query_engine import ask

LOOSE = Policy(threshold=1e308)
WIDER = ("sync", "async", "stream", "async stream")
Make = Callable[..., Scripted]


@pytest.fixture
def saying(wide: LanguageModel) -> Callable[[Script], Scripted]:
    return lambda script: Scripted.saying(wide, script)


def by_prompt(*cases: tuple[str, tuple[str, float]], otherwise: tuple[str, float]) -> Script:
    """The first case whose words occur in the prompt."""
    return lambda prompt: next((reply for words, reply in cases if words in prompt), otherwise)


def in_turn(*replies: tuple[str, float]) -> Script:
    """One after another."""
    rest = list(replies)
    return lambda _: rest.pop(0)


def engine(llm: Any, mode: str = "compact", **options: Any) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(Passages(*PASSAGES), llm=llm, response_mode=mode, **options)  # type: ignore[arg-type]


def record(inner: BaseQueryEngine, way: str = "sync", **options: Any) -> dict[str, Any]:
    return ask(GuardedQueryEngine(inner, LOOSE, **options), way).metadata["semgrad_guard"]  # type: ignore[index]


def acc(llm: Any) -> RetrieverQueryEngine:
    return engine(llm, "accumulate")


SIDE_BY_SIDE = by_prompt(("Oslo is in Norway", ("sure", 0.001)), otherwise=("not sure at all", 0.9))


class Rewritten(BaseQueryTransform):
    """Puts another question, which a model wrote."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def _get_prompts(self) -> Any:
        return {}

    def _update_prompts(self, prompts: Any) -> None: ...

    def _run(self, query_bundle: Any, metadata: Any) -> Any:
        return QueryBundle(self._llm.complete("rewrite this").text)


class Delegating(CustomQueryEngine):
    """An engine of one's own that hands on another's response."""

    inner: Any

    def custom_query(self, query_str: str) -> Any:
        return self.inner.query(query_str)


class Own(CustomQueryEngine):
    """An engine of one's own: what it does is the test's."""

    do: Any

    def custom_query(self, query_str: str) -> Any:
        return self.do(query_str)


def router(llm: Any, *engines: BaseQueryEngine) -> RouterQueryEngine:
    tools = [QueryEngineTool.from_defaults(engine, name=f"e{i}", description="d") for i, engine in enumerate(engines)]
    return RouterQueryEngine(LLMSingleSelector.from_defaults(llm=llm), tools, llm=llm)


WRAPPERS: dict[str, Callable[[Any, BaseQueryEngine], BaseQueryEngine]] = {
    "transform": lambda llm, inner: TransformQueryEngine(inner, Rewritten(llm)),
    "router": lambda llm, inner: router(llm, inner, inner),
    "custom": lambda llm, inner: Delegating(inner=inner),
    "deep": lambda llm, inner: Delegating(inner=TransformQueryEngine(router(llm, inner, inner), Rewritten(llm))),
}
CHOICE = '[{"choice": 1, "reason": "why not"}]'
OTHERS = (("rewrite this", ("Where?", 0.002)), ("choices", (CHOICE, 0.003)))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("way", ["sync", "async"])
def test_wherever_answers_are_put_side_by_side_the_worst_counts(wrapper: str, way: str, saying: Make) -> None:
    llm = saying(by_prompt(*OTHERS, ("Oslo is in Norway", ("sure", 0.001)), otherwise=("not sure at all", 0.9)))
    found = record(WRAPPERS[wrapper](llm, acc(llm)), way)
    assert (found["uncertainty"], found["settings"]["aggregate"]) == (0.9, "max")


@pairwise(wrapper=WRAPPERS, asynchronous=BOTH, streaming=BOTH)
def test_a_wrapped_answer_scores_as_itself(wrapper: str, asynchronous: bool, streaming: bool, saying: Make) -> None:
    way = WAY[asynchronous, streaming]
    llm = saying(by_prompt(*OTHERS, otherwise=("It is Paris", 0.5)))
    found = record(WRAPPERS[wrapper](llm, engine(llm, streaming="stream" in way)), way)
    assert (found["uncertainty"], "aggregate" in found["settings"]) == (0.5, False)


@pytest.mark.parametrize("way", WAYS)
async def test_a_chat_around_an_accumulating_engine(way: str, saying: Make) -> None:
    if "stream" in way:
        return  # LlamaIndex cannot stream accumulating engines
    llm = saying(
        by_prompt(("standalone question", ("And?", 0.002)), ("Oslo is in", ("b", 0.001)), otherwise=("a", 0.9))
    )
    guarded = GuardedChatEngine(CondenseQuestionChatEngine.from_defaults(acc(llm), llm=llm), Policy(threshold=0.1))
    for message in ("Where is Paris?", "And Oslo?"):
        text, response = await say(guarded, way, message)
        assert (text, response.metadata["semgrad_guard"]["uncertainty"]) == ("I don't know.", 0.9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [CondenseQuestionChatEngine, CondensePlusContextChatEngine])
async def test_a_condensed_question_never_vouches(kind: Any, way: str, saying: Make) -> None:
    llm = saying(by_prompt(("tandalone question", ("It is Paris", 0.001)), otherwise=("It is Paris", 0.5)))
    inner = engine(llm, streaming=True) if kind is CondenseQuestionChatEngine else Passages(*PASSAGES)
    guarded = GuardedChatEngine(kind.from_defaults(inner, llm=llm), LOOSE)
    for message in ("Where is Paris?", "And Oslo?"):
        _, response = await say(guarded, way, message)
        assert response.metadata["semgrad_guard"]["uncertainty"] == 0.5


@pytest.mark.parametrize("verdict", ["YES", "no", "It is X"])
def test_a_judge_never_vouches(verdict: str, saying: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = saying(by_prompt(("Either YES", (verdict, 0.01)), otherwise=("It is X", 0.9)))
    monkeypatch.setattr(Settings, "_llm", llm)
    retry = RetryQueryEngine(engine(llm), RelevancyEvaluator(llm=llm), max_retries=1)
    assert record(retry)["uncertainty"] == 0.9
    assert record(retry, answering="CompactAndRefine")["uncertainty"] == 0.9


@pytest.mark.parametrize("reply", ["no", "", "know", "Answer: I know it is X"])
def test_what_code_of_ones_own_makes_is_nobodys(reply: str, saying: Make) -> None:
    """A judge that says "no" is no author of "I know it is X", and an empty generation of nothing."""

    def parsed(query: str) -> str:
        answer = llm.complete("answer").text.split(": ")[1]
        llm.complete("judge")
        return answer

    llm = saying(by_prompt(("judge", (reply, 0.01)), otherwise=("Answer: I know it is X", 0.9)))
    found = record(Own(do=parsed))
    assert (found["status"], found["promised"]) == ("unscored", False)
    assert "answering=" in found["reason"]
    assert record(Own(do=parsed), aggregate="max")["uncertainty"] == 0.9


def test_a_judge_that_says_the_same_is_not_the_author(saying: Make) -> None:
    other = MockLLM(max_tokens=2)

    def judged(query: str) -> str:
        answer = other.complete("yes it is").text
        llm.complete(answer)
        return answer

    llm = saying(in_turn(("yes it", 0.01)) if other.complete("yes it is").text == "yes it" else lambda p: (p, 0.01))
    found = record(Own(do=judged))
    assert found["status"] == "unscored"
    assert record(Own(do=judged), aggregate="max")["status"] == "unscored"


def test_joined_completions_are_unscored_or_the_worst(saying: Make) -> None:
    llm = saying(by_prompt(("first", ("sure", 0.001)), otherwise=("unsure", 0.9)))
    joined = Own(do=lambda _: llm.complete("second").text + "\n" + llm.complete("first").text)
    assert record(joined)["status"] == "unscored"
    assert record(joined, aggregate="max")["uncertainty"] == 0.9
    assert record(joined, answering="Scripted.complete")["uncertainty"] == 0.9


def test_a_changed_response_is_not_the_one_that_was_made(saying: Make) -> None:
    def polished(query: str) -> Response:
        response = engine(llm).query(query)
        response.response = "Surely: " + llm.complete("polish").text
        return response  # type: ignore[return-value]

    llm = saying(by_prompt(("polish", ("x", 0.001)), otherwise=("It is X", 0.9)))
    assert record(Own(do=polished))["status"] == "unscored"


class Questions(BaseQuestionGenerator):
    """Splits every question in two."""

    def _get_prompts(self) -> Any:
        return {}

    def _update_prompts(self, prompts: Any) -> None: ...

    def generate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
        return [SubQuestion(sub_question=f"part {i}", tool_name="e") for i in range(2)]

    async def agenerate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
        return self.generate(tools, query)


def sub_questions(llm: Any, inner: BaseQueryEngine, *, use_async: bool = False) -> SubQuestionQueryEngine:
    tool = QueryEngineTool.from_defaults(inner, name="e", description="d")
    return SubQuestionQueryEngine.from_defaults(
        [tool], llm=llm, question_gen=Questions(), use_async=use_async, verbose=False
    )


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("use_async", [True, False])
def test_sub_answers_count(use_async: bool, way: str, saying: Make) -> None:
    llm = saying(
        by_prompt(("Sub question", ("In all: X", 0.01)), ("part 1", ("unsure", 0.9)), otherwise=("sure", 0.02))
    )
    found = record(sub_questions(llm, engine(llm), use_async=use_async), way)
    assert (found["uncertainty"], found["settings"]["aggregate"]) == (0.9, "max")


def test_sub_answers_of_a_guarded_engine_have_been_judged(saying: Make) -> None:
    llm = saying(by_prompt(("Sub question", ("In all: X", 0.01)), otherwise=("unsure", 0.9)))
    guarded = GuardedQueryEngine(engine(llm), Policy(threshold=0.5))
    assert record(sub_questions(llm, guarded))["uncertainty"] == 0.01


def test_steps_count(saying: Make) -> None:
    class Next(Rewritten):
        def _run(self, query_bundle: Any, metadata: Any) -> Any:
            return QueryBundle("step")

    llm = saying(by_prompt(("Query: step", ("It is unsure", 0.9)), otherwise=("In all: X", 0.01)))
    steps = MultiStepQueryEngine(
        engine(llm), Next(llm), get_response_synthesizer(llm=llm), num_steps=2, early_stopping=False
    )
    assert record(steps)["uncertainty"] == 0.9


def test_answers_that_are_retrieved_as_passages_count(saying: Make) -> None:
    class Links(Passages):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [NodeWithScore(node=IndexNode(text="see there", index_id="there"), score=1.0)]

    llm = saying(by_prompt(("Oslo is", ("Unsure", 0.9)), otherwise=("It is X", 0.01)))
    retriever = RecursiveRetriever("root", {"root": Links()}, query_engine_dict={"there": engine(llm)})
    outer = RetrieverQueryEngine.from_args(retriever, llm=llm)
    assert record(outer)["uncertainty"] == 0.9
    withheld = GuardedQueryEngine(outer, Policy(threshold=0.1)).query("Where?")
    assert "Unsure" not in repr(withheld)


def test_citations(saying: Make) -> None:
    class Index:
        def as_retriever(self, **_: Any) -> Any:
            return Passages(*PASSAGES)

    llm = saying(lambda _: ("In France [1].", 0.4))
    assert record(CitationQueryEngine.from_args(Index(), llm=llm))["uncertainty"] == 0.4  # type: ignore[arg-type]


def test_refined_answers_whose_filter_reads_them_count_all(saying: Make) -> None:
    script = in_turn(
        ('{"query_satisfied": true, "answer": "It is X"}', 0.9), ('{"query_satisfied": false, "answer": "no"}', 0.01)
    )
    refine = Refine(llm=saying(script), structured_answer_filtering=True)
    assert record(RetrieverQueryEngine(Passages(*PASSAGES), refine))["uncertainty"] == 0.9


def test_a_step_of_a_synthesizer_in_an_engine_of_ones_own(saying: Make) -> None:
    script = in_turn(
        ('{"query_satisfied": true, "answer": "It is X"}', 0.9), ('{"query_satisfied": false, "answer": "no"}', 0.01)
    )
    refine = Refine(llm=saying(script), structured_answer_filtering=True)
    own = Own(do=lambda _: refine.get_response("Where?", list(PASSAGES)))
    assert record(own)["uncertainty"] == 0.9


class City(BaseModel):
    name: str


def test_structures(saying: Make) -> None:
    llm = saying(lambda _: ('{"name": "Paris"}', 0.7))
    response = GuardedQueryEngine(engine(llm, output_cls=City), LOOSE).query("Where?")
    assert isinstance(response, PydanticResponse)
    assert response.metadata["semgrad_guard"]["uncertainty"] == 0.7  # type: ignore[index]
    mixed = Own(do=lambda _: PydanticResponse(City(name=llm.complete("?").text + "!"), metadata={}))
    found = GuardedQueryEngine(mixed, LOOSE, mode="annotate").query("Where?").metadata["semgrad_guard"]  # type: ignore[index]
    assert found["status"] == "unscored"


@pytest.mark.parametrize("way", WIDER)
def test_texts_of_one_character(way: str, saying: Make) -> None:
    """Python has them once, so that no answer has such an object for itself."""
    llm = saying(lambda _: ("A", 0.6))
    assert record(engine(llm, streaming="stream" in way), way)["uncertainty"] == 0.6
    judged = Own(do=lambda _: (llm.complete("answer").text, llm.complete("judge").text)[0])
    assert record(judged)["status"] == "unscored"


def test_the_callers_word_counts(saying: Make) -> None:
    def parsed(query: str) -> str:
        answer = llm.complete("answer").text
        llm.complete("judge")
        return answer.split(": ")[1]

    llm = saying(by_prompt(("judge", ("yes", 0.01)), otherwise=("Answer: X", 0.9)))
    chosen = record(Own(do=parsed), answering=lambda call: call.text.startswith("Answer"))
    assert (chosen["uncertainty"], "aggregate" in chosen["settings"]) == (0.9, False)
    nobody = record(Own(do=parsed), answering="Refine")
    assert (nobody["status"], nobody["reason"]) == ("unscored", "the model was not asked within Refine")


async def test_concurrent_turns_keep_their_authors(saying: Make) -> None:
    llm = saying(lambda prompt: (f"It is {prompt[-40:]}", 0.001 * len(prompt)))
    guarded = GuardedQueryEngine(engine(llm, "tree_summarize"), LOOSE)
    queries = [f"Where? {'x' * i}" for i in range(8)]
    alone = [guarded.query(query).metadata["semgrad_guard"]["uncertainty"] for query in queries]  # type: ignore[index]
    together = await asyncio.gather(*map(guarded.aquery, queries))
    assert [r.metadata["semgrad_guard"]["uncertainty"] for r in together] == alone  # type: ignore[index]

"""Ways out of a guarded engine apart from its answer: errors, what accompanies a passage, printed lines, the memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import Response
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.indices.query.query_transform import StepDecomposeQueryTransform
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine, MultiStepQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import AnswerFailedError, InputError

from .conftest import Passages
from .scripted import Scripted

DRAFT = "ZANZIBAR is the answer of this draft"
POLICY = Policy(threshold=0.1)


@pytest.fixture
def llm(language_model: LanguageModel) -> Scripted:
    return Scripted.saying(language_model, lambda _prompt: (DRAFT, 0.9))


class _UsersOwnError(InputError):
    pass


def _noted(text: str) -> Exception:
    error = AnswerFailedError("it failed")
    error.add_note(text)
    return error


@pytest.mark.parametrize("make", [InputError, _UsersOwnError, _noted])
@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_an_error_of_our_type_that_an_engine_raises_is_no_error_of_ours(
    llm: Scripted, make: Callable[[str], Exception], on_error: Any
) -> None:
    class Failing(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            raise make(llm.complete(query_str).text)

    engine = GuardedQueryEngine(Failing(), POLICY, on_error=on_error)
    if on_error == "abstain":
        assert "ZANZIBAR" not in str(vars(engine.query("q")))
        return
    with pytest.raises(AnswerFailedError) as raised:
        engine.query("q")
    assert "ZANZIBAR" not in repr(raised.value) + str(vars(raised.value))


def test_an_interruption_leaves_without_what_led_to_it(llm: Scripted) -> None:
    class Interrupted(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            try:
                raise ValueError(llm.complete(query_str).text)
            except ValueError:
                raise KeyboardInterrupt  # noqa: B904 - as one that comes while an error is handled

    with pytest.raises(KeyboardInterrupt) as raised:
        GuardedQueryEngine(Interrupted(), POLICY).query("q")
    assert raised.value.__context__ is None


def _related(node: NodeWithScore, text: str) -> NodeWithScore:
    node.node.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id=text)
    return node


def _left_out(node: NodeWithScore, text: str) -> NodeWithScore:
    node.node.excluded_llm_metadata_keys = [text]
    return node


class _Remarked(NodeWithScore):
    remark: str = ""


def _remarked(node: NodeWithScore, text: str) -> NodeWithScore:
    return _Remarked(node=node.node, remark=text)


@pytest.mark.parametrize("change", [_related, _left_out, _remarked])
def test_nothing_that_a_model_wrote_stands_beside_a_passages_text(
    llm: Scripted, change: Callable[[NodeWithScore, str], NodeWithScore]
) -> None:
    class Changing(CustomQueryEngine):
        def custom_query(self, query_str: str) -> Response:
            nodes = Passages("a fact").retrieve(query_str)
            text = llm.complete(query_str).text
            return Response(text, [change(node, text) for node in nodes])  # type: ignore[return-value]

    response = GuardedQueryEngine(Changing(), POLICY).query("q")
    assert b"ZANZIBAR" not in pickle.dumps(response)


def test_a_passage_that_a_guard_in_another_thread_wrote_is_none(llm: Scripted) -> None:
    annotating = GuardedQueryEngine(
        RetrieverQueryEngine.from_args(Passages("a fact"), llm=llm), POLICY, mode="annotate"
    )

    class Asking(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(annotating.query, query_bundle.query_str).result()
            return [NodeWithScore(node=TextNode(text=str(found)))]

    guarded = GuardedQueryEngine(RetrieverQueryEngine.from_args(Asking(), llm=llm), POLICY)
    assert not guarded.query("q").source_nodes
    assert not guarded.retrieve(QueryBundle("q"))


def test_an_error_with_the_words_of_a_guard_in_another_thread_does_not_leave(llm: Scripted) -> None:
    annotating = GuardedQueryEngine(
        RetrieverQueryEngine.from_args(Passages("a fact"), llm=llm), POLICY, mode="annotate"
    )

    class Failing(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            with ThreadPoolExecutor(1) as pool:
                raise ValueError(str(pool.submit(annotating.query, query_str).result()))

    with pytest.raises(AnswerFailedError) as raised:
        GuardedQueryEngine(Failing(), POLICY).query("q")
    assert "ZANZIBAR" not in str(raised.value)


def test_no_part_of_an_engine_prints(llm: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    fusing = QueryFusionRetriever([Passages("a fact")], llm=llm, num_queries=2, use_async=False, verbose=True)
    stepping = StepDecomposeQueryTransform(llm=llm, verbose=True)
    inner = RetrieverQueryEngine.from_args(fusing, llm=llm)
    writing = get_response_synthesizer(llm=llm)
    engine = MultiStepQueryEngine(inner, stepping, writing, num_steps=1, index_summary="facts")
    GuardedQueryEngine(engine, POLICY).query("q")
    assert "ZANZIBAR" not in capsys.readouterr().out


class _Holding(CustomQueryEngine):
    """Holds other engines, which it may ask."""

    inner: Any

    def custom_query(self, query_str: str) -> str:
        return "nothing"


@pytest.mark.parametrize("before", [1, 2, 5])
def test_every_engine_in_an_engine_is_looked_at(llm: Scripted, before: int) -> None:
    """Also those next to others, whose lists of fields are gone by then."""
    printing = StepDecomposeQueryTransform(llm=llm, verbose=True)
    stepping = MultiStepQueryEngine(_Holding(inner=None), printing, get_response_synthesizer(llm=llm))
    others = [_Holding(inner=_Holding(inner=None)) for _ in range(before)]
    GuardedQueryEngine(_Holding(inner=[*others, _Holding(inner=stepping)]), POLICY)
    assert not printing.verbose
    guarded = GuardedQueryEngine(_Holding(inner=None), POLICY)
    with pytest.raises(InputError, match="guarded already"):
        GuardedQueryEngine(_Holding(inner=[*others, _Holding(inner=guarded)]), POLICY)


class _Setting(SimpleChatEngine):
    """Replaces the whole conversation."""

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        messages = [*self._memory.get_all(), ChatMessage(role="user", content=message)]
        text = self._llm.chat(messages).message.content or ""
        self._memory.set([*messages, ChatMessage(role="assistant", content=text)])
        return AgentChatResponse(text)


class _Noting(SimpleChatEngine):
    """Remembers its answer as a note of the system's."""

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        text = self._llm.chat([ChatMessage(role="user", content=message)]).message.content or ""
        self._memory.put(ChatMessage(role="user", content=message))
        self._memory.put(ChatMessage(role="system", content=f"You said: {text}"))
        return AgentChatResponse(text)


@pytest.mark.parametrize("kind", [_Setting, _Noting])
def test_an_engines_own_way_into_the_memory_waits_as_well(llm: Scripted, kind: type[SimpleChatEngine]) -> None:
    chat = GuardedChatEngine(kind.from_defaults(llm=llm, memory=ChatMemoryBuffer.from_defaults()), POLICY)
    for turn in ("one", "two"):
        chat.chat(turn)
    assert [message.content for message in chat.chat_history] == ["one", "I don't know.", "two", "I don't know."]


def test_what_is_let_through_is_remembered_as_the_engine_has_it(language_model: LanguageModel) -> None:
    llm = Scripted.saying(language_model, lambda _prompt: ("Paris it is", 0.01))
    chat = GuardedChatEngine(_Setting.from_defaults(llm=llm, memory=ChatMemoryBuffer.from_defaults()), POLICY)
    for turn in ("one", "two"):
        chat.chat(turn)
    assert [message.content for message in chat.chat_history] == ["one", "Paris it is", "two", "Paris it is"]


class _Storing(SimpleChatEngine):
    """Writes past the memory into its store."""

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        answer = self._llm.chat([ChatMessage(role="user", content=message)]).message
        memory: Any = self._memory
        memory.chat_store.add_message(memory.chat_store_key, answer)
        return AgentChatResponse(answer.content or "")


def test_no_answer_goes_past_the_memory_into_its_store(llm: Scripted) -> None:
    chat = GuardedChatEngine(_Storing.from_defaults(llm=llm, memory=ChatMemoryBuffer.from_defaults()), POLICY)
    with pytest.raises(InputError, match="into the memory itself"):
        chat.chat("one")
    assert not any("ZANZIBAR" in (message.content or "") for message in chat.chat_history)

"""A served model that calls other models inside leaks nothing of its draft to any listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel
from langchain_core.tracers.context import collect_runs
from langgraph.graph import START, MessagesState, StateGraph
from langsmith import traceable
from langsmith.run_helpers import tracing_context
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from langchain_semgrad_guard import GuardedChatModel, UncertaintyMiddleware
from semgrad_guard import LanguageModel
from tests.pairwise import pairwise

from .support import EVENT_ROUTES, EVERYTHING, NOTHING, QUESTION, ROUTES, Ledger, Wire, collect, text_of

LEAK = "Vienna"
Ask = Callable[[Runnable[Any, Any], list[BaseMessage]], str]


def _threaded(model: Runnable[Any, Any], messages: list[BaseMessage]) -> str:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, model.invoke, messages).result().text


def _in_a_graph(model: Runnable[Any, Any], messages: list[BaseMessage]) -> str:
    node = lambda state: {"messages": [model.invoke(state["messages"])]}  # noqa: E731
    graph: Any = StateGraph(MessagesState).add_node("m", node).add_edge(START, "m").compile()
    return graph.invoke({"messages": messages})["messages"][-1].text


def _traced(model: Runnable[Any, Any], messages: list[BaseMessage]) -> str:
    return traceable(lambda: model.invoke(messages).text)()


WAYS: dict[str, Ask] = {
    "invoke": lambda model, messages: model.invoke(messages).text,
    "with_config": lambda model, messages: model.with_config(tags=["inner"]).invoke(messages).text,
    "stream": lambda model, messages: "".join(chunk.text for chunk in model.stream(messages)),
    "ainvoke": lambda model, messages: asyncio.run(model.ainvoke(messages)).text,
    "batch": lambda model, messages: model.batch([messages, messages])[1].text,
    "chain": lambda model, messages: (RunnableParallel(a=model) | (lambda x: x["a"]) | StrOutputParser()).invoke(
        messages
    ),
    "lambda": lambda model, messages: RunnableLambda(lambda m: model.invoke(m).text).invoke(messages),
    "thread": _threaded,
    "graph": _in_a_graph,
    "traceable": _traced,
}


class Wrapper(BaseChatModel):
    """An in-house model that calls another one."""

    ask: Any
    inner: Any = FakeListChatModel(responses=[LEAK])

    @property
    def _llm_type(self) -> str:
        return "in-house"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        message = AIMessage(self.ask(self.inner, messages))
        return ChatResult(generations=[ChatGeneration(message=message)], llm_output={"thinking": LEAK})


class AsyncWrapper(Wrapper):
    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        text = "".join([chunk.text async for chunk in self.inner.astream(messages)])
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


class Everything(BaseCallbackHandler):
    """Writes down all that a handler hears."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def on_llm_new_token(self, token: Any, **known: Any) -> None:
        self.noted.append((token, known))

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.noted.append(response)

    def on_chain_end(self, outputs: Any, **_: Any) -> None:
        self.noted.append(outputs)


WRAPPERS = (*WAYS, "async")


@pytest.fixture(params=WRAPPERS)
def wrapper(request: pytest.FixtureRequest) -> Wrapper:
    return AsyncWrapper(ask=WAYS["invoke"]) if request.param == "async" else Wrapper(ask=WAYS[request.param])


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield exporter
    instrumentor.uninstrument()


@pairwise(wrapper=WRAPPERS, kind=["guard", "middleware"], asynchronous=[False, True], indirect=["wrapper"])
def test_graphs_handlers_tracers_and_spans(
    wrapper: Wrapper,
    kind: str,
    asynchronous: bool,
    language_model: LanguageModel,
    ledger: Ledger,
    spans: InMemorySpanExporter,
) -> None:
    guard = GuardedChatModel(wrapper, NOTHING, scorer=language_model, abstain_message="No.")
    if kind == "guard":
        call = RunnableLambda(
            lambda state: {"messages": [guard.invoke(state["messages"])]},
            afunc=_anode(guard),
        )
        graph: Any = StateGraph(MessagesState).add_node("m", call).add_edge(START, "m").compile()
    else:
        middleware = UncertaintyMiddleware(NOTHING, scorer=language_model, abstain_message="No.")
        graph = create_agent(wrapper, [], middleware=[middleware])
    everything = Everything()
    config: Any = {"callbacks": [ledger, everything]}
    given: Any = {"messages": [("human", QUESTION)]}
    with collect_runs() as runs, tracing_context(enabled="local"):
        if asynchronous:
            pieces = collect(graph.astream(given, config, stream_mode="messages", subgraphs=True))
        else:
            pieces = list(graph.stream(given, config, stream_mode="messages", subgraphs=True))
    assert [message.text for _, (message, _) in pieces] == ["No."]
    traced = [(run.outputs, run.inputs, run.error) for run in (*ledger.runs, *runs.traced_runs)]
    assert LEAK not in repr([traced, everything.noted])
    found = spans.get_finished_spans()
    assert any("output.value" in (span.attributes or {}) for span in found)
    assert LEAK not in repr([(span.attributes, span.events) for span in found])
    ledger.assert_balanced()


def _anode(guard: GuardedChatModel) -> Any:
    async def node(state: Any) -> Any:
        return {"messages": [await guard.ainvoke(state["messages"])]}

    return node


@pytest.mark.parametrize("path", ROUTES | EVENT_ROUTES)
def test_every_path(wrapper: Wrapper, path: str, language_model: LanguageModel, wire: Wire, ledger: Ledger) -> None:
    guard = GuardedChatModel(wrapper, NOTHING, scorer=language_model, abstain_message="No.")
    pieces = (ROUTES | EVENT_ROUTES)[path](guard, QUESTION, {"callbacks": [wire, ledger]})
    assert text_of(pieces) == "No."
    assert LEAK not in repr([pieces, wire.tokens, wire.results, [run.outputs for run in ledger.runs]])


def test_traces_keep_them_where_drafts_are_kept(language_model: LanguageModel, ledger: Ledger) -> None:
    guard = GuardedChatModel(Wrapper(ask=WAYS["invoke"]), NOTHING, scorer=language_model, keep_draft=True)
    guard.invoke(QUESTION, {"callbacks": [ledger]})
    outer, served, inner = ledger.models()
    assert (served.parent_run_id, inner.parent_run_id) == (outer.id, served.id)
    assert LEAK in repr(inner.outputs)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_live_stream_shows_the_answer_once(language_model: LanguageModel, asynchronous: bool) -> None:
    class Streaming(Wrapper):
        def _stream(self, messages: Any, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
            for chunk in self.inner.stream(messages):
                yield ChatGenerationChunk(message=chunk)

    guard = GuardedChatModel(Streaming(ask=None), EVERYTHING, mode="annotate", scorer=language_model)
    node = RunnableLambda(lambda state: {"messages": [guard.invoke(state["messages"])]}, afunc=_anode(guard))
    graph: Any = StateGraph(MessagesState).add_node("m", node).add_edge(START, "m").compile()
    given = {"messages": [("human", QUESTION)]}
    stream = (
        collect(graph.astream(given, stream_mode="messages"))
        if asynchronous
        else graph.stream(given, stream_mode="messages")
    )
    assert "".join(message.text for message, _ in stream) == LEAK

"""Every way out of LangChain for the answer of a guard: one line each. A way returns what a user would hold in hand."""

from __future__ import annotations

import asyncio
import copy
import warnings
from collections.abc import Callable
from typing import Any

from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnableWithMessageHistory,
)
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

QUESTION = "What is the capital?"
PROMPT = ChatPromptTemplate.from_messages([("human", "{question}")])
ASKED: dict[str, Any] = {"question": QUESTION}
STATE: dict[str, Any] = {"messages": [("human", QUESTION)]}
MODES = ["messages", "updates", "values", "custom", "debug", "tasks", "checkpoints"]
"""All modes of a graph's stream."""

Way = Callable[[Any, dict[str, Any]], Any]
"""Asks a guard, a Runnable from a text to a message, in a config."""


def collect(stream: Any) -> list[Any]:
    """All items of an asynchronous stream."""

    async def run() -> list[Any]:
        return [item async for item in stream]

    return asyncio.run(run())


def graph_of(guard: Any, *, is_async: bool = False, memory: Any = None) -> Any:
    """A graph with the guard in a node."""

    def node(state: Any, config: RunnableConfig) -> Any:
        return {"messages": [guard.invoke(state["messages"][-1].text, config)]}

    async def anode(state: Any, config: RunnableConfig) -> Any:
        return {"messages": [await guard.ainvoke(state["messages"][-1].text, config)]}

    graph = StateGraph(MessagesState).add_node("answer", anode if is_async else node).add_edge(START, "answer")
    return graph.compile(checkpointer=memory)


def _with_memory(guard: Any, config: dict[str, Any]) -> Any:
    memory, thread = InMemorySaver(), {**config, "configurable": {"thread_id": "1"}}
    graph = graph_of(guard, memory=memory)
    try:
        return [graph.invoke(STATE, thread), graph.get_state(thread)]
    finally:
        FOUND.extend([list(memory.list(None)), dict(memory.blobs), dict(memory.writes)])


def _with_history(guard: Any, config: dict[str, Any], *, is_async: bool = False) -> Any:
    history = InMemoryChatMessageHistory()
    chain = RunnableWithMessageHistory(RunnableLambda(_last) | guard, lambda session: history)
    known = {**config, "configurable": {"session_id": "1"}}
    given = [_human()]
    try:
        return asyncio.run(chain.ainvoke(given, known)) if is_async else chain.invoke(given, known)
    finally:
        FOUND.append(history.messages)


def _last(messages: Any) -> str:
    return messages[-1].text


def _log(guard: Any, config: dict[str, Any]) -> Any:
    return collect(guard.astream_log(QUESTION, config))


def _with_listeners(guard: Any, config: dict[str, Any]) -> Any:
    return guard.with_listeners(on_start=FOUND.append, on_end=FOUND.append, on_error=FOUND.append).invoke(
        QUESTION, config
    )


def _closed_early(guard: Any, config: dict[str, Any]) -> Any:
    stream = guard.stream(QUESTION, config)
    first = next(stream)
    stream.close()
    return first


def _in_time(guard: Any, config: dict[str, Any]) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(guard.ainvoke(QUESTION, config), 60)

    return asyncio.run(run())


def _gathered(guard: Any, config: dict[str, Any]) -> Any:
    async def run() -> Any:
        return await asyncio.gather(*(guard.ainvoke(QUESTION, config) for _ in range(3)), return_exceptions=True)

    return _raised(asyncio.run(run()))


def _raised(outcomes: list[Any]) -> list[Any]:
    for one in outcomes:
        if isinstance(one, Exception):
            raise one
    return outcomes


def _chain(*steps: Any) -> Any:
    chain = steps[0]
    for step in steps[1:]:
        chain = chain | step
    return chain


def _text(given: Any) -> str:
    return given.to_messages()[-1].text


FOUND: list[Any] = []
"""What memories, histories and listeners hold after a run: emptied before each."""

WAYS: dict[str, Way] = {
    "invoke": lambda guard, config: guard.invoke(QUESTION, config),
    "ainvoke": lambda guard, config: asyncio.run(guard.ainvoke(QUESTION, config)),
    "wait_for": _in_time,
    "gather": _gathered,
    "batch": lambda guard, config: guard.batch([QUESTION] * 3, config),
    "batch, errors returned": lambda guard, config: _raised(
        guard.batch([QUESTION] * 2, config, return_exceptions=True)
    ),
    "batch_as_completed": lambda guard, config: list(guard.batch_as_completed([QUESTION] * 2, config)),
    "abatch": lambda guard, config: asyncio.run(guard.abatch([QUESTION] * 3, config)),
    "abatch_as_completed": lambda guard, config: collect(guard.abatch_as_completed([QUESTION] * 2, config)),
    "stream": lambda guard, config: list(guard.stream(QUESTION, config)),
    "stream, closed early": _closed_early,
    "astream": lambda guard, config: collect(guard.astream(QUESTION, config)),
    "transform": lambda guard, config: list(guard.transform(iter([QUESTION]), config)),
    "astream_events v1": lambda guard, config: collect(guard.astream_events(QUESTION, config, version="v1")),
    "astream_events v2": lambda guard, config: collect(guard.astream_events(QUESTION, config, version="v2")),
    "astream_log": _log,
    "chain": lambda guard, config: _chain(PROMPT, _text, guard, StrOutputParser()).invoke(ASKED, config),
    "chain, streamed": lambda guard, config: list(
        _chain(PROMPT, _text, guard, StrOutputParser()).stream(ASKED, config)
    ),
    "chain, events": lambda guard, config: collect(
        _chain(PROMPT, _text, guard, StrOutputParser()).astream_events(ASKED, config, version="v2")
    ),
    "chain that wants JSON": lambda guard, config: _chain(guard, JsonOutputParser()).invoke(QUESTION, config),
    "retries": lambda guard, config: guard.with_retry(stop_after_attempt=2, wait_exponential_jitter=False).invoke(
        QUESTION, config
    ),
    "fallbacks": lambda guard, config: guard.with_fallbacks([guard]).invoke(QUESTION, config),
    "parallel": lambda guard, config: RunnableParallel(one=guard, two=guard).invoke(QUESTION, config),
    "parallel, streamed": lambda guard, config: list(RunnableParallel(one=guard, two=guard).stream(QUESTION, config)),
    "assigned": lambda guard, config: (
        RunnableLambda(lambda text: {"text": text})
        | RunnablePassthrough.assign(said=lambda given: guard.invoke(QUESTION))
    ).invoke(QUESTION, config),
    "branch": lambda guard, config: RunnableBranch((lambda _: True, guard), guard).invoke(QUESTION, config),
    "map": lambda guard, config: guard.map().invoke([QUESTION] * 2, config),
    "tool": lambda guard, config: StructuredTool.from_function(
        lambda text: guard.invoke(text), name="ask", description="asks"
    ).invoke({"text": QUESTION}, config),
    "listeners": _with_listeners,
    "labels of a caller": lambda guard, config: guard.invoke(
        QUESTION,
        {
            **config,
            "metadata": {"lc_source": "x", "semgrad_guard": True, "ls_model_type": "chat"},
            "tags": ["nostream", "langsmith:hidden"],
            "run_name": "router=False",
            "configurable": {"router": None, "mode": "annotate", "semgrad_guard_asks": True},
        },
    ),
    "history": _with_history,
    "history, async": lambda guard, config: _with_history(guard, config, is_async=True),
    "checkpoints": _with_memory,
    "graph": lambda guard, config: graph_of(guard).invoke(STATE, config),
    "graph, every stream mode": lambda guard, config: list(graph_of(guard).stream(STATE, config, stream_mode=MODES)),
    "graph, every stream mode, async": lambda guard, config: collect(
        graph_of(guard, is_async=True).astream(STATE, config, stream_mode=MODES)
    ),
    "graph, events": lambda guard, config: collect(
        graph_of(guard, is_async=True).astream_events(STATE, config, version="v2")
    ),
    "graph in a graph": lambda guard, config: list(
        graph_of(_chain(lambda text: {"messages": [("human", text)]}, graph_of(guard), _last_of)).stream(
            STATE, config, stream_mode=MODES, subgraphs=True
        )
    ),
}


def _last_of(state: Any) -> Any:
    return state["messages"][-1]


def _v3(model: Any, config: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # version 3 is in beta
        stream = model.stream_events(QUESTION, config, version="v3")
    return [list(stream.text), stream.output]


def _av3(model: Any, config: dict[str, Any]) -> Any:
    async def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stream = await model.astream_events(QUESTION, config, version="v3")
        try:
            return [[text async for text in stream.text], await stream.output]
        finally:  # LangChain hands out the output, or the error, before it tells the handlers that the run has ended
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    return asyncio.run(run())


def _generated(model: BaseChatModel, config: dict[str, Any]) -> Any:
    return model.generate([[_human()]], callbacks=config["callbacks"])


def _agenerated(model: BaseChatModel, config: dict[str, Any]) -> Any:
    return asyncio.run(model.agenerate([[_human()]], callbacks=config["callbacks"]))


def _human() -> Any:
    return PROMPT.invoke(ASKED).to_messages()[0]


WAYS_OF_MODELS: dict[str, Way] = {
    "generate": _generated,
    "agenerate": _agenerated,
    "stream_events v3": _v3,
    "astream_events v3": _av3,
    "bound": lambda model, config: model.bind(stop=["!"]).invoke(QUESTION, config),
    "bound, streamed": lambda model, config: list(model.bind(stop=["!"]).stream(QUESTION, config)),
    "streaming": lambda model, config: model.model_copy(update={"streaming": True}).invoke(QUESTION, config),
    "configurable": lambda model, config: model.configurable_fields(
        timeout=ConfigurableField(id="timeout"), streaming=ConfigurableField(id="streaming")
    ).invoke(QUESTION, {**config, "configurable": {"timeout": 60.0}}),
    "from another process": lambda model, config: copy.deepcopy(model).invoke(QUESTION, config),
    "messages": lambda model, config: model.invoke([("human", QUESTION), ("ai", "Which?"), ("human", "That.")], config),
}
"""Those that chat models have besides."""


def texts_of(answer: Any) -> list[str]:
    """The texts of messages anywhere in what a way returns."""
    if isinstance(answer, AIMessage):
        return [str(answer.text)]
    if isinstance(answer, dict):
        return [text for value in answer.values() for text in texts_of(value)]
    if isinstance(answer, list | tuple):
        return [text for value in answer for text in texts_of(value)]
    return [answer] if isinstance(answer, str) else []

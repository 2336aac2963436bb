"""A `SemGradLLM` whose drafts a test writes, and every way out of LlamaIndex; what decides is the real package."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from llama_index.core import Document, SummaryIndex
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index.core.memory import ChatMemoryBuffer, Memory, SimpleComposableMemory
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import (
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.workflow import Context, StartEvent, StopEvent, Workflow, step
from pydantic import BaseModel

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback, asking, get_verdict
from llama_index_semgrad_guard.llm import A_STRUCTURE
from llama_index_semgrad_guard.records import Chunk
from semgrad_guard import LanguageModel, Policy, Verdict
from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.steps import Work
from semgrad_guard.records import PromptForm, digest_of

from .conftest import Passages

CANARY = "ZANZIBAR"
"""A word of drafts that must not be found anywhere."""
WITHHELD = "WITHHELD"

Script = Callable[[str], tuple[Any, ...]]
"""The reply to a prompt, given as one text: a text, how uncertain it is, the calls in it, and the verdicts on these."""


class Scripted(SemGradLLM):
    """Answers by its script; the model behind it only lends its name and its tokenizer."""

    script: Any = None
    calls_functions: bool = False

    @property
    def metadata(self) -> LLMMetadata:
        return super().metadata.model_copy(update={"is_function_calling_model": self.calls_functions})

    def _live(self, prompt: Any, form: AnswerForm, writing: Any, terms: Any, *, is_live: bool) -> Any:
        """The writing of a draft, in pieces of three characters."""
        draft = yield Work(lambda: self._scripted(prompt, form))
        text = draft.verdict.text
        yield from (text[start : start + 3] for start in range(0, len(text) if is_live else 0, 3))
        return draft

    def _scripted(self, prompt: Any, owed: AnswerForm) -> Draft[Chunk]:
        """A draft as the model's thread makes it."""
        shown = prompt if isinstance(prompt, str) else "\n".join(message.content or "" for message in prompt)
        text, uncertainty, calls, scores = (*self.script(shown), [], ())[:4]
        form = PromptForm(text=shown, tokens=len(shown.split()), roles=("user",), user_text=shown)
        verdict = Verdict.of(
            status="unscored" if uncertainty is None else "scored",
            action="answer",
            text=text,
            tool_calls=tuple(calls),
            calls=scores,
            estimator="none" if uncertainty is None else "hybridgrad",
            uncertainty=uncertainty,
            model=self.model,
            prompt=digest_of(shown),
            reason="no score" if uncertainty is None else None,
        )
        answer = Chunk(text, record={"model": self.model, "finish_reason": "stop"})
        trusted = bool(self.router) and self.router.trusts(calls)
        return Draft(verdict, answer, form, trusted=trusted, irreplaceable=A_STRUCTURE if owed.is_owed else "")


def verdict_of(response: Any) -> Verdict:
    """The verdict that a response carries."""
    verdict = get_verdict(response)
    assert verdict is not None
    return verdict


def router_of(**options: Any) -> UncertaintyRouterCallback:
    """A router that lets through scores of at most .1."""
    return UncertaintyRouterCallback(Policy(threshold=0.1), **{"abstain_message": WITHHELD, **options})


def scripted(
    model: LanguageModel, script: Script, router: Any = None, *, calls_functions: bool = False, **options: Any
) -> Scripted:
    """A scripted LLM with a router of these options, or with this one."""
    chosen = router_of(**options) if router is None else router
    fields: Any = {"script": script, "router": chosen, "calls_functions": calls_functions, "context_window": 4096}
    return Scripted.from_model(model, **fields)


# Ways out: how an answer can be asked for, and everything that hears of it on the way.

QUERY = "Where is it?"
MESSAGES = [ChatMessage(role="user", content=QUERY)]


class Place(BaseModel):
    """A structure that a model may owe."""

    name: str


class Ears:
    """Handlers of events, spans and callbacks, and what they heard."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def add(self, *things: Any) -> None:
        """Keep what an error tracker or a trace would: the text of things and of their fields."""
        for thing in things:
            self.heard.append(repr(thing))
            self.heard.append(repr(getattr(thing, "__dict__", "")))

    def add_error(self, error: BaseException | None) -> None:
        """An error as reporters write it: its causes, and its frames with their local variables."""
        while error is not None:
            self.add(error, error.args)
            for frame, _ in traceback.walk_tb(error.__traceback__):
                self.heard += [repr(value) for value in frame.f_locals.values()]
            error = error.__cause__ or error.__context__

    @contextmanager
    def listening(self) -> Generator[None]:
        ears, root = self, get_dispatcher()

        class Events(BaseEventHandler):
            def handle(self, event: Any, **_: Any) -> None:
                ears.add(event)

        class Spans(SimpleSpanHandler):
            def prepare_to_exit_span(self, *args: Any, result: Any = None, **kwargs: Any) -> Any:
                ears.add(result)
                return super().prepare_to_exit_span(*args, result=result, **kwargs)

            def prepare_to_drop_span(self, *args: Any, err: Any = None, **kwargs: Any) -> Any:
                ears.add_error(err)
                return super().prepare_to_drop_span(*args, err=err, **kwargs)

        events, spans = Events(), Spans()
        root.add_event_handler(events)
        root.add_span_handler(spans)
        try:
            yield
        finally:
            root.event_handlers.remove(events)
            root.span_handlers.remove(spans)


def debugged(llm: Scripted) -> LlamaDebugHandler:
    """LlamaIndex's older callbacks, attached to an LLM."""
    handler = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([handler])
    return handler


# The LLM's own methods, and those of LlamaIndex's base class around them.


async def drained(stream: Any) -> Any:
    return [piece async for piece in stream]


LLM_WAYS: dict[str, Callable[[Scripted], Any]] = {
    "chat": lambda llm: llm.chat(MESSAGES),
    "complete": lambda llm: llm.complete(QUERY),
    "stream_chat": lambda llm: list(llm.stream_chat(MESSAGES)),
    "stream_complete": lambda llm: list(llm.stream_complete(QUERY)),
    "achat": lambda llm: asyncio.run(llm.achat(MESSAGES)),
    "acomplete": lambda llm: asyncio.run(llm.acomplete(QUERY)),
    "astream_chat": lambda llm: asyncio.run(_streamed(llm.astream_chat(MESSAGES))),
    "astream_complete": lambda llm: asyncio.run(_streamed(llm.astream_complete(QUERY))),
    "predict": lambda llm: llm.predict(PromptTemplate("{q}"), q=QUERY),
    "stream": lambda llm: list(llm.stream(PromptTemplate("{q}"), q=QUERY)),
    "apredict": lambda llm: asyncio.run(llm.apredict(PromptTemplate("{q}"), q=QUERY)),
    "pickled response": lambda llm: pickle.loads(pickle.dumps(llm.complete(QUERY))),  # noqa: S301 - our own
    "structured": lambda llm: llm.structured_predict(Place, PromptTemplate("{q}"), q=QUERY),
    "as_structured_llm": lambda llm: llm.as_structured_llm(Place).complete(QUERY),
    "streamed structure": lambda llm: list(llm.stream_structured_predict(Place, PromptTemplate("{q}"), q=QUERY)),
    "response_format": lambda llm: llm.chat(MESSAGES, response_format={"type": "json_object"}),
}


async def _streamed(stream: Any) -> Any:
    return await drained(await stream)


# Engines: each of them makes at least one call whose draft may be withheld.


def index(*texts: str) -> SummaryIndex:
    return SummaryIndex.from_documents([Document(text=text) for text in (texts or ("a fact", "another fact"))])


def reading(llm: Scripted, **options: Any) -> Any:
    return RetrieverQueryEngine.from_args(Passages("a fact", "another fact"), llm=llm, **options)


def tool(llm: Scripted) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(reading(llm), name="t", description="d")


def multi_step(llm: Scripted) -> Any:
    steps, writing = StepDecomposeQueryTransform(llm=llm), get_response_synthesizer(llm=llm)
    return MultiStepQueryEngine(reading(llm), steps, writing, index_summary="facts", num_steps=2)


def sub_questions(llm: Scripted) -> Any:
    generator = LLMQuestionGenerator.from_defaults(llm=llm)
    return SubQuestionQueryEngine.from_defaults([tool(llm)], llm=llm, question_gen=generator, use_async=False)


def fused(llm: Scripted) -> Any:
    fusion = QueryFusionRetriever([Passages("a fact")], llm=llm, num_queries=2, use_async=True)
    return RetrieverQueryEngine.from_args(fusion, llm=llm)


ENGINES: dict[str, Callable[[Scripted], Any]] = {
    "compact": lambda llm: reading(llm),
    "refine": lambda llm: reading(llm, response_mode="refine"),
    "tree": lambda llm: reading(llm, response_mode="tree_summarize"),
    "simple": lambda llm: reading(llm, response_mode="simple_summarize"),
    "accumulate": lambda llm: reading(llm, response_mode="accumulate"),
    "generation": lambda llm: reading(llm, response_mode="generation"),
    "streaming": lambda llm: reading(llm, streaming=True),
    "parsed": lambda llm: reading(llm, output_cls=Place),
    "router": lambda llm: RouterQueryEngine.from_defaults(
        [tool(llm), tool(llm)], llm=llm, selector=LLMSingleSelector.from_defaults(llm=llm)
    ),
    "hyde": lambda llm: TransformQueryEngine(reading(llm), HyDEQueryTransform(llm=llm)),
    "reranked": lambda llm: reading(llm, node_postprocessors=[LLMRerank(llm=llm, top_n=1)]),
    "fused": fused,
    "multi step": multi_step,
    "sub-questions": sub_questions,
}
QUERY_WAYS: dict[str, Callable[[Any], Any]] = {
    "query": lambda engine: engine.query(QUERY),
    "aquery": lambda engine: asyncio.run(engine.aquery(QUERY)),
}


def composed() -> Any:
    return SimpleComposableMemory.from_defaults(
        primary_memory=ChatMemoryBuffer.from_defaults(token_limit=3000), secondary_memory_sources=[]
    )


MEMORIES: dict[str, Callable[[], Any]] = {
    "buffer": lambda: ChatMemoryBuffer.from_defaults(token_limit=3000),
    "memory": lambda: Memory.from_defaults(token_limit=3000),
    "composed": composed,
}
CHATS: dict[str, Callable[[Scripted, Any], Any]] = {
    "simple": lambda llm, memory: SimpleChatEngine.from_defaults(llm=llm, memory=memory),
    "context": lambda llm, memory: ContextChatEngine.from_defaults(Passages("a fact"), llm=llm, memory=memory),
    "condense": lambda llm, memory: CondenseQuestionChatEngine.from_defaults(reading(llm), llm=llm, memory=memory),
    "condense plus": lambda llm, memory: CondensePlusContextChatEngine.from_defaults(
        Passages("a fact"), llm=llm, memory=memory
    ),
}
CHAT_WAYS: dict[str, Callable[[Any], Any]] = {
    "chat": lambda engine: engine.chat(QUERY),
    "stream_chat": lambda engine: "".join(engine.stream_chat(QUERY).response_gen),
    "achat": lambda engine: asyncio.run(engine.achat(QUERY)),
    "astream_chat": lambda engine: asyncio.run(_chat_streamed(engine)),
}


async def _chat_streamed(engine: Any) -> Any:
    response = await engine.astream_chat(QUERY)
    return "".join([piece async for piece in response.async_response_gen()])


# Agents and workflows: LlamaIndex's own, with the guarded LLM.


def look(what: str) -> str:
    """Look something up."""
    return f"found {what}"


class Steps(Workflow):
    """Two calls of a model, one after the other."""

    llm: Any = None

    @step
    async def go(self, event: StartEvent) -> StopEvent:
        first = await self.llm.acomplete(QUERY)
        return StopEvent(result=str(await self.llm.acomplete(f"second: {first}")))


async def _run(agent: Any, ears: Ears) -> Any:
    context = Context(agent)
    handler = agent.run(user_msg=QUERY, ctx=context)
    async for event in handler.stream_events():
        ears.add(event)
    try:
        return await handler
    finally:
        ears.add(context.to_dict())


async def _worked(llm: Scripted) -> Any:
    flow = Steps(timeout=20)
    flow.llm = llm
    return await flow.run()


AGENTS: dict[str, Callable[[Scripted, Ears], Any]] = {
    "react": lambda llm, ears: _run(ReActAgent(llm=llm, tools=[FunctionTool.from_defaults(look)]), ears),
    "function": lambda llm, ears: _run(FunctionAgent(llm=llm, tools=[FunctionTool.from_defaults(look)]), ears),
    "team": lambda llm, ears: _run(AgentWorkflow(agents=[ReActAgent(llm=llm, name="a", description="d")]), ears),
    "workflow": lambda llm, ears: _worked(llm),
}


def in_question(llm: Scripted, run: Callable[[], Any]) -> Any:
    """A coroutine of own code as one question; the abstention where it was refused."""

    async def answer_of() -> Any:
        answer: Any = None
        with asking(llm.router) as question:
            answer = await run()
        return "WITHHELD" if question.refused is not None else answer

    return asyncio.run(answer_of())

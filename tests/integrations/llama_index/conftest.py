"""Fixtures for the LlamaIndex tests: a random model wide enough for LlamaIndex's prompts, and engines around it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.prompts.chat_prompts import TEXT_QA_PROMPT_TMPL_MSGS
from llama_index.core.prompts.default_prompts import (
    DEFAULT_REFINE_PROMPT_TMPL,
    DEFAULT_TEXT_QA_PROMPT_TMPL,
    DEFAULT_TREE_SUMMARIZE_TMPL,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index_semgrad_guard import SemGradLLM, UncertaintyEvent, UncertaintyRouterCallback, guarded
from semgrad_guard import LanguageModel, Policy

PASSAGES = ("Paris is in France.", "Oslo is in Norway.")


class Passages(BaseRetriever):
    """Retrieves the same texts for every query."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self._texts = texts

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in self._texts]


@pytest.fixture(autouse=True)
def _no_connection_left_open() -> Iterator[None]:
    """Collects what LlamaIndex's own memory leaves open, before a later test's event loop runs.

    A chat engine's default `Memory` opens a connection of aiosqlite and closes it only when it is collected. The
    connection then answers the event loop of its thread: the next test's, which may be closed by the time. A thread
    of its own has no event loop.
    """
    yield
    if any("_connection_worker_thread" in thread.name for thread in threading.enumerate()):
        collecting = threading.Thread(target=gc.collect)
        collecting.start()
        collecting.join()


@pytest.fixture(scope="session")
def wide(make_language_model: Callable[..., LanguageModel]) -> LanguageModel:
    """Its tokens are bytes and the words of LlamaIndex's prompts, which are read in a third of the time so."""
    templates = (DEFAULT_TEXT_QA_PROMPT_TMPL, DEFAULT_REFINE_PROMPT_TMPL, DEFAULT_TREE_SUMMARIZE_TMPL)
    text = "".join((*templates, *(message.content or "" for message in TEXT_QA_PROMPT_TMPL_MSGS)))
    return make_language_model(words="\n".join(text.split()), max_position_embeddings=4096)


@pytest.fixture
def llm(wide: LanguageModel) -> SemGradLLM:
    return SemGradLLM.from_model(wide, max_tokens=4)


@pytest.fixture
def make_engine(llm: SemGradLLM) -> Callable[..., RetrieverQueryEngine]:
    def make(*, passages: tuple[str, ...] = PASSAGES, **options: Any) -> RetrieverQueryEngine:
        return RetrieverQueryEngine.from_args(Passages(*passages), llm=llm, **options)

    return make


Maker = Callable[..., Any]


def under(make_engine: Maker, llm: SemGradLLM, policy: Policy, **options: Any) -> Any:
    """An engine whose LLM decides by this policy."""
    llm.router = UncertaintyRouterCallback(policy, **options)
    return guarded(make_engine(), llm.router)


class Heard(BaseEventHandler):
    """Keeps the events it hears."""

    events: list[Any] = []  # noqa: RUF012 - a pydantic field

    def handle(self, event: Any, **_: Any) -> None:
        self.events.append(event)

    @property
    def verdicts(self) -> list[UncertaintyEvent]:
        return [event for event in self.events if isinstance(event, UncertaintyEvent)]


@pytest.fixture
def recorder() -> Iterator[Heard]:
    """Everything that LlamaIndex's instrumentation reports during a test."""
    root, handler = get_dispatcher(), Heard()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)

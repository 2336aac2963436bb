"""`UncertaintyRouterCallback`: on the callback manager a router can raise or report, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine

from llama_index_semgrad_guard import (
    GuardedQueryEngine,
    LowConfidenceError,
    SemGradLLM,
    UncertaintyRouterCallback,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import InputError

from .conftest import PASSAGES, Heard, Passages
from .test_llm import METHODS, QUESTION

PASS, STOP = Policy(threshold=1e308), Policy(threshold=-1e308)
Maker = Callable[..., RetrieverQueryEngine]
Method = Callable[[SemGradLLM], Awaitable[Any]]


def with_router(wide: LanguageModel, policy: Policy, **options: Any) -> SemGradLLM:
    manager = CallbackManager(
        [LlamaDebugHandler(print_trace_on_end=False), UncertaintyRouterCallback(policy, **options)]
    )
    return SemGradLLM.from_model(wide, max_tokens=4, callback_manager=manager)


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_raises_what_is_not_let_through(
    method: Method, wide: LanguageModel, llm: SemGradLLM
) -> None:
    expected = await method(llm)
    with pytest.raises(LowConfidenceError, match="above the threshold") as raised:
        await method(with_router(wide, STOP))
    assert str(getattr(expected, "text", None) or expected.message.content) not in repr(vars(raised.value))
    await method(with_router(wide, PASS))


@pytest.fixture
def settings() -> Iterator[Any]:
    """LlamaIndex's global settings, put back afterwards."""
    before = Settings.callback_manager
    yield Settings
    Settings.callback_manager = before


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
def test_no_response_mode_swallows_the_error(mode: Any, make_engine: Maker, settings: Any) -> None:
    """`Refine` swallows ValueError and TypeError."""
    settings.callback_manager = CallbackManager([UncertaintyRouterCallback(STOP)])
    engine = make_engine(response_mode=mode)
    with pytest.raises(LowConfidenceError):
        engine.query(QUESTION)


def test_query_engines_replace_their_llms_callback_manager(wide: LanguageModel) -> None:
    """Why the docs name `Settings.callback_manager`: a router on the LLM itself is gone once an engine has it."""
    llm = with_router(wide, STOP)
    RetrieverQueryEngine.from_args(Passages(*PASSAGES), llm=llm)
    assert not any(isinstance(handler, UncertaintyRouterCallback) for handler in llm.callback_manager.handlers)


def test_observing_reports(wide: LanguageModel, recorder: Heard) -> None:
    with_router(wide, STOP, mode="observe").complete(QUESTION)
    found = [(event.source, event.record["action"], event.record["enforced"]) for event in recorder.verdicts]
    assert found == [("llm", "answer", True), ("callback", "abstain", False)]


def test_within_a_guarded_engine_the_engine_decides(make_engine: Maker, settings: Any) -> None:
    settings.callback_manager = CallbackManager([UncertaintyRouterCallback(STOP)])
    assert GuardedQueryEngine(make_engine(), PASS).query(QUESTION).metadata["semgrad_guard"]["action"] == "answer"


def test_answers_without_a_score_go_by_on_unscored() -> None:
    def answer(on_unscored: Any) -> str:
        router = UncertaintyRouterCallback(Policy(threshold=1e308, on_unscored=on_unscored))
        return MockLLM(callback_manager=CallbackManager([router])).complete(QUESTION).text

    assert answer("answer") == QUESTION
    with pytest.raises(LowConfidenceError, match="carries no score"):
        answer("abstain")


def test_what_a_callback_cannot_do_is_refused() -> None:
    for mode in ("enforce", "annotate"):
        with pytest.raises(InputError, match="put a GuardedQueryEngine"):
            UncertaintyRouterCallback(PASS, mode=mode)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs a policy"):
        UncertaintyRouterCallback(None)  # type: ignore[arg-type]

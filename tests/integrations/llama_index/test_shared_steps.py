"""Calls that are under way at the same time share the model's steps, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llama_index_semgrad_guard import GuardedQueryEngine, SemGradLLM, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import EmptyPromptError
from tests.steps import Gate, Steps, most_threads

from .test_authorship import engine

QUESTIONS = [f"Where is number {i}?" for i in range(8)]


async def _tasks(call: Callable[[str], Any]) -> list[Any]:
    return await asyncio.gather(*map(call, QUESTIONS), return_exceptions=True)


def _threads(call: Callable[[str], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(call, QUESTIONS))


WAYS: dict[str, Callable[[SemGradLLM], list[Any]]] = {
    "tasks": lambda llm: asyncio.run(_tasks(llm.acomplete)),
    "threads": lambda llm: _threads(llm.complete),
    "engine": lambda llm: asyncio.run(_tasks(GuardedQueryEngine(engine(llm), Policy(threshold=1e308)).aquery)),
}


@pytest.mark.parametrize("way", WAYS)
def test_concurrent_calls_share_steps(wide: LanguageModel, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    llm = SemGradLLM.from_model(wide, max_tokens=12)
    question_to = GuardedQueryEngine(engine(llm), Policy(threshold=1e308)).query if way == "engine" else llm.complete
    one = Steps(wide)
    alone = [question_to(question) for question in QUESTIONS]
    sequential = one.in_all()
    steps = Steps(wide)
    Gate(monkeypatch).opens_at(len(QUESTIONS), steps)
    together = WAYS[way](llm)
    # An engine's prompts are long: their pieces are read one after the other, between the steps.
    assert steps.in_all() <= sequential * (0.6 if way == "engine" else 1 / 3)
    assert list(map(str, together)) == list(map(str, alone))
    scores = [[get_verdict(response).uncertainty for response in responses] for responses in (together, alone)]  # type: ignore[union-attr]
    assert scores[0] == pytest.approx(scores[1], rel=2e-5)


async def test_the_error_of_one_call_is_its_own(wide: LanguageModel) -> None:
    llm = SemGradLLM.from_model(wide, max_tokens=4)
    expected = [llm.complete(question).text for question in QUESTIONS[:2]]
    calls = (llm.acomplete(QUESTIONS[0]), llm.acomplete("  "), llm.acomplete(QUESTIONS[1]))
    first, wrong, last = await asyncio.gather(*calls, return_exceptions=True)
    assert [first.text, last.text] == expected  # type: ignore[union-attr]
    assert isinstance(wrong, EmptyPromptError)


@pytest.mark.parametrize("of", ["model", "engine"])
async def test_asynchronous_calls_wait_in_no_threads(wide: LanguageModel, of: str) -> None:
    llm = SemGradLLM.from_model(wide, max_tokens=2)
    call = llm.acomplete if of == "model" else GuardedQueryEngine(engine(llm), Policy(threshold=1e308)).aquery
    assert await most_threads(wide, call, 60) <= 20

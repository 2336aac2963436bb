"""`scripts/check_streams.py` in small: streams of nonces through all fronts, and a broken rule that it finds."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from semgrad_guard import HybridGrad, LanguageModel, Policy
from semgrad_guard.errors import AnswerFailedError, AnswerInterruptedError
from semgrad_guard.guard import flow
from tests.fixed_model import PIECES, FixedModel
from tests.scripts import load
from tests.steps import Steps


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(Path(__file__).parents[1] / "scripts" / "check_streams.py")


@pytest.fixture(scope="module")
def nonces(script: ModuleType, make_language_model: Callable[..., LanguageModel]) -> LanguageModel:
    return script.NonceModel.like(make_language_model(max_position_embeddings=4096))


async def ends(script: ModuleType, model: LanguageModel, count: int) -> list[str | BaseException]:
    """How so many streams of every front end."""
    streams = [
        script.searched(model, random.Random(f"{front} {number}"), front)
        for front in script.FRONTS
        for number in range(count)
    ]
    return await asyncio.gather(*streams, return_exceptions=True)


def any_fails(found: list[str | BaseException]) -> bool:
    """Whether a withheld sentence left, or an answer was interrupted as it is no continuation of those that did."""
    return any(isinstance(end, AssertionError | AnswerInterruptedError) for end in found)


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.heavy)])
async def test_no_withheld_sentence_leaves(script: ModuleType, nonces: LanguageModel, count: int) -> None:
    found = await ends(script, nonces, count)
    assert [end for end in found if not isinstance(end, str)] == []
    assert {str(end).partition(",")[0] for end in found} == set(script.FRONTS)


async def test_a_broken_rule_is_found(
    script: ModuleType, nonces: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    add: Any = flow.EarlySentences.add

    def lets_all_through(early: Any, draft: Any) -> Any:
        early._terms = dataclasses.replace(early._terms, policy=Policy(threshold=1e30))
        return add(early, draft)

    monkeypatch.setattr(flow.EarlySentences, "add", lets_all_through)
    found = await ends(script, nonces, 2)
    broken = {front for number, front in enumerate(script.FRONTS) if any_fails(found[2 * number : 2 * number + 2])}
    assert len(broken) > 1, broken


async def read(
    script: ModuleType, model: LanguageModel, front: str, threshold: float
) -> tuple[list[str], Any, BaseException | None]:
    """The pieces of a stream, everything that was heard, and its error."""
    given = {"estimator": HybridGrad(), "by": "sentence", "on_doubt": "drop"}
    drawn = script.Drawn(front, "hello", Policy(threshold=threshold), given, {})
    events, pieces = script.Heard(), list[str]()
    try:
        async for piece, _ in script.FRONTS[front](model, drawn, events):
            pieces += [piece] if piece else []
    except Exception as error:  # noqa: BLE001 - compared by the tests
        return pieces, events.all, error
    return pieces, events.all, None


@pytest.mark.parametrize("front", ["guard", "aguard", "router", "guarded", "graph", "server", "llm"])
async def test_an_error_within_a_sentence_ends_the_stream(
    script: ModuleType, make_language_model: Callable[..., LanguageModel], front: str
) -> None:
    def fail() -> None:
        raise MemoryError("gone")

    model = FixedModel.like(make_language_model(max_position_embeddings=4096))
    Steps(model).at(22, fail)
    pieces, events, error = await read(script, model, front, 1e9)
    assert pieces == [PIECES[0]]
    assert isinstance(error, MemoryError | AnswerFailedError) or '"code":"internal_error"' in events[-1]
    assert not [word for word in ("Milk", "Go.") if word in repr(events)]

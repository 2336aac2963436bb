"""`scripts/check_streams.py` in small: streams of nonces through all fronts, and a broken rule that it finds."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import AnswerInterruptedError
from semgrad_guard.guard import early_sentences


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "check_streams.py"
    spec = importlib.util.spec_from_file_location("check_streams", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


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


async def test_no_withheld_sentence_leaves(script: ModuleType, nonces: LanguageModel) -> None:
    found = await ends(script, nonces, 2)
    assert [end for end in found if not isinstance(end, str)] == []
    assert {str(end).partition(",")[0] for end in found} == set(script.FRONTS)


async def test_a_broken_rule_is_found(
    script: ModuleType, nonces: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle: Any = early_sentences.settle

    def lets_all_through(draft: Any, _: Policy, *given: Any, **named: Any) -> Any:
        return settle(draft, Policy(threshold=1e30), *given, **named)

    monkeypatch.setattr(early_sentences, "settle", lets_all_through)
    found = await ends(script, nonces, 3)
    broken = {front for number, front in enumerate(script.FRONTS) if any_fails(found[3 * number : 3 * number + 3])}
    assert len(broken) > 1, broken

"""Values of structured answers, withheld one by one: null in their place, in a stream of partial objects, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback
from semgrad_guard import Calibration, LanguageModel, Policy, Verdict
from semgrad_guard.guard import calibrate_fields, recording
from tests.engine.chat_templates import template as published_or_own
from tests.random_llama import CALLS

from .ways import Ears

PROMPT = PromptTemplate("A leaf for {name}, please.")


class Colour(Enum):
    """A closed set, so that a random model soon comes to an end."""

    RED = "crimson"
    GREEN = "viridian"


class Size(Enum):
    """Another."""

    SMALL = "minuscule"
    LARGE = "gargantuan"


class Leaf(BaseModel):
    """A leaf, of which either value may be missing."""

    colour: Colour | None
    size: Size | None


@pytest.fixture(scope="module")
def painter(make_language_model: Callable[..., LanguageModel]) -> SemGradLLM:
    model = make_language_model(chat_template=published_or_own("qwen2.5"), words=CALLS, max_position_embeddings=4096)
    return SemGradLLM.from_model(model, max_tokens=120)


@pytest.fixture(scope="module")
def by_field(painter: SemGradLLM) -> Calibration:
    """A rule that withholds about half of the values: the more uncertain half of those recorded counts as wrong."""
    with recording() as recorder:
        for number in range(40):
            painter.structured_predict(Leaf, PROMPT, name=str(number))
    scores = sorted(one.uncertainty or 0.0 for draft in recorder.drafts for one in draft.verdict.fields)
    middle = scores[len(scores) // 2]

    def right(verdict: Verdict) -> dict[str, Any]:
        found, scores = verdict.tool_calls[0].arguments, {one.path[0]: one.uncertainty or 0.0 for one in verdict.fields}
        return {name: value if scores[name] < middle else "another" for name, value in found.items()}

    rights = [right(draft.verdict) for draft in recorder.drafts]
    made = calibrate_fields(zip(recorder.drafts, rights, strict=True), alpha=0.3, delta=0.2)
    assert made.threshold is not None
    return made


@pytest.mark.parametrize("is_async", [False, True])
def test_partial_objects_of_a_stream_never_show_a_withheld_value(
    painter: SemGradLLM, by_field: Calibration, is_async: bool
) -> None:
    """Neither the objects nor any handler: `colour` is the doubtful value of this model."""
    guard = painter.model_copy(update={"router": UncertaintyRouterCallback(Policy.from_calibration(by_field))})
    ears = Ears()
    for name in ("1", "6", "11"):
        draft = painter.structured_predict(Leaf, PROMPT, name=name)
        assert draft.colour is not None
        with ears.listening():
            assert guard.structured_predict(Leaf, PROMPT, name=name) == Leaf(colour=None, size=draft.size)
            pieces = streamed(guard, name, is_async=is_async)
        assert pieces[-1] == Leaf(colour=None, size=draft.size)
        assert {getattr(piece, "colour", None) for piece in pieces} == {None}
        events = "".join(ears.heard).translate(str.maketrans("", "", "'\"\\"))
        assert f"size: {draft.size.value}" in events  # type: ignore[union-attr]
        assert f"colour: {draft.colour.value}" not in events


def streamed(llm: SemGradLLM, name: str, *, is_async: bool) -> list[Any]:
    """Every object of a stream."""

    async def pieces() -> list[Any]:
        return [piece async for piece in await llm.astream_structured_predict(Leaf, PROMPT, name=name)]

    return asyncio.run(pieces()) if is_async else list(llm.stream_structured_predict(Leaf, PROMPT, name=name))

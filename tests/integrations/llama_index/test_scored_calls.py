"""A call is scored if its text may be delivered: not one that condenses the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, SimpleChatEngine

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine, SemGradLLM
from semgrad_guard import HybridGrad, LanguageModel, Policy
from tests.pairwise import in_turn

from .conftest import PASSAGES, Passages
from .test_authorship import engine
from .test_chat_engine import say

LOOSE = Policy(threshold=1e308)


@dataclass(frozen=True)
class Counting(HybridGrad):
    """Notes what it scores."""

    seen: ClassVar[list[str]] = []

    def __call__(self, evidence: Any) -> Any:
        self.seen.append(evidence.text)
        return super().__call__(evidence)


@pytest.fixture
def counted(wide: LanguageModel) -> SemGradLLM:
    Counting.seen.clear()
    return SemGradLLM.from_model(wide, max_tokens=4, estimator=Counting())


CHATS: dict[str, Any] = {
    "condense": lambda llm: CondenseQuestionChatEngine.from_defaults(engine(llm), llm=llm),
    "condense and context": lambda llm: CondensePlusContextChatEngine.from_defaults(Passages(*PASSAGES), llm=llm),
    "simple": lambda llm: SimpleChatEngine.from_defaults(llm=llm),
}


@in_turn(kind=CHATS, way=["sync", "async"])
async def test_a_chat_engine_scores_its_answer_alone(kind: str, way: str, counted: SemGradLLM) -> None:
    chat = GuardedChatEngine(CHATS[kind](counted), LOOSE)
    for message in ("Where is Paris?", "And Oslo?"):
        Counting.seen.clear()
        text, response = await say(chat, way, message)
        assert Counting.seen == [text]
        assert response.metadata["semgrad_guard"]["uncertainty"] is not None


def test_every_author_is_scored(counted: SemGradLLM) -> None:
    response = GuardedQueryEngine(engine(counted, "accumulate"), LOOSE).query("Where is it?")
    assert len(Counting.seen) == len(PASSAGES)
    assert response.metadata["semgrad_guard"]["uncertainty"] is not None  # type: ignore[index]


def test_a_call_without_a_guard_is_scored(counted: SemGradLLM) -> None:
    response = counted.complete("Where is it?")
    assert Counting.seen == [response.text]

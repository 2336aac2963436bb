"""Sentences that a guarded engine leaves out are in no response, source, memory or event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode

from llama_index_semgrad_guard import (
    GuardedChatEngine,
    GuardedQueryEngine,
    SemGradLLM,
    UncertaintyEvaluator,
    UncertaintyRouterCallback,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import InputError, LowConfidenceError
from tests.fixed_model import PIECES, TEXT, FixedModel

from .conftest import Heard, Passages


@pytest.fixture(scope="module")
def fixed(wide: LanguageModel) -> LanguageModel:
    return FixedModel.like(wide)


@pytest.fixture
def llm(fixed: LanguageModel) -> SemGradLLM:
    return SemGradLLM.from_model(fixed, by="sentence", on_doubt="drop")


def surest(engine: Any, run: Callable[[Any], Any], guarded: Any) -> tuple[Any, str, list[str]]:
    """A guard that lets the surest sentence through, that sentence, and words of the others."""
    whole = run(guarded(engine, Policy(threshold=1e9))).metadata["semgrad_guard"]
    own = [sentence["uncertainty"] for sentence in whole["sentences"]]
    assert len(own) == len(PIECES)
    kept = own.index(min(own))
    others = [piece.split()[0] for number, piece in enumerate(PIECES) if number != kept]
    return guarded(engine, Policy(threshold=own[kept] * 1.001)), PIECES[kept], others


@pytest.mark.parametrize("streaming", [False, True])
def test_a_part_of_an_engines_answer(llm: SemGradLLM, recorder: Heard, streaming: bool) -> None:
    def run(engine: Any) -> Any:
        response = engine.query("Where is Paris?")
        return response.get_response() if streaming else response

    inner = RetrieverQueryEngine.from_args(Passages("Paris is in France."), llm=llm, streaming=streaming)
    guard, kept, others = surest(inner, run, GuardedQueryEngine)
    recorder.events.clear()
    response = run(guard)
    assert response.response == kept
    record = response.metadata["semgrad_guard"]
    assert sorted(sentence["action"] for sentence in record["sentences"]) == ["deliver", "drop", "drop"]
    verdicts = [event.record for event in recorder.verdicts]
    assert verdicts
    assert not [word for word in others if word in repr([response, verdicts])]


def test_a_part_in_the_memory(llm: SemGradLLM) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=2000, llm=llm)
    inner = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
    guard, kept, others = surest(inner, lambda engine: engine.chat("Tell me"), GuardedChatEngine)
    memory.reset()
    reply = guard.chat("Tell me")
    assert reply.response == kept
    assert [message.content for message in memory.get_all()] == ["Tell me", kept]
    assert not [word for word in others if word in repr([reply, memory.get_all()])]


def test_the_sentences_of_several_calls_are_one_answers_no_more(llm: SemGradLLM) -> None:
    passages = Passages("Paris is in France.", "Oslo is in Norway.")
    inner = RetrieverQueryEngine.from_args(passages, llm=llm, response_mode=ResponseMode.ACCUMULATE)

    def ask(policy: Policy) -> Any:
        return GuardedQueryEngine(inner, policy).query("Where?")

    whole = ask(Policy(threshold=1e9)).metadata["semgrad_guard"]
    assert (whole["sentences"], whole["action"]) == ([], "answer")
    below = Policy(threshold=whole["uncertainty"] / 2)
    assert ask(below).response == "I don't know."


def test_a_callback_lets_no_part_pass(fixed: LanguageModel) -> None:
    raw: Any = SemGradLLM.from_model(fixed, by="sentence").complete("q").raw
    own = raw["semgrad_guard"]["sentences"]
    policy = Policy(threshold=1.001 * min(sentence["uncertainty"] for sentence in own))
    manager = CallbackManager([UncertaintyRouterCallback(policy)])
    with pytest.raises(LowConfidenceError):
        SemGradLLM.from_model(fixed, by="sentence", on_doubt="drop", callback_manager=manager).complete("q")


@pytest.mark.parametrize("on_doubt", ["drop", "mark"])
def test_a_response_with_a_doubtful_sentence_does_not_pass(fixed: LanguageModel, on_doubt: Any) -> None:
    llm = SemGradLLM.from_model(fixed, by="sentence", on_doubt=on_doubt)
    own = sorted(sentence.uncertainty or 0.0 for sentence in llm.score("q", TEXT).sentences)
    for threshold, passes in ((own[1] * 1.001, False), (own[2] * 1.001, True)):
        result = UncertaintyEvaluator(llm, Policy(threshold=threshold)).evaluate(query="q", response=TEXT)
        assert result.passing is passes


def test_an_action_at_doubt_needs_sentences(fixed: LanguageModel) -> None:
    with pytest.raises(InputError, match='by="sentence"'):
        SemGradLLM.from_model(fixed, on_doubt="drop")
    llm = SemGradLLM.from_model(fixed, by="sentence", on_doubt="escalate")
    query = RetrieverQueryEngine.from_args(Passages("Paris is in France."), llm=llm)
    chat = SimpleChatEngine.from_defaults(llm=llm)
    policy = Policy(threshold=1.0)
    guards: list[tuple[Any, Any]] = [(GuardedQueryEngine, query), (GuardedChatEngine, chat)]
    for guard, engine in guards:
        with pytest.raises(InputError, match="lets a target finish an answer, and there is none"):
            guard(engine, policy)
        guard(engine, policy, mode="annotate")  # nothing is escalated

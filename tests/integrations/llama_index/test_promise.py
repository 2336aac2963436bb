"""What an engine's answer is promised: the user's own question, ended by the model, by a chain that was calibrated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import Response
from llama_index.core.chat_engine import CondenseQuestionChatEngine, SimpleChatEngine
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.prompts.mixin import PromptDictType, PromptMixinType
from llama_index.core.query_engine import CustomQueryEngine, TransformQueryEngine
from llama_index.core.schema import QueryBundle

from llama_index_semgrad_guard import (
    GuardedChatEngine,
    GuardedQueryEngine,
    GuardedReActAgent,
    SemGradLLM,
    calibrate_engine,
    get_verdict,
)
from semgrad_guard import Calibration, LanguageModel, Policy, calibrate
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard import binding_of, recording
from semgrad_guard.pocket import CALIBRATION_PATH

from .scripted import Scripted
from .test_agents import run

KNOWN, UNKNOWN = "What is the capital of Japan?", "What is the capital of Mongolia?"


class Direct(CustomQueryEngine):
    """Asks its model the question, and nothing else."""

    llm: Any

    def custom_query(self, query_str: str) -> str:
        return self.llm.complete(query_str).text


class Rewriting(BaseQueryTransform):
    """Asks a model how to put the question, if it has one, and puts another."""

    def __init__(self, into: str, llm: Any = None) -> None:
        self.into, self.llm = into, llm

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None: ...

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    def _run(self, query_bundle: QueryBundle, metadata: dict[str, Any]) -> QueryBundle:
        if self.llm is not None:
            self.llm.complete("Rewrite: " + query_bundle.query_str)
        return QueryBundle(self.into)


@pytest.fixture(scope="module")
def pocket() -> LanguageModel:
    return LanguageModel.from_pretrained("pocket")


@pytest.fixture(scope="module")
def closed_book() -> Policy:
    return Policy.from_calibration(Calibration.load(CALIBRATION_PATH))


@pytest.fixture
def speaker(pocket: LanguageModel) -> SemGradLLM:
    return SemGradLLM.from_model(pocket, max_tokens=16)


def promised(response: Any) -> bool:
    verdict = get_verdict(response)
    assert verdict is not None
    assert verdict.promised or verdict.unfamiliar or verdict.escalated_from
    return verdict.promised


def test_the_users_own_question_is_promised(speaker: SemGradLLM, closed_book: Policy) -> None:
    assert promised(GuardedQueryEngine(Direct(llm=speaker), closed_book).query(KNOWN))
    assert promised(GuardedQueryEngine(Direct(llm=speaker), closed_book).query(f" {KNOWN}\n"))
    assert promised(GuardedChatEngine(SimpleChatEngine.from_defaults(llm=speaker), closed_book).chat(KNOWN))


@pytest.mark.parametrize("question", [UNKNOWN, "Japan?", "capital of Japan"])
@pytest.mark.parametrize("by_a_model", [True, False])
async def test_a_rewritten_question_is_not(
    speaker: SemGradLLM, closed_book: Policy, question: str, by_a_model: bool
) -> None:
    """Even where the user's words occur in what has been made of them, if a model has made it."""
    if not by_a_model and question in KNOWN:
        return
    inner = TransformQueryEngine(Direct(llm=speaker), Rewriting(KNOWN, speaker if by_a_model else None))
    guarded = GuardedQueryEngine(inner, closed_book)
    for response in (guarded.query(question), await guarded.aquery(question)):
        assert str(response) == "Tokyo"
        assert not promised(response)


def test_a_condensed_question_is_not(speaker: SemGradLLM, pocket: LanguageModel, closed_book: Policy) -> None:
    condenser = Scripted.saying(pocket, lambda _prompt: (KNOWN, 0.9))
    history = [ChatMessage(role="user", content="Hello."), ChatMessage(role="assistant", content="Hello.")]
    inner = CondenseQuestionChatEngine.from_defaults(Direct(llm=speaker), llm=condenser, chat_history=history)
    reply = GuardedChatEngine(inner, closed_book).chat("And of Japan?")
    assert (str(reply), promised(reply)) == ("Tokyo", False)


def test_an_engine_that_was_calibrated_with_its_rewriting_promises(llm: SemGradLLM) -> None:
    """And a calibration with the users' own questions does not hold for it, though all prompts look alike."""
    question = "What is it?"
    engines = {True: TransformQueryEngine(Direct(llm=llm), Rewriting(question, llm)), False: Direct(llm=llm)}
    examples = [(f"What is {chr(97 + i // 26)}{chr(97 + i % 26)}?", ["any"]) for i in range(40)] + [(question, ["any"])]
    policies = dict[bool, Policy]()
    for rewrites, engine in engines.items():
        made = calibrate_engine(
            engine, examples, lambda *_: True, alpha=0.2, delta=0.2, grid=[1e300], max_concurrency=16, progress=False
        )
        assert made.shape is not None
        assert made.shape.rewritten is rewrites
        assert Calibration.model_validate_json(made.model_dump_json()).id == made.id
        policies[rewrites] = Policy.from_calibration(made)

    def promises(rewrites: bool, *, calibrated: bool) -> bool:
        return promised(GuardedQueryEngine(engines[rewrites], policies[calibrated]).query(question))

    assert promises(True, calibrated=True)
    assert promises(False, calibrated=False)
    assert not promises(True, calibrated=False)


@pytest.mark.parametrize("limits", [{"max_tokens": 1}, {"stop": ["k"]}])
async def test_an_answer_that_is_cut_off_is_not_promised(
    pocket: LanguageModel, closed_book: Policy, limits: dict[str, Any]
) -> None:
    short = SemGradLLM.from_model(pocket, **limits)
    query = GuardedQueryEngine(Direct(llm=short), closed_book)
    chat = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=short), closed_book)
    agent, _, _ = await run(GuardedReActAgent(llm=short, policy=closed_book))
    for response in (query.query(KNOWN), await query.aquery(KNOWN), chat.chat(KNOWN), agent):
        assert not promised(response)


def test_one_part_that_is_cut_off_is_enough(pocket: LanguageModel) -> None:
    """Though another part is the least certain one, whose score counts."""
    question = "Who founded Rome?"

    class Both(CustomQueryEngine):
        limits: tuple[int, int]

        def custom_query(self, query_str: str) -> str:
            parts = [SemGradLLM.from_model(pocket, max_tokens=limit).complete(query_str) for limit in self.limits]
            return "; ".join(part.text for part in parts)

    with recording() as recorder:
        GuardedQueryEngine(Both(limits=(16, 15)), Policy(threshold=0), aggregate="max").query(question)
    (one,) = recorder.drafts
    binding = binding_of(one.verdict).model_copy(update={"max_tokens": 16})

    def ends(**limits: Any) -> Policy:
        bound = binding.model_copy(update=limits)
        made = calibrate(
            range(100), [True] * 100, alpha=0.1, delta=0.1, grid=[50], prompts=[one.prompt] * 100, binding=bound
        )
        return Policy.from_calibration(made)

    policy = ends()
    assert promised(GuardedQueryEngine(Both(limits=(16, 15)), policy, aggregate="max").query(question))
    assert not promised(GuardedQueryEngine(Both(limits=(16, 1)), policy, aggregate="max").query(question))
    for cut in (ends(max_tokens=1), ends(stop=("v",))):  # the parts continue where those of the calibration ended
        assert not promised(GuardedQueryEngine(Both(limits=(16, 15)), cut, aggregate="max").query(question))
    assert promised(GuardedQueryEngine(Both(limits=(16, 15)), ends(stop=(";",)), aggregate="max").query(question))


@pytest.mark.parametrize("limits", [{"max_tokens": 1}, {"stop": ["k"]}])
def test_nor_is_it_by_a_calibration_of_the_engine(pocket: LanguageModel, limits: dict[str, Any]) -> None:
    """No answer of the calibration was cut off there."""
    countries = ("Japan", "France", "Italy", "Spain", "Norway", "Egypt", "Peru", "Cuba", "Chile", "Kenya", "India")
    examples = [(f"What is the capital of {country}?", ["any"]) for country in countries]
    engine = Direct(llm=SemGradLLM.from_model(pocket, max_tokens=32))
    made = calibrate_engine(
        engine, examples, lambda *_: True, alpha=0.5, delta=0.5, grid=[1e300], max_concurrency=16, progress=False
    )
    assert Calibration.model_validate_json(made.model_dump_json()) == made
    policy = Policy.from_calibration(made)
    assert promised(GuardedQueryEngine(engine, policy).query(KNOWN))
    short = Direct(llm=SemGradLLM.from_model(pocket, **limits))
    assert not promised(GuardedQueryEngine(short, policy).query(KNOWN))


# Chains.


@pytest.fixture(scope="module")
def make_policy(wide: LanguageModel) -> Callable[..., Policy]:
    """Policies that let everything or nothing through."""
    llm = Scripted.saying(wide, lambda _prompt: ("said", 0.5))

    def make(*, threshold: float, upstream: str | None = None) -> Policy:
        with recording() as recorder:
            GuardedQueryEngine(Direct(llm=llm), Policy(threshold=0)).query(KNOWN)
        (one,) = recorder.drafts
        binding = binding_of(one.verdict).model_copy(update={"upstream": upstream})
        scores, right = [threshold * i / 50 for i in range(100)], [True] * 100
        made = calibrate(
            scores, right, alpha=0.1, delta=0.1, grid=[threshold], prompts=[one.prompt] * 100, binding=binding
        )
        return Policy.from_calibration(made)

    return make


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("door", ["query", "chat"])
async def test_a_guard_in_a_function_is_promised_where_it_follows(
    wide: LanguageModel, make_policy: Callable[..., Policy], door: str, follows: bool
) -> None:
    llm = Scripted.saying(wide, lambda _prompt: ("said", 0.5))
    first = make_policy(threshold=0.1)
    second = make_policy(threshold=1.0, upstream=first.calibration_id if follows else None)
    if door == "query":
        target = GuardedQueryEngine(Direct(llm=llm), second)
        chain: Any = GuardedQueryEngine(Direct(llm=llm), first, escalate_to=lambda query: target.query(query))
        responses = [chain.query(KNOWN), await chain.aquery(KNOWN)]
    else:
        talk = GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), second)
        chain = GuardedChatEngine(
            SimpleChatEngine.from_defaults(llm=llm), first, escalate_to=lambda turns: talk.chat(turns[-1].content, [])
        )
        responses = [chain.chat(KNOWN), await chain.achat(KNOWN, [])]
    for response in responses:
        verdict = get_verdict(response)
        assert verdict is not None
        assert (verdict.action, verdict.status, verdict.promised) == ("escalate", "scored", follows)
    if not follows and door == "query":
        with pytest.raises(BindingMismatchError, match="harder than all questions"):
            GuardedQueryEngine(Direct(llm=llm), first, escalate_to=target)


async def test_a_text_beside_another_texts_record_is_not_promised(speaker: SemGradLLM, closed_book: Policy) -> None:
    guarded = GuardedQueryEngine(Direct(llm=speaker), closed_book)

    def lie(_query: str) -> Response:
        return Response("A lie", metadata=guarded.query(KNOWN).metadata)

    chain = GuardedQueryEngine(Direct(llm=speaker), closed_book, escalate_to=lie)
    for response in (chain.query(UNKNOWN), await chain.aquery(UNKNOWN)):
        verdict = get_verdict(response)
        assert verdict is not None
        assert (verdict.text, verdict.action, verdict.status) == ("A lie", "escalate", "unscored")
        assert not verdict.promised


async def test_an_agent_that_is_handed_a_question_promises_nothing(speaker: SemGradLLM, closed_book: Policy) -> None:
    """What the guard of another one does not let through is harder than what its own calibration is about."""
    policy = Policy.from_calibration(closed_book.calibration)  # type: ignore[arg-type]
    first = GuardedReActAgent(
        name="first", description="tries", llm=speaker, policy=Policy(threshold=-1.0), escalate_to="second"
    )
    second = GuardedReActAgent(name="second", description="knows", llm=speaker, policy=policy)
    output, _, _ = await run(AgentWorkflow(agents=[first, second], root_agent="first"))
    verdict = get_verdict(output)
    assert verdict is not None
    assert any("another guard has handed the question on" in reason for reason in verdict.unfamiliar)
    alone, _, _ = await run(second)
    verdict = get_verdict(alone)
    assert verdict is not None
    assert not any("another guard" in reason for reason in verdict.unfamiliar)

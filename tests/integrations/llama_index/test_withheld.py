"""What a withheld answer leaves behind, what may take its place, and what is refused at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, ReActAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine import CondenseQuestionChatEngine, SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import TransformQueryEngine
from llama_index.core.workflow import Context

from llama_index_semgrad_guard import (
    GuardedChatEngine,
    GuardedQueryEngine,
    GuardedReActAgent,
    LowConfidenceError,
    SemGradLLM,
    UncertaintyEvaluator,
    ask_person,
    get_verdict,
)
from semgrad_guard import LanguageModel, Policy, calibrate
from semgrad_guard.calibration import DriftMonitor
from semgrad_guard.errors import DeadlineExceededError, InputError

from .conftest import PASSAGES
from .scripted import Scripted
from .test_agents import run
from .test_authorship import City, Delegating, Rewritten, by_prompt, engine, router, sub_questions
from .test_query_engine import QUERY, ask

PASS, STOP = Policy(threshold=1e308), Policy(threshold=-1e308)
WAYS = ("sync", "async", "stream", "async stream")
Make = Callable[..., Scripted]


@pytest.fixture
def saying(wide: LanguageModel) -> Callable[..., Scripted]:
    return lambda script: Scripted.saying(wide, script)


# What a withheld answer leaves behind.


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("escalate_to", [None, lambda _: "elsewhere"])
def test_nothing_of_withheld_sub_answers_remains(escalate_to: Any, way: str, saying: Make) -> None:
    llm = saying(by_prompt(("Sub question", ("The secret whole", 0.9)), otherwise=("The secret part", 0.9)))
    inner = sub_questions(llm, engine(llm))
    assert "secret" in repr(ask(inner, way).source_nodes)
    response = ask(GuardedQueryEngine(inner, STOP, escalate_to=escalate_to), way)
    assert "secret" not in repr(response)
    assert {node.text for node in response.source_nodes} == set(PASSAGES)


def test_metadata_of_a_withheld_answer_is_about_its_passages(saying: Make) -> None:
    choice = '[{"choice": 1, "reason": "the secret reason"}]'
    llm = saying(by_prompt(("choices", (choice, 0.1)), otherwise=("The secret", 0.9)))
    inner = router(llm, engine(llm), engine(llm))
    assert "secret reason" in repr(inner.query(QUERY).metadata)
    response = GuardedQueryEngine(inner, STOP).query(QUERY)
    assert "secret" not in repr(response)
    assert {*response.metadata} == {"semgrad_guard", *(node.node_id for node in response.source_nodes)}  # type: ignore[misc]


def test_a_passage_that_was_changed_does_not_go_out(saying: Make) -> None:
    llm = saying(lambda _: ("The secret", 0.9))

    class Noting(Delegating):
        def custom_query(self, query_str: str) -> Any:
            response = self.inner.query(query_str)
            response.source_nodes[0].node.metadata["draft"] = str(response)
            return response

    response = GuardedQueryEngine(Noting(inner=engine(llm)), STOP).query(QUERY)
    assert "secret" not in repr(response)
    assert [node.text for node in response.source_nodes] == [PASSAGES[1]]


@pytest.mark.parametrize("reviewed", [True, False])
async def test_no_draft_stays_in_an_agents_context(reviewed: bool, saying: Make) -> None:
    llm = saying(lambda _: ("Thought: I know.\nAnswer: The secret.", 0.9))
    agent = GuardedReActAgent(llm=llm, policy=STOP, escalate_to=ask_person if reviewed else None)
    ctx = Context(agent)
    output, _, memory = await run(agent, answer="Ann's word", ctx=ctx)
    assert str(output) == ("Ann's word" if reviewed else "I don't know.")
    assert "secret" not in repr(ctx.to_dict()) + memory + repr(output)


async def test_a_failing_reviewer_leaves_no_draft_either(saying: Make) -> None:
    async def away(*_: Any) -> str:
        raise OSError("nobody there")

    llm = saying(lambda _: ("Thought: I know.\nAnswer: The secret.", 0.9))
    agent = GuardedReActAgent(llm=llm, policy=STOP, escalate_to=away)
    ctx = Context(agent)
    with pytest.raises(OSError, match="nobody there"):
        await run(agent, ctx=ctx)
    assert "secret" not in repr(await ctx.store.get("semgrad_guard_pending", default=None))
    agent = GuardedReActAgent(llm=llm, policy=STOP, escalate_to=away, on_error="abstain")
    output, _, memory = await run(agent)
    assert (str(output), output.raw["semgrad_guard"]["action"]) == ("I don't know.", "abstain")
    assert "secret" not in memory


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_failing_target_leaves_no_question_without_an_answer(way: str, llm: SemGradLLM) -> None:
    def failing(_: Any) -> str:
        raise OSError("down")

    def reply(guarded: GuardedChatEngine) -> str:
        return str(guarded.chat("Hello") if way == "sync" else asyncio.run(guarded.achat("Hello")))

    def make(**options: Any) -> GuardedChatEngine:
        memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
        inner = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
        return GuardedChatEngine(inner, STOP, escalate_to=failing, **options)

    raising, abstaining = make(), make(on_error="abstain", abstain_message=lambda verdict: f"No: {verdict.action}.")
    with pytest.raises(OSError, match="down"):
        reply(raising)
    assert [message.role.value for message in raising.chat_history] == ["user", "assistant"]
    assert reply(abstaining) == "No: abstain."
    assert [message.content for message in abstaining.chat_history] == ["Hello", "No: abstain."]


# What goes round the guard.


async def test_an_early_stop_never_goes_round_the_guard(saying: Make) -> None:
    def find(place: str) -> str:
        """Find a place."""
        return "found"

    def agent(**options: Any) -> GuardedReActAgent:
        llm = saying(lambda _: ('Thought: look.\nAction: find\nAction Input: {"place": "x"}', 0.1))
        return GuardedReActAgent(llm=llm, tools=[find], policy=STOP, **options)

    with pytest.raises(InputError, match="nobody scores"):
        agent(early_stopping_method="generate")
    ways = (
        agent().run(user_msg="?", max_iterations=2, early_stopping_method="generate"),
        AgentWorkflow(agents=[agent()], early_stopping_method="generate").run(user_msg="?", max_iterations=2),
        AgentWorkflow(agents=[agent()]).run(user_msg="?", max_iterations=2, early_stopping_method="generate"),
    )
    for handler in ways:
        with pytest.raises(InputError, match="nobody scores"):
            await handler
    handler = agent(mode="annotate").run(user_msg="?", max_iterations=2, early_stopping_method="generate")
    assert "look" in str(await handler)


# Targets.


@pytest.mark.parametrize("way", ["sync", "async"])
def test_an_annotating_target_does_not_deliver_what_it_rejects(way: str, saying: Make) -> None:
    llm = saying(lambda _: ("The secret", 0.9))
    target = GuardedQueryEngine(engine(llm), Policy(threshold=0.5), mode="annotate")
    response = ask(GuardedQueryEngine(engine(llm), STOP, escalate_to=target), way)
    assert (response.response, response.metadata["semgrad_guard"]["action"]) == ("I don't know.", "abstain")  # type: ignore[index]
    loose = GuardedQueryEngine(engine(llm), PASS, mode="annotate")
    assert ask(GuardedQueryEngine(engine(llm), STOP, escalate_to=loose), way).response == "The secret"


def test_what_cannot_be_asked_is_refused_at_once(llm: SemGradLLM, make_engine: Callable[..., BaseQueryEngine]) -> None:
    inner, simple = make_engine(), SimpleChatEngine.from_defaults(llm=llm)
    observing = GuardedQueryEngine(make_engine(), PASS, mode="observe")
    for target in (
        5,
        "engine",
        simple,
        GuardedQueryEngine,
        GuardedChatEngine(simple, PASS),
        ReActAgent(llm=llm),
        observing,
    ):
        with pytest.raises(InputError, match="escalate_to"):
            GuardedQueryEngine(inner, STOP, escalate_to=target)  # type: ignore[arg-type]
    for target in (5, inner, GuardedQueryEngine(inner, PASS)):
        with pytest.raises(InputError, match="escalate_to"):
            GuardedChatEngine(simple, STOP, escalate_to=target)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="escalate_to"):
        GuardedReActAgent(llm=llm, policy=STOP, escalate_to=5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is no query engine"):
        GuardedQueryEngine(simple, STOP)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is no chat engine"):
        GuardedChatEngine(inner, STOP)  # type: ignore[arg-type]


def test_a_guard_around_guarded_engines_is_refused_at_once(llm: SemGradLLM, make_engine: Any) -> None:
    guarded = GuardedQueryEngine(make_engine(), PASS)
    routed = router(llm, guarded, make_engine())
    for inner in (routed, TransformQueryEngine(routed, Rewritten(llm)), Delegating(inner=[{"a": (routed,)}])):
        with pytest.raises(InputError, match="guarded already"):
            GuardedQueryEngine(inner, PASS)
    with pytest.raises(InputError, match="guarded already"):
        GuardedChatEngine(CondenseQuestionChatEngine.from_defaults(routed, llm=llm), PASS)
    GuardedQueryEngine(sub_questions(llm, guarded), PASS)


def test_the_verdict_after_an_escalation_is_on_what_was_delivered(saying: Make) -> None:
    first, second = saying(lambda _: ("No", 0.9)), saying(lambda _: ("Yes", 0.2))
    target = GuardedQueryEngine(engine(second), Policy(threshold=0.5))
    verdict = get_verdict(GuardedQueryEngine(engine(first), Policy(threshold=0.5), escalate_to=target).query(QUERY))
    assert verdict is not None
    assert (verdict.text, verdict.action, verdict.uncertainty) == ("Yes", "escalate", 0.2)
    assert verdict.escalated_from is not None
    assert verdict.escalated_from.uncertainty == 0.9


# Time, drift, words.


def slow(_: Any) -> str:
    time.sleep(30)
    return "late"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_late_target_is_left_behind(way: str, make_engine: Any, llm: SemGradLLM) -> None:
    with pytest.raises(DeadlineExceededError):
        ask(GuardedQueryEngine(make_engine(), STOP, escalate_to=slow, timeout=1.0), way)
    withheld = ask(GuardedQueryEngine(make_engine(), STOP, escalate_to=slow, timeout=1.0, on_error="abstain"), way)
    assert withheld.response == "I don't know."
    chat = GuardedChatEngine(
        SimpleChatEngine.from_defaults(llm=llm), STOP, escalate_to=slow, timeout=1.0, on_error="abstain"
    )
    assert str(chat.chat("Hello") if way == "sync" else asyncio.run(chat.achat("Hello"))) == "I don't know."


@pytest.mark.parametrize("way", ["sync", "async"])
def test_an_inner_engine_that_is_late_is_left_behind(way: str) -> None:
    class Slow(Delegating):
        inner: Any = None

        def custom_query(self, query_str: str) -> Any:
            return slow(query_str)

        async def acustom_query(self, query_str: str) -> Any:
            await asyncio.sleep(30)
            return "late"

    with pytest.raises(DeadlineExceededError):
        ask(GuardedQueryEngine(Slow(), PASS, timeout=0.2), way)
    assert ask(GuardedQueryEngine(Slow(), PASS, timeout=0.2, on_error="abstain"), way).response == "I don't know."


async def test_monitors_hear_every_answer_unscored_ones_too(make_engine: Any, llm: SemGradLLM) -> None:
    class Counting(DriftMonitor):
        """Counts the scores that a monitor gets."""

        def add(self, uncertainty: float | None) -> Any:
            received.append(uncertainty)
            return super().add(uncertainty)

    received: list[float | None] = []
    scores = [i / 100 for i in range(100)]
    monitor: Any = Counting(calibrate(scores, [True] * 100, alpha=0.2, delta=0.2))
    response = GuardedQueryEngine(make_engine(), PASS, monitor=monitor).query(QUERY)
    assert response.metadata["semgrad_guard"]["drift"] is False  # type: ignore[index]
    GuardedQueryEngine(make_engine(passages=()), PASS, monitor=monitor).query(QUERY)
    GuardedChatEngine(SimpleChatEngine.from_defaults(llm=llm), PASS, monitor=monitor).chat("Hello")
    await run(
        GuardedReActAgent(llm=SemGradLLM.from_model(llm.language_model, max_tokens=8), policy=PASS, monitor=monitor)
    )
    assert [score is None for score in received] == [False, True, False, False]


def test_promises_are_none_without_a_calibration(make_engine: Any, llm: SemGradLLM) -> None:
    engines = [GuardedQueryEngine(make_engine(), PASS), GuardedReActAgent(llm=llm, policy=PASS)]
    assert [engine.promise for engine in engines] == [None, None]


def test_the_words_of_an_abstention_may_be_a_function(make_engine: Any) -> None:
    guarded = GuardedQueryEngine(make_engine(), STOP, abstain_message=lambda verdict: f"({verdict.action})")
    assert str(guarded.query(QUERY)) == "(abstain)"
    with pytest.raises(LowConfidenceError):
        GuardedQueryEngine(make_engine(), STOP, mode="raise").query(QUERY)


def test_evaluating_a_text_or_a_live_stream_is_refused(llm: SemGradLLM, make_engine: Any) -> None:
    evaluator = UncertaintyEvaluator(llm, PASS)
    live = make_engine(streaming=True).query(QUERY)
    for response in ("Paris", live, 5):
        with pytest.raises(InputError, match="evaluate_response"):
            evaluator.evaluate_response(query=QUERY, response=response)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="evaluate_response"):
        asyncio.run(evaluator.aevaluate_response(query=QUERY, response="Paris"))  # type: ignore[arg-type]


# What an engine prints or streams.


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_verbose_engine_is_silent_where_answers_may_be_withheld(
    way: str, saying: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = saying(by_prompt(("Sub question", ("The secret whole", 0.9)), otherwise=("The secret part", 0.9)))
    for mode, printed in (("annotate", True), ("enforce", False), ("raise", False)):
        inner: Any = sub_questions(llm, engine(llm))
        inner._verbose = True
        nested = router(saying(lambda _: ('[{"choice": 1, "reason": "secret"}]', 0.1)), inner, inner)
        nested._verbose = True
        for wrapped in (inner, nested):
            guarded = GuardedQueryEngine(wrapped, STOP if mode != "raise" else PASS, mode=mode)  # type: ignore[arg-type]
            ask(guarded, way)
            assert ("secret" in capsys.readouterr().out) is printed


@pytest.mark.parametrize("mode", ["refine", "compact"])
def test_streams_of_structures_are_refused(mode: str, saying: Make) -> None:
    llm = saying(lambda _: ('{"name": "Paris"}', 0.1))
    streaming: Any = engine(llm, mode, output_cls=City, streaming=True)
    for inner in (streaming, Delegating(inner=streaming), router(llm, streaming, streaming)):
        with pytest.raises(InputError, match="leave out streaming=True"):
            GuardedQueryEngine(inner, PASS)
    with pytest.raises(InputError, match="leave out streaming=True"):
        GuardedChatEngine(CondenseQuestionChatEngine.from_defaults(streaming, llm=llm), PASS)
    late: Any = engine(llm, mode, output_cls=City)
    guarded = GuardedQueryEngine(late, PASS)
    late._response_synthesizer._streaming = True
    for way in WAYS:
        with pytest.raises(InputError, match="leave out streaming=True"):
            ask(guarded, way)

"""Questions: the first refused call ends one, its score is the greatest of its calls', and no two of them mix."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.chat_engine import CondenseQuestionChatEngine, SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from pydantic import BaseModel

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback, asking, guarded
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import InputError, LowConfidenceError, UnenforcedPolicyError

from .conftest import Passages
from .ways import CANARY, WITHHELD, Steps, reading, router_of, scripted, verdict_of

QUERY = "Where is it?"


def by_call(*scores: float) -> tuple[Any, list[str]]:
    """A script with a score for each call in order, and the prompts so far."""
    prompts: list[str] = []

    def script(prompt: str) -> tuple[str, float]:
        prompts.append(prompt)
        return f"answer {len(prompts)}", scores[min(len(prompts), len(scores)) - 1]

    return script, prompts


@pytest.mark.parametrize(("scores", "calls"), [((0.01, 0.05), 2), ((0.9, 0.01), 1), ((0.01, 0.9), 2)])
def test_the_score_is_the_greatest_and_the_first_refusal_ends_it(
    scores: tuple[float, ...], calls: int, wide: LanguageModel
) -> None:
    script, prompts = by_call(*scores)
    llm = scripted(wide, script)
    response = guarded(reading(llm, response_mode="accumulate", use_async=False), llm.router).query(QUERY)
    verdict = verdict_of(response)
    assert (len(prompts), verdict.uncertainty) == (calls, max(scores))
    assert (str(response) == WITHHELD) is (max(scores) > 0.1)


def by_user(prompt: str) -> tuple[str, float]:
    return "the words of everybody's passage", 0.9 if "USER-A" in prompt else 0.01


def of(response: Any) -> tuple[str, float | None]:
    verdict = verdict_of(response)
    return str(response), verdict.uncertainty


def test_questions_at_the_same_time_never_mix(wide: LanguageModel) -> None:
    """One LLM, one engine, two users whose answers repeat each other's words, and unguarded calls in between."""
    llm = scripted(wide, by_user)
    engine = guarded(reading(llm, response_mode="refine"), llm.router)
    users = [f"USER-{'AB'[number % 2]}?" for number in range(24)]
    expected = [(WITHHELD, 0.9) if "A" in user[-2:] else ("the words of everybody's passage", 0.01) for user in users]
    stop = threading.Event()

    def others() -> None:
        while not stop.is_set():
            llm.complete("USER-A: a title")

    beside = threading.Thread(target=others)
    beside.start()
    try:
        with ThreadPoolExecutor(24) as pool:
            assert list(pool.map(lambda user: of(engine.query(user)), users)) == expected

        async def together() -> list[Any]:
            return [of(one) for one in await asyncio.gather(*(engine.aquery(user) for user in users))]

        assert asyncio.run(together()) == expected
    finally:
        stop.set()
        beside.join()


def test_scores_are_those_of_the_question_alone(llm: SemGradLLM) -> None:
    """The model itself: 24 guarded queries at once in threads and in one loop."""
    router = UncertaintyRouterCallback(Policy(threshold=1e308, on_cut="score"))
    own = llm.model_copy(update={"router": router})
    engine = guarded(RetrieverQueryEngine.from_args(Passages("Paris is in France."), llm=own), router)
    questions = [f"Where is place {number % 6}?" for number in range(24)]
    alone = {question: of(engine.query(question))[1] for question in questions[:6]}
    with ThreadPoolExecutor(24) as pool:
        threaded = list(pool.map(lambda question: of(engine.query(question))[1], questions))

    async def together() -> list[Any]:
        return [of(one)[1] for one in await asyncio.gather(*(engine.aquery(question) for question in questions))]

    for found in (threaded, asyncio.run(together())):
        assert found == pytest.approx([alone[question] for question in questions], rel=1e-6)


def test_helpers_are_declared(wide: LanguageModel) -> None:
    """Their doubt does not count; one that is not declared is an error, not an unguarded answer."""
    llm = scripted(wide, lambda _: ("fine", 0.01))
    helper = scripted(wide, lambda _: ("standalone", 0.9), router=False)
    chat = CondenseQuestionChatEngine.from_defaults(reading(llm), llm=helper, memory=ChatMemoryBuffer.from_defaults())
    engine = guarded(chat, llm.router)
    assert [str(engine.chat("one")), str(engine.chat("two"))] == ["fine", "fine"]
    assert "semgrad_guard" not in helper.complete(QUERY).raw
    for stranger in (SemGradLLM.from_model(wide), scripted(wide, lambda _: ("fine", 0.01))):
        with pytest.raises(UnenforcedPolicyError, match="without the question's router"):
            guarded(reading(stranger), llm.router).query(QUERY)


def test_a_question_of_another_router_within_is_decided_by_itself(wide: LanguageModel) -> None:
    outer, doubtful = scripted(wide, lambda _: ("fine", 0.01)), scripted(wide, lambda _: (CANARY, 0.9))
    inner = guarded(reading(doubtful), doubtful.router)

    class Both(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            return f"{inner.query(query_str)}, {outer.complete(query_str)}"

    assert of(guarded(Both(), outer.router).query(QUERY)) == (f"{WITHHELD}, fine", 0.01)

    class Hidden(CustomQueryEngine):
        """Calls the outer question's LLM within the inner question."""

        def custom_query(self, query_str: str) -> str:
            return str(outer.complete(query_str))

    outer.script = lambda _: (CANARY, 0.9)
    within = guarded(Hidden(), doubtful.router)

    class Around(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            return str(within.query(query_str))

    assert str(guarded(Around(), outer.router).query(QUERY)) == WITHHELD


def test_a_call_in_a_bare_thread_decides_by_itself(wide: LanguageModel) -> None:
    """It is not counted, and never unguarded."""
    llm = scripted(wide, lambda _: (CANARY, 0.9))

    class Bare(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            found: list[str] = []
            thread = threading.Thread(target=lambda: found.append(str(llm.complete(query_str))))
            thread.start()
            thread.join()
            return found[0]

    response = guarded(Bare(), llm.router).query(QUERY)
    assert (str(response), verdict_of(response).reason) == (WITHHELD, "no guarded model has answered")


@pytest.mark.parametrize(("on_unscored", "text"), [("abstain", WITHHELD), ("answer", "Empty Response")])
def test_where_nothing_is_retrieved_no_model_answers(on_unscored: Any, text: str, wide: LanguageModel) -> None:
    llm = scripted(wide, lambda _: (CANARY, 0.9), on_unscored=on_unscored)
    engine = guarded(RetrieverQueryEngine.from_args(Passages(), llm=llm), llm.router)
    assert str(engine.query(QUERY)) == text


def test_an_answer_without_a_score(wide: LanguageModel) -> None:
    """As the policy has it: the question ends, or its score is unknown."""
    for on_unscored, text in (("abstain", WITHHELD), ("answer", "answer 2")):
        script = iter([("answer 1", None), ("answer 2", 0.01)])
        llm = scripted(wide, lambda _, script=script: next(script), on_unscored=on_unscored)
        response = guarded(reading(llm, response_mode="refine"), llm.router).query(QUERY)
        assert of(response) == (text, None)


@pytest.mark.parametrize("error", [ValueError("it broke"), InputError("wrong use")])
def test_an_engine_that_fails(error: Exception, wide: LanguageModel) -> None:
    """`on_error` decides, but not about mistakes in the use of the guard."""
    llm = scripted(wide, lambda _: ("fine", 0.01), on_error="abstain")

    class Failing(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            llm.complete(query_str)
            raise error

    if isinstance(error, InputError):
        with pytest.raises(InputError, match="wrong use"):
            guarded(Failing(), llm.router).query(QUERY)
    else:
        response = guarded(Failing(), llm.router).query(QUERY)
        assert str(response) == WITHHELD
        assert verdict_of(response).reason == "the engine failed (ValueError)"
    llm.router = router_of()
    with pytest.raises(type(error)):
        guarded(Failing(), llm.router).query(QUERY)


def test_the_target_answers_the_question(wide: LanguageModel) -> None:
    """It gets the engine's question, also where a later call was refused, and runs outside of it."""
    larger = scripted(wide, lambda prompt: (f"larger on {prompt}", 0.01))
    events: list[Any] = []
    for target in (lambda question: events.append(question) or "a function", larger, reading(larger)):
        script, _ = by_call(0.01, 0.9)
        llm = scripted(wide, script, escalate_to=target)
        response = guarded(reading(llm, response_mode="refine"), llm.router).query(QUERY)
        verdict = verdict_of(response)
        assert (verdict.action, CANARY in str(response)) == ("escalate", False)
    assert events == [QUERY]
    doubtful = scripted(wide, lambda _: (CANARY, 0.9))
    llm = scripted(wide, lambda _: (CANARY, 0.9), escalate_to=doubtful)
    assert str(guarded(reading(llm), llm.router).query(QUERY)) == WITHHELD
    assert llm.complete(QUERY).text == WITHHELD


async def test_own_code_and_workflows_within_asking(wide: LanguageModel) -> None:
    llm = scripted(wide, by_call(0.01, 0.9)[0])
    flow = Steps(timeout=20)
    flow.llm = llm
    with asking(llm.router) as question:
        await flow.run()
        raise AssertionError("the block ends with the refused call")
    assert question.refused is not None
    assert [verdict.uncertainty for verdict in question.verdicts] == [0.01, 0.9]
    assert CANARY not in repr(question.verdicts)
    with pytest.raises(ZeroDivisionError), asking(llm.router):
        _ = 1 / 0


def test_a_stream_belongs_to_the_question_in_which_it_was_asked_for(wide: LanguageModel) -> None:
    llm = scripted(wide, lambda _: (CANARY, 0.9))
    with asking(llm.router) as question:
        stream = llm.stream_complete(QUERY)
    assert question.refused is None
    with pytest.raises(LowConfidenceError):
        list(stream)
    assert question.refused is not None


@pytest.mark.parametrize("mode", ["enforce", "annotate"])
def test_streams_are_live_where_nothing_may_be_withheld(mode: Any, wide: LanguageModel) -> None:
    llm = scripted(wide, lambda _: ("a long answer", 0.9), mode=mode)
    pieces = [piece.delta for piece in llm.stream_complete(QUERY)]
    assert "".join(pieces) == ("a long answer" if mode == "annotate" else WITHHELD)
    assert (len(pieces) > 2) is (mode == "annotate")
    response = guarded(reading(llm, streaming=True), llm.router).query(QUERY)
    assert "".join(response.response_gen) == ("a long answer" if mode == "annotate" else WITHHELD)
    verdict = verdict_of(response)
    assert (verdict.action, verdict.details.enforced) == ("abstain", mode == "enforce")


def test_a_chat_goes_on_after_an_abstention(wide: LanguageModel) -> None:
    llm = scripted(wide, lambda prompt: (CANARY, 0.9) if prompt.endswith("BAD?") else ("fine", 0.01))
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    engine = guarded(SimpleChatEngine.from_defaults(llm=llm, memory=memory), llm.router)
    assert [str(engine.chat(text)) for text in ("hello", "BAD?", "again")] == ["fine", WITHHELD, "fine"]
    assert [message.content for message in memory.get_all()] == ["hello", "fine", "BAD?", WITHHELD, "again", "fine"]
    engine.reset()
    assert engine.chat_history == []
    own = ChatMemoryBuffer.from_defaults(token_limit=3000)
    around = guarded(SimpleChatEngine.from_defaults(llm=llm, memory=memory), llm.router, memory=own)
    around.chat("BAD?")
    assert [message.content for message in own.get_all()] == ["BAD?", WITHHELD]


def test_prompts_are_the_engines_own(wide: LanguageModel) -> None:
    llm = scripted(wide, lambda _: ("fine", 0.01))
    inner = reading(llm)
    engine = guarded(inner, llm.router)
    (name, *_), given = engine.get_prompts(), next(iter(engine.get_prompts().values()))
    engine.update_prompts({name: given.partial_format(context_str="nothing")})
    assert inner.get_prompts()[name] != given


@pytest.mark.parametrize("given", [SemGradLLM, "engine", None])
def test_wrong_use_is_named(given: Any, wide: LanguageModel) -> None:
    with pytest.raises(InputError, match="asking"):
        guarded(given, router_of())
    with pytest.raises(InputError, match="UncertaintyRouterCallback"):
        guarded(reading(scripted(wide, by_user)), Policy(threshold=1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="UncertaintyRouterCallback"):
        SemGradLLM.from_model(wide, router=Policy(threshold=1))
    llm = scripted(wide, by_user)
    for engine, memory in (
        (reading(llm), ChatMemoryBuffer.from_defaults()),
        (SimpleChatEngine.from_defaults(llm=llm), []),
    ):
        with pytest.raises(InputError, match="memory"):
            guarded(engine, llm.router, memory=memory)  # type: ignore[call-overload]


# A target's own count of its tokens, as LlamaIndex's integrations keep it.

OPENAI = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
ANTHROPIC = {"input_tokens": 7, "output_tokens": 3}


class Usage(BaseModel):
    """A provider's own class."""

    prompt_tokens: int = 7
    completion_tokens: int = 3


class Sent(BaseModel):
    """A provider's response, as its client parses it."""

    usage: Usage | None = None


@pytest.mark.parametrize("asks", ["complete", "chat"])
@pytest.mark.parametrize(
    ("kept", "counted"),
    [
        ({"raw": {"usage": OPENAI}}, True),
        ({"raw": {"usage": ANTHROPIC}}, True),
        ({"raw": Sent(usage=Usage())}, True),
        ({"raw": Sent(), "additional_kwargs": OPENAI}, True),
        ({"additional_kwargs": OPENAI}, True),
        ({"raw": {"usage": None}}, False),
        ({"raw": {"usage": {"prompt_tokens": None, "completion_tokens": "3"}}}, False),
        ({}, False),
    ],
)
def test_a_targets_own_count_of_tokens_is_kept(
    wide: LanguageModel, kept: dict[str, Any], counted: bool, asks: str
) -> None:
    answers = {
        "complete": CompletionResponse(text="larger", **kept),
        "chat": ChatResponse(message=ChatMessage(role="assistant", content="larger"), **kept),
    }
    llm = scripted(wide, lambda _: (CANARY, 0.9), escalate_to=lambda _: answers[asks])
    response = llm.complete("q") if asks == "complete" else llm.chat([ChatMessage("q")])
    verdict = verdict_of(response)
    assert verdict.text == "larger"
    details = verdict.details
    assert (details.prompt_tokens, details.answer_tokens) == ((7, 3) if counted else (None, None))


@pytest.mark.parametrize(
    ("option", "value"), [("by", "word"), ("estimator", 5), ("context_window", 0), ("top_logprobs", 21)]
)
def test_a_wrong_field_is_named(option: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{option}: |^5 is no estimator"):
        SemGradLLM("pocket", **{option: value})


@pytest.mark.parametrize("target", ["another model", 5, SimpleChatEngine])
def test_a_target_is_something_that_can_be_asked(target: Any) -> None:
    with pytest.raises(InputError, match="escalate_to"):
        router_of(escalate_to=target)

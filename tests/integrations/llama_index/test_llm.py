"""`SemGradLLM`: eight methods, one answer, one score, one pair of events; it stops where its reader leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from threading import Event
from typing import Any, Literal

import pytest
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ImageBlock,
    LLMMetadata,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import CustomLLM
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, PrivateAttr
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_index_semgrad_guard import SemGradLLM, UncertaintyEvaluator, UncertaintyRouterCallback, guarded
from semgrad_guard import LanguageModel, Policy, calibrate
from semgrad_guard.errors import EmptyResponseError, InputError, LowConfidenceError, UnsupportedToolsError
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.guard.decision import binding_of
from semgrad_guard.guard.question import recording
from tests.engine.chat_templates import template
from tests.pairwise import in_turn
from tests.steps import LIMIT, Steps, until, until_stopped
from tests.thinking import ANSWERS, THOUGHTS, thinking_model, written

from .conftest import Heard
from .ways import LLM_WAYS, MESSAGES, reading, verdict_of
from .ways import QUERY as QUESTION

METHODS = [name for name in LLM_WAYS if name.removeprefix("a").removeprefix("stream_") in ("chat", "complete")]


def _text(response: Any) -> str:
    return response.text if hasattr(response, "text") else response.message.content


def answered(llm: SemGradLLM, method: str) -> Any:
    """The response of one of LlamaIndex's eight methods; of a stream the last piece."""
    found: Any = LLM_WAYS[method](llm)  # type: ignore[arg-type]
    pieces = found if isinstance(found, list) else []
    assert not pieces or "".join(piece.delta for piece in pieces) == _text(pieces[-1])
    return pieces[-1] if pieces else found


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_scored_answer_with_one_pair_of_events(
    method: str, llm: SemGradLLM, recorder: Heard
) -> None:
    expected = llm.complete(QUESTION)
    recorder.events.clear()
    response = answered(llm, method)
    assert len(METHODS) == 8
    assert _text(response) == expected.text
    record = response.raw["semgrad_guard"]
    assert record["uncertainty"] == pytest.approx(expected.raw["semgrad_guard"]["uncertainty"])
    assert response.additional_kwargs == {"semgrad_guard": record}
    assert response.raw["usage"] == expected.raw["usage"]
    for end in ("StartEvent", "EndEvent"):
        assert sum(type(event).__name__.endswith(end) for event in recorder.events) == 1


def test_the_score_never_enters_the_message(llm: SemGradLLM) -> None:
    assert llm.chat(MESSAGES).message.additional_kwargs == {}


async def test_the_async_methods_leave_the_event_loop_free(wide: LanguageModel) -> None:
    llm, free, steps = SemGradLLM.from_model(wide, max_tokens=4), Event(), Steps(wide)
    steps.at(2, lambda: until(free.is_set))
    task = asyncio.create_task(llm.acomplete(QUESTION))
    await asyncio.to_thread(steps.reached.wait, LIMIT)
    free.set()  # by the loop, in the midst of the answer
    assert (await task).text
    steps.in_all()


def test_options_of_a_call(llm: SemGradLLM) -> None:
    assert llm.complete(QUESTION, max_tokens=1).raw["usage"]["completion_tokens"] == 1
    with pytest.raises(InputError, match="takes no tools"):
        llm.complete(QUESTION, tools=[])
    with pytest.raises(InputError, match="takes no maxtokens"):
        SemGradLLM(maxtokens=3)
    with pytest.raises(InputError, match="loaded already: set dtype"):
        SemGradLLM.from_model(llm.language_model, dtype="float32")


def test_what_a_text_model_cannot_read_is_named(llm: SemGradLLM) -> None:
    with pytest.raises(InputError, match="message 1 holds a ImageBlock"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://example.org/a.png")])])
    given: Any
    for given in (None, 5, [None], [{"role": "user", "content": "q"}]):
        with pytest.raises(InputError, match="a prompt is a text"):
            llm.complete(given)
        with pytest.raises(InputError, match="a prompt is a text"):
            llm.score(given, "text")
    with pytest.raises(InputError, match="a response must be a text"):
        llm.score("q", given)
    with pytest.raises(InputError, match="tools is a list"):
        llm.chat([ChatMessage("q")], tools=5)


class Town(BaseModel):
    """One of two."""

    name: Literal["Rome", "Oslo"]


@pytest.mark.parametrize("way", ["structured", "streamed", "async", "async, streamed", "as_structured_llm"])
def test_a_structure_of_a_model_without_tools(way: str, wide: LanguageModel) -> None:
    """It is JSON in its form; withheld it is an error, and neither a text nor an empty object."""
    strict = UncertaintyRouterCallback(Policy(threshold=-1.0))
    for router, is_withheld in ((None, False), (strict, True)):
        llm = SemGradLLM.from_model(wide, max_tokens=40, router=router)
        with pytest.raises(LowConfidenceError) if is_withheld else nullcontext():
            assert isinstance(_structured(llm, way), Town)


def _structured(llm: SemGradLLM, way: str) -> Any:
    given: Any = (Town, PromptTemplate("A town."))

    async def pieces() -> list[Any]:
        return [piece async for piece in await llm.astream_structured_predict(*given)]

    ways: dict[str, Callable[[], Any]] = {
        "structured": lambda: llm.structured_predict(*given),
        "streamed": lambda: list(llm.stream_structured_predict(*given))[-1],
        "async": lambda: asyncio.run(llm.astructured_predict(*given)),
        "async, streamed": lambda: asyncio.run(pieces())[-1],
        "as_structured_llm": lambda: llm.as_structured_llm(Town).complete("A town.").raw,
    }
    return ways[way]()


def test_an_llm_from_a_dictionary_never_loses_its_router() -> None:
    rules = UncertaintyRouterCallback(Policy(threshold=0.1))
    fields = SemGradLLM(model="pocket", router=rules).to_dict()
    with pytest.raises(InputError, match="router is UncertaintyRouterCallback"):
        SemGradLLM.from_dict(fields)
    assert SemGradLLM.from_dict(fields, router=rules).router == rules
    assert SemGradLLM.from_dict(SemGradLLM(model="pocket", router=False).to_dict()).router is False
    assert SemGradLLM.from_dict(SemGradLLM(model="pocket").to_dict()).router is None


def test_metadata(llm: SemGradLLM, language_model: LanguageModel) -> None:
    assert (llm.metadata.context_window, llm.metadata.num_output) == (4096, 4)
    assert SemGradLLM.from_model(language_model).metadata.context_window == 1024
    unloaded = SemGradLLM(model="no/such-model", context_window=2048)
    assert unloaded.metadata.context_window == 2048
    assert unloaded.to_payload()["model_name"] == "no/such-model"


def test_from_huggingface_llm(checkpoint: Any) -> None:
    """What LlamaIndex's class holds once it has loaded a checkpoint (0.8.0); it is not a dependency."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)

    class HuggingFaceLLM(CustomLLM):
        model_name: str = "its/default"
        context_window: int = 200
        max_new_tokens: int = 3
        _model: Any = PrivateAttr(default=model)
        _tokenizer: Any = PrivateAttr(default=tokenizer)

        @property
        def metadata(self) -> Any:
            return LLMMetadata()

        def complete(self, *_: Any, **__: Any) -> Any: ...

        def stream_complete(self, *_: Any, **__: Any) -> Any: ...

    theirs = HuggingFaceLLM(system_prompt="Be brief.")
    llm = SemGradLLM.from_huggingface_llm(theirs)
    answer = llm.complete(QUESTION)
    assert answer.raw["model"] == str(checkpoint)
    assert (answer.raw["usage"]["completion_tokens"], llm.metadata.context_window) == (3, 200)
    assert (llm.system_prompt, llm.callback_manager) == ("Be brief.", theirs.callback_manager)
    assert SemGradLLM.from_huggingface_llm(theirs, max_tokens=1).max_tokens == 1
    assert not any(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(InputError, match="holds no loaded model"):
        SemGradLLM.from_huggingface_llm(object())


def test_a_text_is_scored_whoever_wrote_it(llm: SemGradLLM) -> None:
    verdict = llm.score(QUESTION, "Paris")
    assert (verdict.status, verdict.text) == ("scored", "Paris")
    assert verdict.uncertainty == pytest.approx(llm.score(MESSAGES, "Paris").uncertainty)
    with pytest.raises(EmptyResponseError):
        llm.score(QUESTION, " ")


TOOLS_TEMPLATE = template("qwen2.5")
THOUGHT = ChatMessage(role="assistant", blocks=[ThinkingBlock(content="SECRET"), TextBlock(text="Hi.")])
CALLS: dict[str, ChatMessage] = {
    "block": ChatMessage(
        role="assistant", blocks=[ToolCallBlock(tool_name="look", tool_kwargs={"what": "up"}, tool_call_id="1")]
    ),
    "torn block": ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="look", tool_kwargs='{"what')]),
    "beside": ChatMessage(
        role="assistant",
        additional_kwargs={"tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]},
    ),
}
RESULT = ChatMessage(role="tool", content="found", additional_kwargs={"tool_call_id": "1"})


@in_turn(kind=CALLS, tools=[False, True])
async def test_what_other_models_of_a_conversation_did(
    kind: str, tools: bool, make_language_model: Callable[..., LanguageModel]
) -> None:
    given = {"chat_template": TOOLS_TEMPLATE} if tools else {}
    model = make_language_model(max_position_embeddings=4096, **given)
    llm = SemGradLLM.from_model(model, max_tokens=2)
    messages = [ChatMessage(content="Hello"), THOUGHT, CALLS[kind], RESULT, ChatMessage(content="Where?")]
    with recording() as recorder:
        llm.chat(messages)
        await llm.achat(messages)
        list(llm.stream_chat(messages))
        assert [piece async for piece in await llm.astream_chat(messages)]
    texts = [draft.prompt.text for draft in recorder.drafts if draft.prompt is not None]
    assert len(texts) == 4
    for text in texts:
        assert ("SECRET" in text, "found" in text) == (False, True)
        assert ("look" in text) is tools
    if tools:
        assert llm.score(messages, "Paris").uncertainty != llm.score([messages[0], *messages[3:]], "Paris").uncertainty
    else:
        with pytest.raises(UnsupportedToolsError):
            llm.score(messages, "Paris")


def test_a_call_in_an_unknown_form_is_named(llm: SemGradLLM) -> None:
    message = ChatMessage(role="assistant", additional_kwargs={"tool_calls": [{"what": 1}]})
    with pytest.raises(InputError, match="message 1 holds a tool call in an unknown form"):
        llm.chat([message])


@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_of_the_delivered_answer(method: str, wide: LanguageModel) -> None:
    response = answered(SemGradLLM.from_model(wide, max_tokens=4, logprobs=True), method)
    (tokens,) = zip(*response.logprobs, strict=True)
    assert bytes(byte for token in tokens for byte in token.bytes).decode(errors="replace").startswith(_text(response))
    gnll = response.raw["semgrad_guard"]["details"]["gnll"]
    assert -sum(token.logprob for token in tokens) == pytest.approx(gnll, rel=1e-4)
    likeliest = answered(SemGradLLM.from_model(wide, max_tokens=4, logprobs=True, top_logprobs=2), method)
    for (own, first, second), (alone,) in zip(likeliest.logprobs, response.logprobs, strict=True):
        assert own == alone
        assert own.logprob == pytest.approx(first.logprob, rel=1e-4), "the greedy answer is the likeliest"
        assert first.logprob >= second.logprob
    strict = UncertaintyRouterCallback(Policy(threshold=-1.0, on_cut="score"))
    assert answered(SemGradLLM.from_model(wide, max_tokens=4, logprobs=True, router=strict), method).logprobs is None


def test_the_estimator_is_that_of_the_routers_calibration(wide: LanguageModel) -> None:
    own = SemGradLLM.from_model(wide, max_tokens=4, estimator=MaxProbability())
    binding = binding_of(own.score(QUESTION, "Paris"))
    calibration = calibrate([i / 99 for i in range(99)], [True] * 99, alpha=0.1, delta=0.1, binding=binding)
    llm = SemGradLLM.from_model(wide, router=UncertaintyRouterCallback(Policy.from_calibration(calibration)))
    assert llm.score(QUESTION, "Paris").estimator == MaxProbability.name


# Deadlines, cancelled tasks, closed streams.

PASS, PLACE = Policy(threshold=1e308, on_cut="score"), "Where is Paris?"
ROUTER = UncertaintyRouterCallback(PASS)
Ask = Callable[[SemGradLLM], Any]


@pytest.fixture
def endless(make_language_model: Callable[..., LanguageModel]) -> tuple[SemGradLLM, Any]:
    model = make_language_model(max_position_embeddings=4096)
    return SemGradLLM.from_model(model, max_tokens=3000, temperature=1.0, seed=1, router=ROUTER), model


WAYS: dict[str, Ask] = {
    "llm": lambda llm: llm.acomplete(PLACE),
    "query": lambda llm: guarded(reading(llm), ROUTER).aquery(PLACE),
    "stream": lambda llm: guarded(reading(llm, streaming=True), ROUTER).aquery(PLACE),
    "chat": lambda llm: guarded(SimpleChatEngine.from_defaults(llm=llm), ROUTER).achat(PLACE),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_task_stops_the_model(way: str, endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    reached, steps = held(model)
    task = asyncio.ensure_future(_awaited(WAYS[way](llm)))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await require_stopped(steps, llm)


async def test_a_cancelled_run_stops_the_model(endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    reached, steps = held(model)
    handler = ReActAgent(llm=llm, tools=[], streaming=False).run(user_msg=PLACE)
    await reached.wait()
    await handler.cancel_run()
    await require_stopped(steps, llm)


async def test_a_cancelled_evaluation_waits_for_no_model(endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    before = threading.enumerate()
    with model.turn:
        task = asyncio.ensure_future(UncertaintyEvaluator(llm, PASS).aevaluate(query=PLACE, response="There."))
        while not (begun := [thread for thread in threading.enumerate() if thread not in before]):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        until(lambda: not any(thread.is_alive() for thread in begun))


def held(model: LanguageModel) -> tuple[asyncio.Event, Steps]:
    """The model waits at its fifth step until it gets the signal to stop; the event is set once it is there."""
    loop, reached, steps = asyncio.get_running_loop(), asyncio.Event(), Steps(model)
    steps.at(5, lambda: (loop.call_soon_threadsafe(reached.set), until_stopped()))
    return reached, steps


async def require_stopped(steps: Steps, llm: SemGradLLM) -> None:
    """The step at which the model was held is its last one, and the next caller gets an answer."""
    assert await asyncio.to_thread(steps.in_all) <= 5
    answer = await llm.model_copy(update={"max_tokens": 1}).acomplete(PLACE)
    assert answer.raw["usage"]["completion_tokens"] == 1


async def _awaited(waiting: Any) -> Any:
    return await waiting


@pytest.mark.parametrize("mode", [None, "annotate"])
def test_a_closed_stream_stops_the_model(mode: Any, endless: tuple[SemGradLLM, Any]) -> None:
    llm, model = endless
    llm.router = None if mode is None else UncertaintyRouterCallback(PASS, mode=mode)
    pieces = llm.stream_complete(PLACE)
    steps = Steps(model)
    steps.at(5, until_stopped)
    next(pieces)
    pieces.close()
    asyncio.run(require_stopped(steps, llm))


# Reasoning.

PUZZLE = next(iter(ANSWERS))
ANSWER, REASONED = ANSWERS[PUZZLE], THOUGHTS[PUZZLE]


@pytest.fixture(scope="module")
def thinker() -> SemGradLLM:
    return SemGradLLM.from_model(thinking_model())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chat_tells_the_reasoning_apart(thinker: SemGradLLM, stream: bool) -> None:
    messages = [ChatMessage(PUZZLE)]
    pieces: list[ChatResponse] = list(thinker.stream_chat(messages)) if stream else [thinker.chat(messages)]
    response = pieces[-1]
    if stream:
        assert "".join(piece.delta or "" for piece in pieces) == ANSWER
    assert response.message.content == ANSWER
    thoughts = [block.content for block in response.message.blocks if isinstance(block, ThinkingBlock)]
    assert thoughts == [REASONED]
    verdict = verdict_of(response)
    assert (verdict.status, verdict.promised) == ("scored", False)


async def test_a_streams_reasoning_is_live(thinker: SemGradLLM) -> None:
    pieces = [piece async for piece in await thinker.astream_chat([ChatMessage(PUZZLE)])]
    deltas = [piece.additional_kwargs.get("thinking_delta") for piece in pieces]
    newest = list(filter(None, deltas))
    assert "".join(newest) == REASONED
    assert len(newest) > 1
    first = pieces[0].message.blocks[0]
    assert isinstance(first, ThinkingBlock)
    assert (first.content, pieces[0].delta, pieces[0].message.content) == (newest[0], "", "")
    assert [piece.text for piece in thinker.stream_complete(PUZZLE)][-1] == ANSWER


def test_a_completion_and_a_text_from_elsewhere(thinker: SemGradLLM) -> None:
    response: Any = thinker.complete(PUZZLE)
    assert (response.text, response.raw["reasoning_content"]) == (ANSWER, REASONED)
    for text in (written(PUZZLE), f"[THINK]{REASONED}[/THINK]{ANSWER}", f"{REASONED}\n</think>\n\n{ANSWER}"):
        verdict = thinker.score(PUZZLE, text)
        assert (verdict.status, verdict.text, verdict.details.reasoning) == ("scored", ANSWER, REASONED)
    cut: Any = thinker.complete(PUZZLE, stop=["\n\n", "It is"])
    assert (cut.text, cut.raw["finish_reason"]) == (ANSWER, "stop"), "a stop string looks at the answer alone"


@pytest.mark.parametrize("mode", ["enforce", "annotate"])
def test_the_reasoning_is_withheld_with_the_answer(thinker: SemGradLLM, mode: Any) -> None:
    router = UncertaintyRouterCallback(Policy(threshold=-1.0), mode=mode)
    judged = thinker.model_copy(update={"router": router})
    response = judged.complete(PUZZLE)
    assert verdict_of(response).status == "scored"
    assert response.text == (ANSWER if mode == "annotate" else "I don't know.")
    assert (REASONED in repr(response)) is (mode == "annotate")

"""`SemGradLLM`: eight methods, one answer, one score, one pair of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from threading import Event
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    LLMMetadata,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, PrivateAttr
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback
from semgrad_guard import LanguageModel, Policy, calibrate
from semgrad_guard.errors import EmptyResponseError, InputError, LowConfidenceError, UnsupportedToolsError
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.guard.verdicts import binding_of, recording
from tests.engine.chat_templates import template
from tests.pairwise import in_turn
from tests.steps import LIMIT, Steps, until

from .conftest import Heard
from .ways import LLM_WAYS, MESSAGES
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

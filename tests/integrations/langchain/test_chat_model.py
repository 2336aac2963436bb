"""`ChatSemGrad` on its own: parameters, shared weights, streams, metadata, counts of tokens, a free event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.tools import tool

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from langchain_semgrad_guard.messages import openai_tools
from semgrad_guard import HybridGrad, LanguageModel, SemGrad
from semgrad_guard.errors import EmptyPromptError, InputError, PromptTooLongError
from tests.steps import LIMIT, Steps, most_threads, until

from .scripted import Scripted
from .support import EVERYTHING, QUESTION, ROUTES, Tracer, metadata_of


def test_an_answer_carries_its_score(chat: ChatSemGrad, language_model: LanguageModel) -> None:
    message = chat.invoke(QUESTION)
    generation = language_model.generate(QUESTION)
    assert generation.text.startswith(message.text)
    assert message.response_metadata["model_name"] == language_model.name
    assert message.response_metadata["model_provider"] == "semgrad_guard"
    assert message.response_metadata["finish_reason"] == "length"
    expected = language_model.score(QUESTION, message.text).hybridgrad
    assert message.response_metadata["semgrad_guard"]["uncertainty"] == pytest.approx(expected, rel=1e-4)
    assert message.usage_metadata == {
        "input_tokens": len(language_model.render(QUESTION).ids),
        "output_tokens": 12,
        "total_tokens": len(language_model.render(QUESTION).ids) + 12,
    }


def test_metadata_is_plain_json(chat: ChatSemGrad) -> None:
    for metadata in (chat.invoke(QUESTION).response_metadata, *metadata_of(list(chat.stream(QUESTION)))):
        assert json.loads(json.dumps(metadata)) == metadata


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, threading.Thread]]:
    """The models that are loaded, and the threads in which that happens."""
    found: list[tuple[str, threading.Thread]] = []
    original = LanguageModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, name_or_path: str, **kwargs: Any) -> LanguageModel:
        found.append((name_or_path, threading.current_thread()))
        return original(cls, name_or_path, **kwargs)

    monkeypatch.setattr(LanguageModel, "from_pretrained", classmethod(from_pretrained))
    return found


@pytest.mark.parametrize("name", ["ainvoke", "abatch", "astream"])
def test_weights_do_not_load_on_the_event_loop(tiny: str, tmp_path: Path, name: str, loaded: Any) -> None:
    own = shutil.copytree(tiny, tmp_path / "model")  # weights that no other test's model holds already
    ROUTES[name](ChatSemGrad(model=str(own), max_tokens=2), QUESTION, {})
    ((_, thread),) = loaded
    assert thread is not threading.main_thread()


def test_stop_strings_end_an_answer(chat: ChatSemGrad, draft: str) -> None:
    stop = draft[3:5]
    expected = draft[: draft.find(stop)]
    named = ChatSemGrad.from_model(chat.language_model, max_tokens=12, stop=[stop])
    assert named.invoke(QUESTION).text == expected
    assert named.invoke(QUESTION, stop=["~~~~~~"]).text == draft, "a call's stop strings replace the model's"
    assert chat.invoke(QUESTION, stop=[stop]).text == expected
    assert chat.bind(stop=[stop]).invoke(QUESTION).text == expected
    assert "".join(c.text for c in chat.stream(QUESTION, stop=[stop])) == expected
    assert chat.invoke(QUESTION, stop=[stop]).response_metadata["finish_reason"] == "stop"


def test_a_call_may_set_options(chat: ChatSemGrad, draft: str) -> None:
    assert chat.invoke(QUESTION, max_tokens=4).text == draft[:4]
    sampled = chat.bind(temperature=2.0, seed=5)
    assert sampled.invoke(QUESTION).text == sampled.invoke(QUESTION).text != draft


def test_bad_fields_are_refused(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="temperature"):
        ChatSemGrad(temperature=-1)
    with pytest.raises(InputError, match="top_p"):
        ChatSemGrad(top_p=0)
    with pytest.raises(Exception, match="modle"):
        ChatSemGrad(modle="pocket")  # type: ignore[call-arg]
    with pytest.raises(InputError, match="dtype"):
        ChatSemGrad.from_model(language_model, dtype="float32")


def test_weights_load_at_the_first_answer_and_are_shared(tiny: str, loaded: Any) -> None:
    first, second = ChatSemGrad(model=tiny, max_tokens=2), ChatSemGrad(model=tiny, estimator=SemGrad(), max_tokens=2)
    copied = deepcopy(first.model_copy(update={"tags": ["nostream"]}))
    assert (repr(first), dumpd(first)["type"], first._get_ls_params()["ls_model_name"])[1:] == ("not_implemented", tiny)
    assert loaded == []
    assert [chat.invoke(QUESTION).text for chat in (first, copied, second)]
    assert [name for name, _ in loaded] == [tiny]
    assert first.language_model is copied.language_model is second.language_model
    other = first.model_copy(update={"dtype": "float64"})
    assert other.language_model is not first.language_model, "a copy with other loading settings loads for itself"
    del first, second, copied, other
    gc.collect()
    ChatSemGrad(model=tiny, max_tokens=2).invoke(QUESTION)
    assert [name for name, _ in loaded] == [tiny] * 3, "unused weights are let go"


def test_an_empty_prompt_is_refused_and_its_run_closed(chat: ChatSemGrad) -> None:
    tracer = Tracer()
    for ask in (chat.invoke, lambda *args: list(chat.stream(*args))):
        with pytest.raises(EmptyPromptError):
            ask(" \n", {"callbacks": [tracer]})
    assert ["EmptyPromptError" in str(run.error) for run in tracer.roots] == [True, True]
    assert not tracer.run_map


def test_the_estimator_and_template_stand_in_the_record(language_model: LanguageModel) -> None:
    estimator = HybridGrad(tau=0.5)
    chat = ChatSemGrad.from_model(language_model, estimator=estimator, prompt_template="reading", max_tokens=4)
    record = chat.invoke(QUESTION).response_metadata["semgrad_guard"]
    assert record["details"]["settings"]["tau"] == 0.5
    assert record["details"]["prompt_template"] == f"reading@{language_model.identity.template}"


@pytest.mark.parametrize("is_field", [False, True])
def test_the_likeliest_tokens_at_each_place(is_field: bool, chat: ChatSemGrad) -> None:
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    message = chat.model_copy(update=wanted).invoke(QUESTION) if is_field else chat.invoke(QUESTION, **wanted)
    for entry in message.response_metadata["logprobs"]["content"]:
        likeliest = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(likeliest) == 3
        assert likeliest[0] == max(likeliest)
        assert entry["logprob"] == pytest.approx(likeliest[0], abs=1e-4), "greedy decoding takes the likeliest"


async def test_the_event_loop_is_free_while_the_model_writes(language_model: LanguageModel) -> None:
    chat, free, steps = ChatSemGrad.from_model(language_model, max_tokens=12), threading.Event(), Steps(language_model)
    steps.at(2, lambda: until(free.is_set))
    task = asyncio.create_task(chat.ainvoke(QUESTION))
    await asyncio.to_thread(steps.reached.wait, LIMIT)
    free.set()  # by the loop, in the midst of the answer
    assert (await task).text
    steps.in_all()


@pytest.mark.parametrize("of", ["model", "served"])
def test_asynchronous_calls_wait_in_no_threads(language_model: LanguageModel, of: str) -> None:
    chat = ChatSemGrad.from_model(language_model, max_tokens=2)
    guard = {
        "model": chat,
        "served": GuardedChatModel(Scripted(), UncertaintyRouterCallback(EVERYTHING), scorer=language_model),
    }[of]
    assert asyncio.run(most_threads(language_model, guard.ainvoke, 60)) <= 20


# Counts of tokens.

TEMPLATES = Path(__file__).parents[2] / "fixtures" / "chat_templates"
LONG: list[BaseMessage] = [
    SystemMessage("be brief"),
    *(
        message
        for number in range(12)
        for message in (HumanMessage(f"question {number}?"), AIMessage(f"answer {number}"))
    ),
    HumanMessage("and the last question?"),
]


@tool
def paint(colour: str) -> str:
    """Paint the wall."""
    return colour


def test_a_text_is_counted_by_the_models_own_tokenizer(chat: ChatSemGrad, language_model: LanguageModel) -> None:
    ids = list(language_model.tokenizer("Who are you?", add_special_tokens=False)["input_ids"])
    assert chat.get_token_ids("Who are you?") == ids
    assert chat.get_num_tokens("Who are you?") == len(ids) > 0


def test_messages_are_counted_as_the_prompt_that_the_model_reads(chat: ChatSemGrad) -> None:
    messages = [SystemMessage("be brief"), HumanMessage("Who are you?")]
    usage = chat.invoke(messages).usage_metadata
    assert usage is not None
    assert chat.get_num_tokens_from_messages(messages) == usage["input_tokens"]
    assert chat.get_num_tokens_from_messages([]) == 0


def test_tools_count(tiny: str) -> None:
    template = (TEMPLATES / "qwen2.5.jinja").read_text()
    chat = ChatSemGrad(model=tiny, template_options={"chat_template": template}, max_tokens=4)
    given = [HumanMessage("hi")]
    prompt = chat.language_model.render("hi", tools=openai_tools([paint]))
    assert chat.get_num_tokens_from_messages(given, tools=[paint]) == len(prompt.ids)
    assert chat.get_num_tokens_from_messages(given, tools=[paint]) > chat.get_num_tokens_from_messages(given)
    call = AIMessage("", tool_calls=[{"name": "paint", "args": {"colour": "red"}, "id": "1"}])
    assert chat.get_num_tokens_from_messages([call]) > len("paint")


@pytest.mark.parametrize("name", ["chatml", "llama-3", "gemma", "mistral-v0.3", "qwen2.5"])
def test_a_trimmed_chat_fits(tiny: str, name: str) -> None:
    options = {"chat_template": (TEMPLATES / f"{name}.jinja").read_text(), "bos_token": "", "eos_token": ""}
    chat = ChatSemGrad(model=tiny, template_options=options, max_tokens=8)
    window = chat.language_model.context_window or 0
    with_system = [] if name == "gemma" else LONG[:1]  # its template knows no system
    conversation = [*with_system, *LONG[1:]]
    with pytest.raises(PromptTooLongError):
        chat.invoke(conversation)
    trimmed = trim_messages(
        conversation, max_tokens=window - 8, token_counter=chat, strategy="last", include_system=True, start_on="human"
    )
    assert trimmed[-1] == LONG[-1]
    assert len(with_system) < len(trimmed) < len(conversation)
    used = chat.invoke(trimmed).usage_metadata
    assert used is not None
    assert used["input_tokens"] <= window - 8


def test_a_part_that_the_template_refuses_is_never_counted_too_low(tiny: str) -> None:
    options = {"chat_template": (TEMPLATES / "gemma.jinja").read_text(), "bos_token": ""}
    chat = ChatSemGrad(model=tiny, template_options=options)
    part: list[BaseMessage] = [AIMessage("four"), HumanMessage("and now?"), HumanMessage("well?")]
    with pytest.raises(InputError):
        chat.language_model.render("x", chat_template="{{ raise_exception('no') }}")
    assert chat.get_num_tokens_from_messages(part) > sum(chat.get_num_tokens(str(message.text)) for message in part)
    read = ToolMessage("done", tool_call_id="1")
    assert chat.get_num_tokens_from_messages([read]) > chat.get_num_tokens("done")

"""Tools: shown in the template's own form, called, forced, streamed, and told of in histories."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel
from transformers import AutoTokenizer, LlamaForCausalLM

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback, get_verdict
from langchain_semgrad_guard.messages import to_conversation
from semgrad_guard import HybridGrad, LanguageModel, Message, ToolCall, Verdict
from semgrad_guard.errors import InputError, UnsupportedToolsError
from semgrad_guard.guard import Answerer
from tests.engine.chat_templates import template as published_or_own
from tests.pairwise import in_turn

from .served import ServedModel
from .support import EVERYTHING, NOTHING, QUESTION, ROUTES, Wire, collect, text_of


class Colour(Enum):
    """A closed set, so that a random model soon comes to an end."""

    RED = "red"
    GREEN = "green"


class Leaf(BaseModel):
    """A part that pydantic describes by reference."""

    colour: Colour


@tool
def paint(colour: Colour, twice: bool) -> str:
    """Paint the wall."""
    return f"{colour} {twice}"


@tool
def wait() -> str:
    """Do nothing."""
    return "done"


@tool
def plant(leaf: Leaf) -> str:
    """Plant a leaf."""
    return str(leaf)


def _with_template(folder: str, template: str) -> LanguageModel:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    return LanguageModel.from_transformers(model, tokenizer, name="tiny-tools")


@pytest.fixture(scope="module")
def make_model(tiny_for_tools: str) -> Callable[[str], LanguageModel]:
    """The tiny model with another chat template."""
    made: dict[str, LanguageModel] = {}

    def make(template: str) -> LanguageModel:
        if template not in made:
            made[template] = _with_template(tiny_for_tools, published_or_own(template.removesuffix(".jinja")))
        return made[template]

    return make


@pytest.fixture(scope="module")
def tooled(make_model: Callable[[str], LanguageModel]) -> ChatSemGrad:
    """A chat model whose template is Qwen2.5's."""
    return ChatSemGrad.from_model(make_model("qwen2.5.jinja"), max_tokens=120)


@in_turn(
    template=["qwen2.5.jinja", "qwen3.jinja", "mistral-nemo.jinja", "llama-3.1-tools.jinja"],
    choice=["any", "paint", {"type": "function", "function": {"name": "paint"}}],
)
def test_a_call_can_be_forced_in_every_form(
    make_model: Callable[[str], LanguageModel], template: str, choice: Any
) -> None:
    chat = ChatSemGrad.from_model(make_model(template), max_tokens=150)
    message: Any = chat.bind_tools([paint] if choice == "any" else [wait, paint], tool_choice=choice).invoke(QUESTION)
    (call,) = message.tool_calls
    assert call["name"] == "paint"
    assert set(call["args"]) == {"colour", "twice"}
    assert call["args"]["colour"] in ("red", "green")
    assert isinstance(call["args"]["twice"], bool)
    assert len(call["id"]) == 9
    assert message.content == ""
    assert message.response_metadata["finish_reason"] == "tool_calls"
    verdict = get_verdict(message)
    assert verdict is not None
    assert verdict.uncertainty is not None
    assert verdict.settings is not None
    assert "grammar" in verdict.settings
    assert paint.invoke(call).content.startswith("Colour.")


def test_tools_with_nothing_to_fill_in_and_with_references(tooled: ChatSemGrad) -> None:
    assert tooled.bind_tools([wait], tool_choice="wait").invoke(QUESTION).tool_calls[0]["args"] == {}
    call = tooled.bind_tools([plant], tool_choice="any").invoke(QUESTION).tool_calls[0]
    assert call["args"]["leaf"]["colour"] in ("red", "green")


def test_a_mark_that_is_a_special_token(tiny_for_tools: str) -> None:
    """As in Mistral's own tokenizers: it is generated as that token, and missing from the text of a stream."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_for_tools)
    tokenizer.chat_template = published_or_own("mistral-nemo")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    model: Any = LlamaForCausalLM.from_pretrained(tiny_for_tools)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    language_model = LanguageModel.from_transformers(model, tokenizer, name="tiny-mistral")
    tools = ChatSemGrad.from_model(language_model, max_tokens=150, logprobs=True).bind_tools([paint], tool_choice="any")
    message = tools.invoke(QUESTION)
    assert message.response_metadata["logprobs"]["content"][0]["token"] == "[TOOL_CALLS]"
    chunks = list(tools.stream(QUESTION))
    assert text_of(chunks) == message.content == ""
    assert message.tool_calls[0]["args"] == chunks[-1].tool_calls[0]["args"]


def test_a_call_that_was_cut_is_invalid_on_every_path(tooled: ChatSemGrad) -> None:
    brief = tooled.bind_tools([paint], tool_choice="any").bind(max_tokens=12)
    whole = brief.invoke(QUESTION)
    merged, *chunks = brief.stream(QUESTION)
    for chunk in chunks:
        merged += chunk
    for message in (whole, merged):
        assert message.content == ""
        assert not message.tool_calls
        (broken,) = message.invalid_tool_calls
        assert (broken["args"] or "").startswith('<tool_call>\n{"name": "paint"')
        assert message.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("name", ROUTES)
def test_every_path_calls(tooled: ChatSemGrad, name: str) -> None:
    pieces = ROUTES[name](tooled.bind_tools([paint], tool_choice="any"), QUESTION, {})
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [call["name"] for call in whole.tool_calls] == ["paint"]
    assert text_of(pieces) == ""
    assert get_verdict(whole) is not None
    if "stream" in name:
        assert isinstance(pieces[-1], AIMessageChunk)
        assert (pieces[-1].chunk_position, pieces[-1].content) == ("last", "")
        assert json.loads(pieces[-1].tool_call_chunks[0]["args"] or "") == whole.tool_calls[0]["args"]


def test_a_free_answer_streams_while_it_is_written(tooled: ChatSemGrad) -> None:
    free = tooled.bind_tools([paint]).bind(max_tokens=40)
    whole = free.invoke(QUESTION)
    assert not whole.tool_calls
    assert whole.text[0] not in "[{<", "an answer that begins like a call is held back: ask something else"
    for chunks in (list(free.stream(QUESTION)), collect(free.astream(QUESTION))):
        assert len(chunks) > 5
        assert text_of(chunks) == whole.text


def test_tools_change_the_prompt_and_its_name(tooled: ChatSemGrad) -> None:
    brief = tooled.model_copy(update={"max_tokens": 4})
    plain, given = brief.invoke(QUESTION), brief.bind_tools([paint], tool_choice="auto").invoke(QUESTION)
    bare, tools = get_verdict(plain), get_verdict(brief.bind_tools([paint]).invoke(QUESTION))
    none = get_verdict(brief.bind_tools([paint], tool_choice="none").invoke(QUESTION))
    assert bare is not None
    assert tools is not None
    assert none is not None
    assert bare.prompt_template == none.prompt_template != tools.prompt_template
    assert given.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"] + 100  # type: ignore[index]


def test_a_batch_calls_like_single_runs(tooled: ChatSemGrad) -> None:
    questions = [QUESTION, "Hi", "Paint it."]
    messages = tooled.bind_tools([paint, wait], tool_choice="any").batch(questions)
    alone = [tooled.bind_tools([paint, wait], tool_choice="any").invoke(question) for question in questions]
    assert [m.tool_calls[0]["args"] for m in messages] == [m.tool_calls[0]["args"] for m in alone]


@pytest.mark.parametrize("name", ROUTES)
def test_a_router_withholds_a_call_whole(tooled: ChatSemGrad, name: str) -> None:
    tools = tooled.bind_tools([paint], tool_choice="any")
    wire = Wire()
    pieces = ROUTES[name](tools, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=NOTHING), wire]})
    assert not any(piece.tool_calls for piece in pieces)
    assert text_of(pieces) == "I don't know."
    let = ROUTES[name](tools, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=EVERYTHING)]})
    assert [call["name"] for piece in let for call in piece.tool_calls] == ["paint"]


HISTORY = [
    HumanMessage("Paint it."),
    AIMessage("Well.", tool_calls=[{"name": "paint", "args": {"colour": "red"}, "id": "call_abc-123"}]),
    ToolMessage("painted", tool_call_id="call_abc-123", name="paint"),
]


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("qwen2.5.jinja", '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'),
        ("qwen3.jinja", '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'),
        ("mistral-nemo.jinja", '[TOOL_CALLS][{"name": "paint", "arguments": {"colour": "red"}'),
        ("llama-3.1-tools.jinja", '{"name": "paint", "parameters": {"colour": "red"}}'),
    ],
)
def test_histories_are_written_as_the_template_writes_them(
    make_model: Callable[[str], LanguageModel], template: str, written: str
) -> None:
    model = make_model(template)
    text = model.render(to_conversation(HISTORY)).text
    assert written in text
    assert "painted" in text
    chat = ChatSemGrad.from_model(model, max_tokens=4)
    assert get_verdict(chat.bind_tools([paint]).invoke(HISTORY)) is not None


def test_messages_carry_their_calls() -> None:
    blocks = [{"type": "text", "text": "Well."}, {"type": "tool_use", "id": "x", "name": "paint", "input": {}}]
    calls: Any = [{"name": "paint", "args": {}, "id": "abcdef123"}]
    broken: Any = [{"name": None, "args": "<tool_call>{", "id": "y", "error": "no"}]
    conversation = to_conversation(
        [
            AIMessage(blocks, tool_calls=calls),  # type: ignore[arg-type]
            AIMessage("", invalid_tool_calls=broken),
            ToolMessage("done", tool_call_id="abcdef123"),
        ]
    )
    assert conversation == (
        Message("assistant", "Well.", (ToolCall("paint", {}, "abcdef123"),)),
        Message("assistant", "<tool_call>{"),
        Message("tool", "done", tool_call_id="abcdef123"),
    )


def test_a_template_without_tools_is_named(chat: ChatSemGrad) -> None:
    for untold in (chat, ChatSemGrad(model="pocket")):
        with pytest.raises(UnsupportedToolsError, match="knows no tools"):
            untold.bind_tools([paint])
    bound = chat.bind(tools=[convert_to_openai_tool(paint)])
    for ask in (bound.invoke, lambda q: list(bound.stream(q)), lambda q: asyncio.run(bound.ainvoke(q))):
        with pytest.raises(UnsupportedToolsError, match="knows no tools"):
            ask(QUESTION)
    with pytest.raises(UnsupportedToolsError, match="knows no tools"):
        chat.invoke(HISTORY)


def test_a_choice_that_names_no_tool_is_refused(tooled: ChatSemGrad) -> None:
    with pytest.raises(InputError, match=r"'pint'.*paint"):
        tooled.bind_tools([paint], tool_choice="pint")
    with pytest.raises(InputError, match="there are no tools"):
        tooled.invoke(QUESTION, tool_choice="any")


def test_a_schema_that_cannot_be_followed_is_named(tooled: ChatSemGrad) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    with pytest.raises(InputError, match="nowhere"):
        tooled.invoke(QUESTION, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    with pytest.raises(InputError, match="response_format"):
        tooled.invoke(QUESTION, response_format={"type": "yaml"})


def test_a_scorer_that_knows_tools_is_shown_them(tooled: ChatSemGrad) -> None:
    scorer = tooled.language_model
    guard = GuardedChatModel(ServedModel(), EVERYTHING, scorer=scorer)
    scored: list[Verdict] = []
    for tools in ([], [wait], [wait, plant]):
        verdict = get_verdict((guard.bind_tools(tools) if tools else guard).invoke(QUESTION))
        assert verdict is not None
        assert verdict.status == "scored"
        scored.append(verdict)
    assert len({verdict.prompt_template for verdict in scored}) == 3
    assert len({verdict.uncertainty for verdict in scored}) == 3
    shown = {"tools": [convert_to_openai_tool(wait)]}
    alone = Answerer(scorer, HybridGrad(), prompt_template="served", served=True)
    expected = alone.scored(QUESTION, "Vienna", template_options=shown).verdict
    assert scored[1].uncertainty == pytest.approx(expected.uncertainty, rel=1e-4)
    assert scored[1].prompt_template == expected.prompt_template

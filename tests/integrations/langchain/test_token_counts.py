"""The tokens of messages, counted as the model's own, so that a trimmed chat fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.tools import tool

from langchain_semgrad_guard import ChatSemGrad
from langchain_semgrad_guard.messages import openai_tools
from semgrad_guard import LanguageModel
from semgrad_guard.errors import InputError, PromptTooLongError

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

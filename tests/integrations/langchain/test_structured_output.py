"""`with_structured_output` and `response_format`: objects, their verdicts, and withheld objects."""

from __future__ import annotations

import json
from typing import Any, Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel
from transformers import AutoTokenizer, LlamaForCausalLM

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback
from semgrad_guard import LanguageModel
from semgrad_guard.errors import InputError, LowConfidenceError
from tests.pairwise import in_turn
from tests.random_llama import CHATML

from .support import EVERYTHING, NOTHING, QUESTION, ROUTES, verdict_of


class Wall(BaseModel):
    """A wall to paint: closed sets only, so that a random model comes to an end."""

    colour: Literal["red", "green"]
    twice: bool


class WallDict(TypedDict):
    """A wall to paint."""

    colour: Literal["red", "green"]
    twice: bool


JSON_SCHEMA: dict[str, Any] = {"title": "Wall", "description": "A wall.", **Wall.model_json_schema()}


@pytest.fixture(scope="module")
def chat(tiny_for_tools: str) -> ChatSemGrad:
    """A tiny model with room for schemas, and a template that knows tools."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_for_tools)
    tokenizer.chat_template = (
        '{% if tools %}<|im_start|>system\n{{ tools }} <tool_call>{"name": , "arguments": }<|im_end|>\n{% endif %}'
        + CHATML
    )
    model: Any = LlamaForCausalLM.from_pretrained(tiny_for_tools)
    return ChatSemGrad.from_model(LanguageModel.from_transformers(model, tokenizer, name="tiny"), max_tokens=120)


def _check(found: Any) -> None:
    values = found.model_dump() if isinstance(found, Wall) else found
    assert values["colour"] in ("red", "green")
    assert isinstance(values["twice"], bool)
    assert set(values) == {"colour", "twice"}


@in_turn(schema=[Wall, WallDict, JSON_SCHEMA], method=["json_schema", "function_calling"])
def test_answers_are_objects(chat: ChatSemGrad, schema: Any, method: Any) -> None:
    structured = chat.with_structured_output(schema, method=method)
    found: Any = structured.invoke(QUESTION)
    _check(found)
    assert isinstance(found, Wall) == (schema is Wall)
    assert structured.batch([QUESTION, "hello"])[0] == found
    *_, last = structured.stream(QUESTION)
    assert last == found


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_the_verdict_stands_in_raw(chat: ChatSemGrad, method: Any) -> None:
    found: Any = chat.with_structured_output(Wall, include_raw=True, method=method).invoke(QUESTION)
    _check(found["parsed"])
    assert found["parsing_error"] is None
    verdict = verdict_of(found["raw"])
    assert verdict.uncertainty is not None
    assert [(one.path, one.nullable) for one in verdict.fields] == [(("colour",), False), (("twice",), False)]
    assert all(one.uncertainty is not None and one.uncertainty > 0 for one in verdict.fields)
    assert len(verdict.calls) == (method == "function_calling")


def test_json_mode_is_json_of_any_form(chat: ChatSemGrad) -> None:
    message = chat.invoke(QUESTION, response_format={"type": "json_object"}, max_tokens=400)
    assert message.text[0] == "{"
    if message.response_metadata["finish_reason"] == "stop":
        assert isinstance(json.loads(message.text), dict)
    raw: Any = chat.with_structured_output(Wall, method="json_mode", include_raw=True).invoke(QUESTION)
    assert raw["parsed"] is None, "a random model does not guess the keys"
    assert isinstance(raw["parsing_error"], OutputParserException)


def test_an_answer_that_was_cut_is_an_error_not_half_an_object(chat: ChatSemGrad) -> None:
    brief = ChatSemGrad.from_model(chat.language_model, max_tokens=5)
    for method in ("json_schema", "json_mode", "function_calling"):
        structured = brief.with_structured_output(JSON_SCHEMA, method=method)
        with pytest.raises(OutputParserException, match="max_tokens"):
            structured.invoke(QUESTION)
        with pytest.raises(OutputParserException, match="max_tokens"):
            list(structured.stream(QUESTION))
    raw: Any = brief.with_structured_output(JSON_SCHEMA, include_raw=True).invoke(QUESTION)
    assert "max_tokens" in str(raw["parsing_error"])


@in_turn(name=ROUTES, method=["json_schema", "function_calling"])
def test_a_withheld_object_is_an_error(chat: ChatSemGrad, name: str, method: Any) -> None:
    structured = chat.with_structured_output(Wall, method=method)
    config: dict[str, Any] = {"callbacks": [UncertaintyRouterCallback(policy=NOTHING)]}
    with pytest.raises(LowConfidenceError, match="not let through") as caught:
        ROUTES[name](structured, QUESTION, config)
    assert (caught.value.verdict.text, caught.value.verdict.draft) == ("", None)
    assert "withheld answer" not in str(caught.value)
    through = ROUTES[name](structured, QUESTION, {"callbacks": [UncertaintyRouterCallback(policy=EVERYTHING)]})
    _check(through[-1])


def test_no_text_stands_for_an_object_in_raw_form_either(chat: ChatSemGrad) -> None:
    for keep_draft in (False, True):
        config: Any = {"callbacks": [UncertaintyRouterCallback(NOTHING, keep_draft=keep_draft)]}
        with pytest.raises(LowConfidenceError, match="A structure is owed") as caught:
            chat.with_structured_output(Wall, include_raw=True).invoke(QUESTION, config)
        assert (caught.value.verdict.draft or "").startswith("{") is keep_draft
        assert ("withheld answer (`draft`)" in str(caught.value)) is keep_draft


def test_an_escalation_may_answer_in_the_same_form(chat: ChatSemGrad) -> None:
    target = RunnableLambda(lambda _: AIMessage('{"colour": "red", "twice": true}'))
    router = UncertaintyRouterCallback(policy=NOTHING, escalate_to=target)
    found = chat.with_structured_output(Wall).invoke(QUESTION, {"callbacks": [router]})
    assert found == Wall(colour="red", twice=True)


def test_the_model_is_told_the_schema(chat: ChatSemGrad) -> None:
    seen: list[Any] = []
    original = LanguageModel.render

    def render(self: LanguageModel, conversation: Any, **options: Any) -> Any:
        seen.append(conversation)
        return original(self, conversation, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "render", render)
        chat.with_structured_output(Wall).invoke([("human", "One."), ("ai", "Two."), ("human", "Three.")])
    assert [message.content for message in seen[0][:2]] == ["One.", "Two."]
    assert seen[0][2].content.startswith("Three.\n\nAnswer with JSON")
    assert '"colour"' in seen[0][2].content


@pytest.mark.parametrize("strategy", ["provider", "tool"])
def test_agents_get_their_objects(chat: ChatSemGrad, strategy: str) -> None:
    """By `response_format` where the profile knows structured output, and by a tool that must be called."""
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ToolStrategy

    agent: Any = create_agent(chat, tools=[], response_format=Wall if strategy == "provider" else ToolStrategy(Wall))
    found = agent.invoke({"messages": [("human", QUESTION)]})
    _check(found["structured_response"])
    answers = [message for message in found["messages"] if isinstance(message, AIMessage)]
    assert [bool(message.tool_calls) for message in answers] == [strategy == "tool"]
    assert verdict_of(answers[0])


def test_unknown_options_are_refused(chat: ChatSemGrad) -> None:
    with pytest.raises(InputError, match="method='magic'"):
        chat.with_structured_output(Wall, method="magic")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="colour"):
        chat.with_structured_output(Wall, colour="red")

"""`SemGradLLM` calls functions: forced and free calls, every method, LlamaIndex's own agents and structured outputs."""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llama_index_semgrad_guard import LowConfidenceError, SemGradLLM, UncertaintyRouterCallback, guarded
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import UnsupportedToolsError
from tests.engine.chat_templates import template as published_or_own
from tests.pairwise import in_turn
from tests.random_llama import CALLS

from .conftest import Passages
from .ways import verdict_of

PASS = UncertaintyRouterCallback(Policy(threshold=1e308, on_cut="score"))
QUESTION = "What is 2 times 3?"


class Colour(Enum):
    """A closed set, so that a random model soon comes to an end."""

    RED = "red"
    GREEN = "green"


class Leaf(BaseModel):
    """A leaf."""

    colour: Colour


def paint(colour: Colour, twice: bool) -> str:
    """Paint the wall."""
    return f"painted {colour}, {twice}"


def plant(leaf: Leaf) -> str:
    """Plant a leaf."""
    return str(leaf)


PAINT, PLANT = FunctionTool.from_defaults(paint), FunctionTool.from_defaults(plant)


@pytest.fixture(scope="module")
def make_tooled(make_language_model: Callable[..., LanguageModel]) -> Callable[..., SemGradLLM]:
    def make(template: str = "qwen2.5", **fields: Any) -> SemGradLLM:
        source = FAMILIES.get(template) or published_or_own(template)
        model = make_language_model(chat_template=source, words=CALLS, max_position_embeddings=16384)
        return SemGradLLM.from_model(model, **{"max_tokens": 120, **fields})

    return make


@pytest.fixture(scope="module")
def tooled(make_tooled: Callable[..., SemGradLLM]) -> SemGradLLM:
    return make_tooled()


def ways(llm: SemGradLLM, *tools: FunctionTool, **options: Any) -> list[Any]:
    """The last response of every method that takes tools."""
    given: Any = {"tools": tools, "user_msg": QUESTION, **options}

    async def asynchronous() -> list[Any]:
        return [
            await llm.achat_with_tools(**given),
            [chunk async for chunk in await llm.astream_chat_with_tools(**given)][-1],
        ]

    return [llm.chat_with_tools(**given), list(llm.stream_chat_with_tools(**given))[-1], *asyncio.run(asynchronous())]


TURNS = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
FAMILIES = {
    "mistral-small": TURNS + "{# [TOOL_CALLS]name[ARGS] #}",
    "deepseek-v3.1": TURNS + "{# <｜tool▁call▁begin｜> #}",
    "kimi": TURNS + "{# <|tool_call_argument_begin|> #}",
    "granite": TURNS + "{# <|tool_call|> #}",
}


@in_turn(template=["qwen2.5", "mistral-nemo", "llama-3.1-tools", *FAMILIES], forced=["some", "one"])
def test_every_method_calls_what_is_due(make_tooled: Callable[..., SemGradLLM], template: str, forced: str) -> None:
    llm = make_tooled(template, max_tokens=300)
    assert isinstance(llm, FunctionCallingLLM)
    called = ways(llm, PAINT, tool_required=True) if forced == "some" else ways(llm, PLANT, PAINT, tool_choice="paint")
    for response in called:
        (call,) = llm.get_tool_calls_from_response(response)
        assert (call.tool_name, set(call.tool_kwargs), len(call.tool_id)) == ("paint", {"colour", "twice"}, 9)
        assert response.message.content == ""
        verdict = verdict_of(response)
        assert verdict.uncertainty is not None
        assert "grammar" in (verdict.details.settings or {})


def test_parameters_that_refer_to_other_parts(make_tooled: Callable[..., SemGradLLM]) -> None:
    for template in ("qwen2.5", "mistral-nemo"):
        llm = make_tooled(template)
        response = llm.chat_with_tools([PAINT, PLANT], QUESTION, tool_choice="plant")
        assert llm.get_tool_calls_from_response(response)[0].tool_kwargs["leaf"]["colour"] in ("red", "green")
        response = llm.chat_with_tools([PAINT, PLANT], QUESTION, tool_required=True)
        assert len(llm.get_tool_calls_from_response(response)) == 1


def test_a_call_that_was_cut_is_text_on_every_path(tooled: SemGradLLM) -> None:
    for response in ways(tooled, PAINT, tool_required=True, max_tokens=12):
        assert not tooled.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        assert response.message.content.startswith('<tool_call>\n{"name": "paint"')
        verdict = verdict_of(response)
        assert (verdict.status, verdict.text) == ("scored", response.message.content)


def test_free_answers_are_the_same_on_every_path(tooled: SemGradLLM) -> None:
    texts = {response.message.content for response in ways(tooled, PAINT, max_tokens=8)}
    assert len(texts) == 1
    assert texts != {""}


async def test_a_function_agent_runs(tooled: SemGradLLM) -> None:
    for streaming in (True, False):
        agent = FunctionAgent(
            tools=[PAINT], llm=tooled, system_prompt="Paint.", initial_tool_choice="paint", streaming=streaming
        )
        handler = agent.run(QUESTION)
        events = [event async for event in handler.stream_events()]
        output = await handler
        (result,) = [event for event in events if isinstance(event, ToolCallResult)]
        assert result.tool_output.content.startswith("painted")
        assert str(output)
        verdict = verdict_of(output)
        assert verdict.status == "scored"


def test_which_agent_and_which_programs_follow_from_the_template(
    make_tooled: Callable[..., SemGradLLM], llm: SemGradLLM, tooled: SemGradLLM
) -> None:
    for model, agent in ((tooled, FunctionAgent), (llm, ReActAgent)):
        workflow = AgentWorkflow.from_tools_or_functions([paint], llm=model)
        assert [type(one) for one in workflow.agents.values()] == [agent]
    assert not SemGradLLM(model="pocket", context_window=512).metadata.is_function_calling_model
    with pytest.raises(UnsupportedToolsError, match="knows no tools"):
        llm.chat_with_tools([PAINT], QUESTION)


def test_a_structure_is_written_as_a_call_and_keeps_its_score(tooled: SemGradLLM) -> None:
    leaf = tooled.structured_predict(Leaf, PromptTemplate("A leaf, {adjective}."), adjective="please")
    assert isinstance(leaf, Leaf)
    judged = tooled.model_copy(update={"router": PASS})
    engine = RetrieverQueryEngine.from_args(Passages("A leaf."), llm=judged, output_cls=Leaf)
    response: Any = guarded(engine, PASS).query(QUESTION)
    assert isinstance(response.response, Leaf)
    assert response.metadata["semgrad_guard"]["status"] == "scored"


def test_each_value_of_a_forced_call_has_a_score(tooled: SemGradLLM) -> None:
    response = tooled.chat_with_tools([PAINT], QUESTION, tool_required=True)
    verdict = verdict_of(response)
    assert sorted(one.path for one in verdict.fields) == [("colour",), ("twice",)]
    assert all(one.uncertainty is not None and one.uncertainty > 0 for one in verdict.fields)
    assert [one.uncertainty is not None for one in verdict.calls] == [True]


async def test_a_streamed_structure_is_the_models_call(tooled: SemGradLLM) -> None:
    prompt = PromptTemplate("A leaf, {adjective}.")
    whole = tooled.structured_predict(Leaf, prompt, adjective="please")
    assert list(tooled.stream_structured_predict(Leaf, prompt, adjective="please"))[-1] == whole
    stream = await tooled.astream_structured_predict(Leaf, prompt, adjective="please")
    assert [piece async for piece in stream][-1] == whole
    texts = [piece.message.content for piece in tooled.as_structured_llm(Leaf).stream_chat([ChatMessage("A leaf.")])]
    assert Leaf.model_validate_json(texts[-1] or "")


def test_a_call_that_is_withheld_is_no_call(tooled: SemGradLLM) -> None:
    """But trusted tools may run whatever the score; the text next to their calls stays back."""
    stop = UncertaintyRouterCallback(Policy(threshold=-1.0, on_cut="score"))
    for response in ways(tooled.model_copy(update={"router": stop}), PAINT, max_tokens=60):
        assert (response.message.content, response.message.additional_kwargs) == ("I don't know.", {})
    trusting = UncertaintyRouterCallback(Policy(threshold=-1.0, on_cut="score"), trusted_tools=["paint"])
    for response in ways(tooled.model_copy(update={"router": trusting}), PAINT, tool_required=True):
        assert [call.tool_name for call in tooled.get_tool_calls_from_response(response)] == ["paint"]
        assert response.message.content == ""
        assert verdict_of(response).action == "abstain"
    with pytest.raises(LowConfidenceError, match="structured answer"):
        tooled.model_copy(update={"router": stop}).chat_with_tools([PAINT], QUESTION, tool_required=True)


def test_the_default_prompts_run_where_a_template_has_no_system_turn(make_tooled: Callable[..., SemGradLLM]) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}"
    model = make_tooled().language_model
    tokenizer = model.tokenizer
    tokenizer.chat_template = refusing + "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    llm = SemGradLLM.from_model(LanguageModel.from_transformers(model._model, tokenizer), max_tokens=2, router=PASS)
    engine = RetrieverQueryEngine.from_args(Passages("Oslo."), llm=llm)
    verdict = verdict_of(guarded(engine, PASS).query(QUESTION))
    assert verdict.status == "scored"

"""Forms of answers: how templates write tool calls, how answers are read back, and what holds an answer to a form."""

from __future__ import annotations

import builtins
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel, ToolCall
from semgrad_guard.engine.prompts.forms import (
    GrammarCompiler,
    ToolAnswer,
    call_form,
    call_rule,
    calls_in,
    closed,
    json_rule,
    known_form,
    one_of,
    shown_text,
    text_rule,
)
from semgrad_guard.errors import InputError, MissingExtraError, UnsupportedToolsError

from .chat_templates import FOLDER, template
from .worker_calls import Streamed, pieces_of

ADD = ToolCall("add", {"a": 1})
KNOWN = {
    "qwen2.5": "<tool_call>",
    "qwen3": "<tool_call>",
    "mistral-nemo": "[TOOL_CALLS]",
    "mistral-v0.3": "[TOOL_CALLS]",
    "llama-3.1-tools": "",
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_the_form_is_read_off_the_template(path: Path) -> None:
    found = known_form(template(path.stem))
    assert (found.open if found else None) == KNOWN.get(path.stem)


TABLE: dict[str, Any] = json.loads((FOLDER.parent / "tool_calls.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "text", "expected"), TABLE["answers"])
def test_answers_are_taken_apart(name: str, text: str, expected: Any) -> None:
    """Into text, calls and broken calls; where only calls are given, none is broken."""
    found = known_form(TABLE["templates"].get(name) or template(name))
    assert found is not None
    answer = calls_in(found, text)
    if expected == "broken":
        assert answer.broken
    elif expected == "one call":
        assert [call.name for call in answer.calls] == ["add"]
    else:
        assert [[call.name, call.arguments, call.id] for call in answer.calls] == expected["calls"]
        assert answer.text == expected.get("text", answer.text)
        assert list(answer.broken) == expected.get("broken", [])


@pytest.mark.parametrize(("text", "shown"), TABLE["streams"])
def test_a_stream_shows_what_cannot_be_a_call(text: str, shown: str) -> None:
    found = known_form(template("qwen2.5"))
    assert found is not None
    assert text[: shown_text(found, text)] == shown


def test_a_tokenizers_own_response_template_reads_the_rest() -> None:
    """By transformers' parser, which sees what the prompt has opened."""
    call = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
    fields = {"thinking": {"open": "<t>", "close": "</t>"}, "content": {}, "tool_calls": call}
    tokenizer = SimpleNamespace(response_template={"start_anchor": "<a>", "fields": fields})
    own = call_form(tokenizer, "{{ tools }} <odd>")
    written = 'It is 3.</t>Well.<call>{"name": "add", "arguments": {"a": 1}}</call>'
    assert calls_in(own, written, prompt="<a><t>") == ToolAnswer("Well.", (ADD,))
    assert calls_in(own, "<call>{", prompt="<a>") == ToolAnswer("", (), ("<call>{",))
    assert calls_in(own, "text", prompt="<a>") == ToolAnswer("text")
    assert shown_text(own, "Anything") == 0, "special tokens are not seen in a stream"
    with pytest.raises(InputError, match="forced"):
        call_rule(own, [], {})


CODER = "{{ tools }}<tool_call>\n<function={{ name }}>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "{{ tools }}<tool_call>{{ name }}\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


@pytest.mark.parametrize("source", [CODER, GLM], ids=["Qwen3-Coder", "GLM 4.5"])
def test_calls_that_are_tags_get_the_types_of_their_schema(source: str) -> None:
    text, found = source.removeprefix("{{ tools }}").replace("{{ name }}", "add"), known_form(source)
    assert found is not None
    assert calls_in(found, text, tools=[TOOL]) == ToolAnswer("", (ADD,))
    assert calls_in(found, f"Well.\n{text}\n{text}", tools=[TOOL]) == ToolAnswer("Well.", (ADD, ADD))
    assert calls_in(found, text) == ToolAnswer("", (ToolCall("add", {"a": "1"}),)), "no type is known"
    assert calls_in(found, cut := text[: text.index("</")]).broken == (cut,), "a call that is cut off is none"
    assert calls_in(found, "Three.") == ToolAnswer("Three.")
    assert shown_text(found, "Well.") == 0


def test_templates_that_cannot_be_used_are_named() -> None:
    bare = SimpleNamespace(response_template=None)
    for unusable in (None, "{{ messages }}", "{{ messages }} <tool_call>"):
        with pytest.raises(UnsupportedToolsError, match="knows no tools"):
            call_form(bare, unusable)
    gpt_oss = "{{ tools }}<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>"
    deepseek_v3 = "{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json"
    for relative in (gpt_oss, deepseek_v3):
        with pytest.raises(UnsupportedToolsError, match="response_template"):
            call_form(bare, relative)


# Grammars: answers that must have a form.

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "twice": {"type": "boolean"}},
    "required": ["colour", "twice"],
}
GRAMMAR = one_of([json_rule(SCHEMA)])


def test_every_row_of_a_batch_follows_the_grammar_and_ends(language_model: LanguageModel) -> None:
    options = GenerationOptions(max_tokens=80, grammar=GRAMMAR)
    generations = language_model.generate_batch(["Hi", "A longer question than that?", "x"], options)
    for generation in generations:
        assert set(json.loads(generation.text)) == {"colour", "twice"}
        assert generation.finish_reason == "stop"
    assert [g.text for g in generations] == [
        language_model.generate(q, options).text for q in ("Hi", "A longer question than that?", "x")
    ]


@pytest.mark.parametrize("seed", range(5))
def test_sampling_and_streams_follow_it_too(language_model: LanguageModel, seed: int) -> None:
    options = GenerationOptions(max_tokens=80, temperature=2.0, top_k=5, seed=seed, grammar=GRAMMAR)
    text = "".join(pieces_of(Streamed(language_model, "Hi", options)))
    assert json.loads(text)["colour"] in ("red", "green")
    assert text == language_model.generate("Hi", options).text


def test_the_score_is_that_of_the_raw_distribution(language_model: LanguageModel) -> None:
    generation = language_model.generate("Hi", GenerationOptions(max_tokens=80, grammar=GRAMMAR))
    found = generation.evidence.gradients()
    assert found is not None
    assert found.scores.hybridgrad == pytest.approx(language_model.score("Hi", generation.text).hybridgrad)
    assert min(found.scores.log_probs) < -1, "a random model would not have written JSON"


def test_one_of_several_rules(language_model: LanguageModel) -> None:
    grammar = one_of([text_rule("yes", {}), text_rule("no\n", {})])
    texts = {
        language_model.generate("Hi", GenerationOptions(temperature=3.0, seed=s, grammar=grammar)).text
        for s in range(20)
    }
    assert texts == {"yes", "no\n"}


def test_special_tokens_are_written_as_such() -> None:
    assert text_rule("[TOOL_CALLS]", {"[TOOL_CALLS]": 5}) == "<[5]>"
    assert text_rule("[TOOL_CALLS] x", {"[TOOL_CALLS]": 5}) == '<[5]> " x"'
    assert text_rule("", {"[TOOL_CALLS]": 5}) == '""'


def test_special_tokens_are_generated_as_such(language_model: LanguageModel) -> None:
    special = language_model.special_tokens
    assert special == {"<|im_start|>": 256, "<|im_end|>": 257}
    generation = language_model.generate("Hi", GenerationOptions(grammar=one_of([text_rule("<|im_start|>x", special)])))
    assert (generation.text, generation.response_ids[0], len(generation.response_ids)) == ("x", 256, 2)


def test_objects_are_closed_unless_the_schema_says_otherwise() -> None:
    inner = {"type": "object", "properties": {}}
    found = closed({"type": "object", "properties": {"a": inner}, "anyOf": [inner]})
    assert found["additionalProperties"] is found["properties"]["a"]["additionalProperties"] is False
    assert found["anyOf"][0]["additionalProperties"] is False
    assert closed({**inner, "additionalProperties": True})["additionalProperties"] is True
    assert closed({"type": "object"}) == {"type": "object"}
    assert "additionalProperties" not in inner, "the caller's schema stays as it is"


def test_a_schema_that_cannot_be_followed_is_named(language_model: LanguageModel) -> None:
    broken = one_of([json_rule({"$ref": "#/nowhere"})])
    with pytest.raises(InputError, match="nowhere"):
        language_model.generate("Hi", GenerationOptions(grammar=broken))


def test_other_answers_need_no_llguidance(
    make_language_model: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec, real_import = importlib.util.find_spec, builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(
        "semgrad_guard.errors.find_spec", lambda name: None if name == "llguidance" else find_spec(name)
    )
    monkeypatch.setattr(builtins, "__import__", missing)
    model = make_language_model()
    assert model.generate("Hi", GenerationOptions(max_tokens=2)).response_ids
    with pytest.raises(MissingExtraError, match=r"semgrad-guard\[langchain\]"):
        model.generate("Hi", GenerationOptions(grammar=GRAMMAR))


def test_a_model_without_an_end_token_cannot_be_held_to_a_form(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="end token"):
        GrammarCompiler(language_model.tokenizer, end_tokens=())


def test_behind_a_complete_text_only_an_end_may_come(language_model: LanguageModel) -> None:
    processor = GrammarCompiler(language_model.tokenizer, end_tokens=[257]).processor(
        one_of([text_rule("a", {})]), width=1
    )
    letter = language_model.tokenizer("a", add_special_tokens=False)["input_ids"][0]
    scores = torch.zeros(1, 258)
    assert processor(torch.tensor([[0]]), scores).isfinite().nonzero().tolist() == [[0, letter]]
    assert processor(torch.tensor([[0, letter]]), scores).isfinite().nonzero().tolist() == [[0, 257]]


def test_an_answer_that_cannot_go_on_is_not_told(language_model: LanguageModel) -> None:
    """An error may go to a caller from whom the answer is to be withheld."""
    secret, other = language_model.tokenizer("qx", add_special_tokens=False)["input_ids"]
    compiler = GrammarCompiler(language_model.tokenizer, end_tokens=[257])
    processor = compiler.processor(one_of([text_rule("qa", {})]), width=1)
    with pytest.raises(InputError, match="tokens cannot follow") as caught:
        processor(torch.tensor([[0, secret, other]]), torch.zeros(1, 258))
    assert "q" not in str(caught.value)

"""The objective: which layers are differentiated; and t* on the published chat templates, with their special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semgrad_guard import HybridGrad, LanguageModel, SemGrad
from semgrad_guard.engine.objective import MARK, Objective, TokenChoice, TokenizedText, Variant, header_start
from semgrad_guard.engine.prompts.prompt import render
from semgrad_guard.errors import BindingMismatchError, EmptyLayerSpanError, InputError, UnsupportedModelError
from semgrad_guard.guard import Answerer
from semgrad_guard.records import Message, SemanticToken

from .chat_templates import (
    ASSISTANT,
    CASE,
    CASES,
    QUESTION,
    SYSTEM,
    TOKENIZERS,
    byte_level,
    every_case,
    every_conversation,
    split_at_token,
    with_template,
    without_offsets,
)
from .oracle import official_span


@pytest.mark.parametrize(
    ("n_layers", "variant", "span"),
    [
        (3, "paper", (2,)),
        (4, "paper", (3,)),
        (5, "paper", (3, 4)),
        (32, "paper", tuple(range(17, 32))),
        (2, "official", (1,)),
        (4, "official", (2, 3)),
        (5, "official", (3, 4)),
        (32, "official", tuple(range(16, 32))),
    ],
)
def test_spans(n_layers: int, variant: Variant, span: tuple[int, ...]) -> None:
    assert Objective(variant).span(n_layers) == span
    assert tuple(official_span(n_layers, variant)) == span


@pytest.mark.parametrize("n_layers", range(3, 40, 2))
def test_the_variants_agree_on_odd_layer_counts(n_layers: int) -> None:
    assert Objective("paper").span(n_layers) == Objective("official").span(n_layers)


def test_named_layers_are_sorted_and_unique() -> None:
    assert Objective(layers=(3, 0, 3)).span(4) == (0, 3)


@pytest.mark.parametrize("layers", [(4,), (-1,), (0, 9)])
def test_layers_outside_the_model(layers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"0 \.\. 3"):
        Objective(layers=layers).span(4)


def test_empty_spans_name_the_layer_count() -> None:
    with pytest.raises(EmptyLayerSpanError, match=r"2 decoder layer.*layers=\(1,\)"):
        Objective().span(2)
    with pytest.raises(EmptyLayerSpanError, match="4"):
        Objective(layers=()).span(4)


def test_an_unknown_variant() -> None:
    with pytest.raises(InputError, match="nature"):
        Objective("nature")  # pyright: ignore


@pytest.mark.parametrize("build", TOKENIZERS.values(), ids=TOKENIZERS)
@every_conversation
@every_case
def test_every_template(case, conversation, build):
    tokenizer = build(case)
    prompt = render(tokenizer, conversation, template_options=dict(case.options))
    before, token, after = split_at_token(tokenizer, prompt)
    assert prompt.semantic_token.source == case.source
    if case.header:
        assert token + after == case.header
        assert before.count(QUESTION) == prompt.text.count(QUESTION)
    else:
        assert after == case.tail
        assert (before + token).endswith(QUESTION)


@every_conversation
@pytest.mark.parametrize("case", [case for case in CASES if case.offset is not None], ids=lambda case: case.name)
def test_offset_with_whole_role_names(case, conversation):
    prompt = render(byte_level(case), conversation, template_options=dict(case.options))
    assert prompt.semantic_token.offset == case.offset


@every_case
def test_tokenised_once_as_the_template_does(case):
    tokenizer = byte_level(case)
    messages = [{"role": "user", "content": QUESTION}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **dict(case.options))["input_ids"]
    assert list(render(tokenizer, QUESTION, template_options=dict(case.options)).ids) == expected


HEADERS = [case.header for case in CASES if case.header]
FRAGMENTS = [
    *HEADERS,
    "<|im_end|>",
    "[/INST]",
    "]",
    "INST",
    "<",
    "<|",
    "</s>",
    "é",
    "日本",
    "👩‍🔬",
    "\n",
    "  ",
    MARK,
    "?",
]
user_text = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(codec="utf-8"), max_size=8)), max_size=6
)


@settings(max_examples=30, deadline=None)
@given(parts=user_text)
@example(parts=HEADERS)
@example(parts=["Hi  \n"])
@pytest.mark.parametrize("case", [case for case in CASES if case.special or case.header], ids=lambda case: case.name)
def test_no_user_text_moves_the_token(case, parts):
    content = "a" + "".join(parts)
    for tokenizer in (byte_level(case), without_offsets(case)):
        prompt = render(tokenizer, content, template_options=dict(case.options))
        _, token, after = split_at_token(tokenizer, prompt)
        assert prompt.semantic_token.source == case.source
        assert (token + after == case.header) if case.header else (after.strip() == case.tail.strip())


HEADER = "{{ messages[0].content }}{% if add_generation_prompt %}HEADER{% endif %}"


@pytest.mark.parametrize(
    ("template", "before", "from_token", "source"),
    [
        (HEADER.replace("HEADER", "{{ '\n\n \nASSISTANT:' }}"), "Hi\n\n \n", "ASSISTANT:", "assistant_header"),
        (HEADER.replace("HEADER", "{{ '\n\n' }}"), "H", "i\n\n", "user_text"),
        # ordinary text: the `<|` that both endings share belongs to it all the same
        (HEADER.replace("HEADER", "<|bot|>{% else %}<|endoftext|>"), "Hi", "<|bot|>", "assistant_header"),
        ("{{ 'on' if add_generation_prompt else 'off' }}: {{ messages[0].content }}!", "on: H", "i!", "user_text"),
    ],
    ids=["behind white space", "of white space", "like the end of a text", "a difference before the user's text"],
)
def test_headers_of_odd_forms(template, before, from_token, source):
    tokenizer = with_template(template, special=("<|endoftext|>",))
    prompt = render(tokenizer, "Hi")
    found = split_at_token(tokenizer, prompt)
    assert (found[0], found[1] + found[2], prompt.semantic_token.source) == (before, from_token, source)


def test_straddling_token_is_the_one_with_the_first_character():
    prefix = {"": (), "ab": (1,), "abc": (1, 2)}
    for spans in (((0, 2), (2, 5), (5, 6)), None):
        text = TokenizedText("abcdef", (1, 9, 3), spans, encode=prefix.__getitem__)
        assert text.first_token_of(2) == 1
        assert text.last_token_of(2) == 1
        assert text.last_token_of(1) == 0


def test_character_of_several_tokens():
    text = TokenizedText("aé!", (1, 2, 3, 4), ((0, 1), (1, 2), (1, 2), (2, 3)), encode=lambda _: ())
    assert (text.first_token_of(1), text.last_token_of(1)) == (1, 2)


def test_common_prefix_never_ends_inside_a_special_token():
    assert header_start("x<|bot|>", "x<|eos|>", special_tokens=["<|eos|>"]) == 1
    assert header_start("x<|bot|>", "x<|eos|>") == 3
    assert header_start("x</s> bot:", "x</s>", special_tokens=["</s>"]) == 6


def test_tool_results_keep_the_header_and_the_last_user_text():
    qwen, nemo = (byte_level(CASE[name]) for name in ("qwen2.5", "mistral-nemo"))
    turns = [
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "function": {"name": "w", "arguments": {}}}],
        },
        {"role": "tool", "content": "Rome? 20 degrees", "tool_call_id": "abcdefghi"},
    ]
    before, token, after = split_at_token(qwen, render(qwen, turns))
    assert before.endswith("</tool_response><|im_end|>\n")
    assert token + after == ASSISTANT
    before, token, after = split_at_token(nemo, render(nemo, turns))
    assert (before + token).endswith("[INST]Weather in Rome?")
    assert after.startswith("[/INST][TOOL_CALLS]")


def test_text_that_the_template_leaves_out():
    header = "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    human = "ask{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %} "
    for template in (human + header, "ask"):
        with pytest.raises(UnsupportedModelError, match="leaves out the text that asks"):
            render(with_template(template), "Hi")


def test_conversation_without_a_user_ends_at_its_last_text():
    tokenizer = with_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}")
    before, token, after = split_at_token(tokenizer, render(tokenizer, [SYSTEM, Message("assistant", " ")]))
    assert (before + token, after) == ("<system>Be brief.", "</system><assistant> </assistant>")


def test_override():
    tokenizer = byte_level(CASES[0])
    prompt = render(tokenizer, QUESTION, semantic_token=-1)
    assert prompt.semantic_token == SemanticToken(-1, "override")
    length = len(prompt.ids)
    assert render(tokenizer, QUESTION, semantic_token=-length).semantic_token.offset == -length
    for offset in (0, 1, -length - 1):
        with pytest.raises(InputError, match=f"-{length} to -1"):
            render(tokenizer, QUESTION, semantic_token=offset)


# A probe's choice of the token.


def choice(model: LanguageModel, offset: int | None) -> TokenChoice:
    return TokenChoice(offset=offset, template=model.identity.template, model=model.name, reason="measured")


def saved(path: Path, record: object) -> Path:
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return path


def again(model: LanguageModel, token: int | TokenChoice | None, **options: object) -> LanguageModel:
    return LanguageModel.from_transformers(
        model._model, model.tokenizer, name=model.name, semantic_token=token, template_options=options
    )


def test_the_model_takes_the_files_token(language_model: LanguageModel, tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json", {"other": 1, "semantic_token": choice(language_model, -4).model_dump()})
    found = again(language_model, TokenChoice.load(path))
    token = found.render("q").semantic_token
    assert (token.offset, token.source) == (-4, "override")
    expected = language_model.evidence("q", "an answer").gradients(Objective(token=-4)).scores.semgrad
    assert SemGrad()(found.evidence("q", "an answer")).uncertainty == expected


def test_the_templates_own_place_overrides_nothing(language_model: LanguageModel) -> None:
    found = again(language_model, choice(language_model, None))
    assert found.render("q").semantic_token == language_model.render("q").semantic_token
    assert found.semantic_token is None


def test_another_template_is_refused(language_model: LanguageModel) -> None:
    with pytest.raises(BindingMismatchError, match="another token there"):
        again(language_model, choice(language_model, -4), enable_thinking=False)


def test_calibrations_are_bound_to_an_own_token(language_model: LanguageModel) -> None:
    plain = Answerer(language_model, HybridGrad()).binding().settings or {}
    moved = Answerer(again(language_model, -4), HybridGrad()).binding().settings
    assert "semantic_token" not in plain
    assert moved == {**plain, "semantic_token": -4}


OUTSIDE = {"offset": 3, "template": "", "model": "", "reason": ""}


@pytest.mark.parametrize(
    "record",
    ["{", "[]", {"a": 1}, {"semantic_token": None}, {"semantic_token": OUTSIDE}],
    ids=["cut", "list", "absent", "null", "outside"],
)
def test_other_files_are_refused(tmp_path: Path, record: object) -> None:
    with pytest.raises(InputError, match="not what `semgrad-guard probe` writes"):
        TokenChoice.load(saved(tmp_path / "p.json", record))
    with pytest.raises(InputError, match="Cannot read"):
        TokenChoice.load(tmp_path / "absent.json")

"""t* on the published chat templates, with tokenizers built here that carry the same special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from semgrad_guard.engine.prompt import Prompt, render, template_fingerprint
from semgrad_guard.engine.semantic_token import MARK, TokenizedText, header_start
from semgrad_guard.errors import EmptyPromptError, InputError
from semgrad_guard.records import Message, SemanticToken

FOLDER = Path(__file__).parents[1] / "fixtures" / "chat_templates"
IM = ("<|im_start|>", "<|im_end|>")
INST = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)


@dataclass(frozen=True)
class Case:
    """A template, its special tokens, and what is known of t*: the text from t* on, or the text behind it.

    `header` is the assistant header (t* opens it); `tail` is what follows the user's text where there is no header
    (t* is just before). `offset` is t*'s place from the end where the vocabulary does not matter.
    """

    name: str
    special: tuple[str, ...] = ()
    header: str = ""
    tail: str = ""
    offset: int | None = None
    bos: str = "<s>"
    eos: str = "</s>"
    options: tuple[tuple[str, object], ...] = ()

    @property
    def source(self) -> str:
        return "assistant_header" if self.header else "user_text"


LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PHI_3 = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
ASSISTANT = "<|im_start|>assistant\n"
CASES = (
    Case("llama-3", LLAMA_3, "<|start_header_id|>assistant<|end_header_id|>\n\n", offset=-4, bos="<|begin_of_text|>"),
    Case(
        "llama-3.1-tools",
        LLAMA_3,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        offset=-4,
        bos="<|begin_of_text|>",
    ),
    Case("qwen2.5", IM, ASSISTANT, offset=-3, eos="<|im_end|>"),
    Case("qwen3", (*IM, "<think>", "</think>"), ASSISTANT, offset=-3, eos="<|im_end|>"),
    Case(
        "qwen3",
        (*IM, "<think>", "</think>"),
        ASSISTANT + "<think>\n\n</think>\n\n",
        offset=-7,
        eos="<|im_end|>",
        options=(("enable_thinking", False),),
    ),
    Case("chatml", IM, ASSISTANT, offset=-3),
    Case("phi-4", (*IM, "<|im_sep|>"), "<|im_start|>assistant<|im_sep|>", offset=-3, eos="<|im_end|>"),
    Case("phi-3.5", PHI_3, "<|assistant|>\n", offset=-2, eos="<|endoftext|>"),
    Case("gemma", ("<start_of_turn>", "<end_of_turn>"), "<start_of_turn>model\n", offset=-3, bos="<bos>", eos="<eos>"),
    Case(
        "deepseek-r1-distill",
        ("<｜User｜>", "<｜Assistant｜>", "<think>"),
        "<｜Assistant｜><think>\n",
        offset=-3,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    Case("zephyr", (), "<|assistant|>\n"),
    Case("alpaca", (), "### Response:\n"),
    Case("vicuna", (), "ASSISTANT:"),
    Case("mistral-nemo", INST, tail="[/INST]", offset=-2),
    Case("mistral-v0.3", INST, tail="[/INST]", offset=-2),
    Case("mistral-v0.1", (), tail=" [/INST]"),
    Case("llama-2", (), tail=" [/INST]"),
    Case("yi-1.5", IM, tail="<|im_end|>\n<|im_start|>assistant\n", offset=-6),
)
CASE = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name + ("-options" if case.options else ""))

QUESTION = "What is the capital of France?"
SYSTEM = Message("system", "Be brief.")
HISTORY = [Message("user", "Hi there."), Message("assistant", "Hello!")]
CONVERSATIONS = {
    "string": QUESTION,
    "single": [Message("user", QUESTION)],
    "mapping": [{"role": "user", "content": QUESTION}],
    "system": [SYSTEM, Message("user", QUESTION)],
    "empty system": [Message("system", ""), Message("user", QUESTION)],
    "multi-turn": [*HISTORY, Message("user", QUESTION)],
    "system, multi-turn": [SYSTEM, *HISTORY, Message("user", QUESTION)],
    "asked before": [Message("user", QUESTION), Message("assistant", QUESTION), Message("user", QUESTION)],
}
every_conversation = pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)


def specials(case: Case) -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in (case.bos, case.eos, *case.special)]


@cache
def byte_level(case: Case, merges: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows the role names as whole words or, without merges, splits them into bytes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["assistant", "user", "model", "system", " capital", " France", "###", " Response", "\n\n", "ASSISTANT"]
    trainer = trainers.BpeTrainer(vocab_size=600 if merges else 256, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(words * 3, trainer)
    return finish(core, case)


@cache
def metaspace(case: Case) -> PreTrainedTokenizerFast:
    """Like SentencePiece: `▁` for spaces, one put in front of the text, bytes for unknown characters."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghilmnopqrstuwxyzASINT?[]/:#|<>."]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return finish(core, case)


def finish(core: Tokenizer, case: Case) -> PreTrainedTokenizerFast:
    core.add_special_tokens(specials(case))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=case.bos, eos_token=case.eos)
    tokenizer.chat_template = (FOLDER / f"{case.name}.jinja").read_text()
    return tokenizer


@cache
def without_offsets(case: Case) -> ByT5Tokenizer:
    """A real tokenizer in Python, one token a byte: it cannot tell the span of a token."""
    tokenizer = ByT5Tokenizer(extra_ids=0, bos_token=case.bos, eos_token=case.eos)
    tokenizer.add_tokens(specials(case))
    tokenizer.chat_template = (FOLDER / f"{case.name}.jinja").read_text()
    assert not tokenizer.is_fast
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level,
    "single bytes": lambda case: byte_level(case, merges=False),
    "metaspace": metaspace,
    "no offsets": without_offsets,
}


def split_at_token(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[str, str, str]:
    """The prompt's text before t*, t* itself, and what follows."""
    index = len(prompt.ids) + prompt.semantic_token.offset
    parts = prompt.ids[:index], prompt.ids[index : index + 1], prompt.ids[index + 1 :]
    before, token, after = (tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) for ids in parts)
    return before, token, after


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


@pytest.mark.parametrize(
    ("name", "token", "offset"),
    [("qwen2.5", "<|im_start|>", -3), ("llama-3", "<|start_header_id|>", -4), ("mistral-nemo", "?", -2)],
)
def test_the_papers_models_get_the_papers_positions(name, token, offset):
    tokenizer = byte_level(CASE[name])
    prompt = render(tokenizer, QUESTION)
    assert prompt.semantic_token.offset == offset
    assert tokenizer.convert_ids_to_tokens(prompt.ids[offset]) == token


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


def with_template(template: str, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with a template of the test's own."""
    tokenizer = fresh()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def test_header_behind_white_space_starts_at_its_first_visible_character():
    tokenizer = with_template(
        "{{ messages[0].content }}{% if add_generation_prompt %}{{ '\n\n \nASSISTANT:' }}{% endif %}"
    )
    prompt = render(tokenizer, "Hi")
    assert split_at_token(tokenizer, prompt) == ("Hi\n\n \n", "ASSISTANT", ":")


def test_generation_prompt_of_white_space_is_no_header():
    tokenizer = with_template("{{ messages[0].content }}{% if add_generation_prompt %}{{ '\n\n' }}{% endif %}")
    prompt = render(tokenizer, "Hi")
    assert split_at_token(tokenizer, prompt) == ("H", "i", "\n\n")
    assert prompt.semantic_token.source == "user_text"


def test_text_header_that_resembles_the_end_of_text_token():
    """`<|bot|>` is ordinary text here: the shared `<|` of both endings belongs to it all the same."""
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<|bot|>{% else %}<|endoftext|>{% endif %}"
    tokenizer = with_template(template, special=("<|endoftext|>",))
    before, token, after = split_at_token(tokenizer, render(tokenizer, "Hi"))
    assert (before, token + after) == ("Hi", "<|bot|>")


def test_difference_before_the_users_text_is_no_header():
    tokenizer = with_template("{{ 'on' if add_generation_prompt else 'off' }}: {{ messages[0].content }}!")
    assert split_at_token(tokenizer, render(tokenizer, "Hi")) == ("on: H", "i", "!")


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
    tokenizer = with_template("ask{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %} " + header)
    assert split_at_token(tokenizer, render(tokenizer, "Hi")) == ("ask ", "ASSISTANT", ":")
    tokenizer.chat_template = "ask"
    assert render(tokenizer, "Hi").semantic_token == SemanticToken(-1, "last_token")


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


def fresh() -> PreTrainedTokenizerFast:
    """A tokenizer whose template a test may change."""
    return finish(Tokenizer.from_str(byte_level(CASES[0]).backend_tokenizer.to_str()), CASES[0])


def test_without_a_template():
    tokenizer = fresh()
    tokenizer.chat_template = None
    assert render(tokenizer, QUESTION).semantic_token == SemanticToken(-1, "last_token")
    joined = render(tokenizer, [SYSTEM, Message("user", QUESTION)])
    assert joined.text == f"{SYSTEM.content}\n\n{QUESTION}"
    assert render(tokenizer, QUESTION, semantic_token=-2).semantic_token == SemanticToken(-2, "override")


def test_plain_prompts_keep_the_tokenizers_ordinary_special_tokens():
    tokenizer = ByT5Tokenizer(extra_ids=0)  # closes every text with </s>
    assert render(tokenizer, "ab").ids == tuple(tokenizer("ab")["input_ids"])
    assert render(tokenizer, "ab").ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("conversation", ["", " \n\t", [], [Message("user", "  ")], [Message("system", "")]])
def test_empty_prompts(conversation, template):
    tokenizer = fresh()
    if not template:
        tokenizer.chat_template = None
    with pytest.raises(EmptyPromptError):
        render(tokenizer, conversation)


@pytest.mark.parametrize(
    ("conversation", "complaint"),
    [
        ([{"role": "user"}], "content"),
        ([{"content": "Hi"}], "role"),
        ([{"role": "user", "content": 3}], "content"),
        ([Message("user", None)], "content"),
        ([SYSTEM, "Hi"], "Message 2 is a str"),
        ({"role": "user", "content": "Hi"}, "wrap"),
        (b"Hi", "list of messages"),
        (7, "list of messages"),
        ("\ud83d", "surrogate"),
    ],
)
def test_malformed_messages(conversation, complaint):
    with pytest.raises(InputError, match=complaint):
        render(byte_level(CASES[0]), conversation)


def test_what_the_template_says_is_passed_on():
    mistral = CASE["mistral-v0.3"]
    with pytest.raises(InputError, match=r"roles: user, user.*conversation roles must alternate"):
        render(byte_level(mistral), [Message("user", "Hi"), Message("user", "there")])
    with pytest.raises(InputError, match="refused"):
        render(with_template("{{ messages[0].content + 3 }}"), "Hi")
    with pytest.raises(InputError, match="refused"):
        render(with_template("{% if %}"), "Hi")


def test_options_that_rendering_decides():
    with pytest.raises(InputError, match="rendering decides"):
        render(byte_level(CASES[0]), "Hi", template_options={"add_generation_prompt": False})


def test_nothing_of_the_callers_is_changed():
    messages = [{"role": "user", "content": " Hi "}]
    options = {"enable_thinking": False}
    render(byte_level(CASES[2]), messages, template_options=options)
    assert (messages, options) == ([{"role": "user", "content": " Hi "}], {"enable_thinking": False})


def test_fingerprint():
    tokenizer = fresh()
    original = template_fingerprint(tokenizer)
    assert len(original) == 12
    assert original == template_fingerprint(tokenizer, {}) == template_fingerprint(fresh())
    assert original != template_fingerprint(tokenizer, {"enable_thinking": False})
    assert template_fingerprint(tokenizer, {"tools": [fresh]}) == template_fingerprint(tokenizer, {"tools": [fresh]})
    tokenizer.chat_template += " "
    assert original != template_fingerprint(tokenizer)
    tokenizer.chat_template = None
    assert template_fingerprint(tokenizer, {"enable_thinking": False}) == "plain"


def test_several_named_templates():
    tokenizer = fresh()
    tokenizer.chat_template = {"rag": "{{ messages[0].content }}", "tool_use": "{{ messages[0].content }}!"}
    with pytest.raises(InputError, match="Name one"):
        render(tokenizer, "Hi")
    assert render(tokenizer, "Hi", template_options={"chat_template": "rag"}).text == "Hi"


def test_every_fixture_is_used_and_listed():
    names = {path.stem for path in FOLDER.glob("*.jinja")}
    table = (FOLDER / "README.md").read_text()
    assert names == {case.name for case in CASES}
    assert all(f"`{name}.jinja`" in table for name in names)

"""Chat templates of published formats, and tokenizers built here that carry the same special tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.records import Message

FOLDER = Path(__file__).parents[1] / "fixtures" / "chat_templates"
PUBLISHED = os.environ.get("SEMGRAD_CHAT_TEMPLATES")
"""A folder of templates as they are published, set by `make check-templates`."""
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


def template(name: str) -> str:
    """A template's text: the published one where `make check-templates` has found it, else our re-creation."""
    published = Path(PUBLISHED or FOLDER) / f"{name}.jinja"
    path = published if published.exists() else FOLDER / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


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
    tokenizer.chat_template = template(case.name)
    return tokenizer


@cache
def without_offsets(case: Case) -> ByT5Tokenizer:
    """A real tokenizer in Python, one token a byte: it cannot tell the span of a token."""
    tokenizer = ByT5Tokenizer(extra_ids=0, bos_token=case.bos, eos_token=case.eos)
    tokenizer.add_tokens(specials(case))
    tokenizer.chat_template = template(case.name)
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


def fresh() -> PreTrainedTokenizerFast:
    """A tokenizer whose template a test may change."""
    return finish(Tokenizer.from_str(byte_level(CASES[0]).backend_tokenizer.to_str()), CASES[0])


def with_template(template: str, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with a template of the test's own."""
    tokenizer = fresh()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer

"""A tiny random chat model with a byte-level tokenizer."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = """
<tool_call>
{"name": "paint", "arguments": {"colour": "red", "twice": true}}
</tool_call>
{"type": "function", "function": {"name": "paint", "description": "Paint the wall.", "strict": false, "parameters": {
"properties": {"colour": {"$defs": {"Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"}}},
"twice": {"title": "Twice", "type": "boolean"}}, "required": ["colour", "twice"], "type": "object"}}}
<tools></tools> [{"name":"paint","arguments":{"colour":"green","twice":false}}] [TOOL_CALLS][AVAILABLE_TOOLS]
You are provided with function signatures within XML tags. You may call one or more functions to assist with the query.
For each function call, return a json object with function name and arguments within XML tags.
"""
"""The words of tools and of their calls: where each is a token, they are read and written in a third of the steps."""


def merges_of(text: str) -> list[tuple[str, str]]:
    """The merges by which every word of a text becomes one token."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    words = dict.fromkeys(word for word, _ in split(text))
    return list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))


def byte_tokenizer(*, chat_template: str | None = CHATML, words: str = "") -> PreTrainedTokenizerFast:
    """One token a byte, ChatML's two special tokens, and the words of a text: every text can be read and written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges_of(words)
    known = [*alphabet, "<|im_start|>", "<|im_end|>", *dict.fromkeys("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(known)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=chat_template
    )


def random_llama(*, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Random weights, float64: exact comparisons stay exact."""
    settings: dict[str, object] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": 257,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).double().eval()

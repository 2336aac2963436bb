"""Which models, prompts, answers and batches are measured."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
)

from semgrad_guard import LanguageModel


def _qwen(width: int, inner: int, layers: int, heads: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )


SHAPES: dict[str, PreTrainedConfig] = {
    "small": _qwen(256, 1024, 6, 4),
    "0.5B": _qwen(896, 4864, 24, 14),
    "1.5B": _qwen(1536, 8960, 28, 12),
    "8B": LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14_336,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
    ),
    "hybrid": Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
}
"""small is for trying a benchmark out; 0.5B and 1.5B are Qwen2.5's shapes, 8B is Llama 3.1's, the paper's; hybrid is
Qwen3.5's of 0.8B with Qwen2.5's vocabulary: three of four layers hold a state, so that scores continue from a cache."""

SEMANTIC_TOKEN = -3


@dataclass(frozen=True)
class Setting:
    """A batch of `rows` prompts of `prompt` tokens, each answered with `answer` tokens."""

    prompt: int
    answer: int
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.prompt}/{self.answer}" + (f" x{self.rows}" if self.rows > 1 else "")


CELLS = {
    "quick": (Setting(60, 8), Setting(200, 8), Setting(60, 8, 3)),
    "usual": (
        *(Setting(60, answer) for answer in (8, 32, 128)),
        *(Setting(1000, 8), Setting(1000, 32), Setting(60, 16, 8)),
    ),
    "full": (
        *(Setting(60, answer) for answer in (1, 8, 32, 128, 512)),
        *(Setting(prompt, 32) for prompt in (1000, 4000)),
        *(Setting(60, 32, rows) for rows in (4, 8, 32)),
        *(Setting(60, 16, 8), Setting(1000, 8), Setting(4000, 8)),
    ),
}


def build(shape: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The shape with random weights, made in place and in its dtype (8 billion float32 weights would not fit)."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(SHAPES[shape]).eval()
    finally:
        torch.set_default_dtype(default)


def wordy_model(shape: str, dtype: torch.dtype, device: str) -> LanguageModel:
    """The shape with random weights, and a tokenizer in which every token that is drawn is a word.

    Every sixteenth word ends a sentence: sampled answers have sentences of sixteen words or so.
    """
    config = SHAPES[shape]
    own = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = map("".join, itertools.product(letters.upper(), letters, letters, letters))
    drawn = itertools.islice(words, config.vocab_size - len(own))
    known = own + [f"Ġ{word}" if number % 16 else f"Ġ{word}." for number, word in enumerate(drawn)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(known)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(own[-2:])
    pocket = LanguageModel.from_pretrained("pocket").tokenizer
    marks = {"eos_token": own[-1], "pad_token": own[-1]}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=pocket.chat_template, **marks)
    return LanguageModel.from_transformers(build(shape, dtype, device), wrapped)

"""Which models, prompts, answers and batches are measured; a fixed rule leaves cases out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from semgrad_guard import LanguageModel

_HALF_BILLION = Qwen2Config(
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151_936,
    tie_word_embeddings=True,
)
_SMALL = Qwen2Config(
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=1024,
    vocab_size=151_936,
    tie_word_embeddings=True,
)
_ONE_AND_A_HALF = Qwen2Config(
    hidden_size=1536,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    intermediate_size=8960,
    vocab_size=151_936,
    tie_word_embeddings=True,
)
_EIGHT_BILLION = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
)
SHAPES: dict[str, PreTrainedConfig] = {
    "small": _SMALL,
    "0.5B": _HALF_BILLION,
    "1.5B": _ONE_AND_A_HALF,
    "8B": _EIGHT_BILLION,
}
"""small is for trying the benchmark out; 0.5B and 1.5B are Qwen2.5's shapes, 8B is Llama 3.1's, the paper's."""

SEMANTIC_TOKEN = -3
NAIVE_MINUTES = 20
"""A cell in which the official algorithm would take longer for all its rounds is measured without it."""


@dataclass(frozen=True)
class Setting:
    """A batch of `rows` prompts of `prompt` tokens, each answered with `answer` tokens."""

    prompt: int
    answer: int
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.prompt}/{self.answer}" + (f" x{self.rows}" if self.rows > 1 else "")


QUICK = (Setting(60, 8), Setting(200, 8), Setting(60, 8, 3))
USUAL = (Setting(60, 8), Setting(60, 32), Setting(60, 128), Setting(1000, 8), Setting(1000, 32), Setting(60, 16, 8))
FULL = (
    *(Setting(60, answer) for answer in (1, 8, 32, 128, 512)),
    *(Setting(prompt, 32) for prompt in (1000, 4000)),
    *(Setting(60, 32, rows) for rows in (4, 8, 32)),
    *(Setting(60, 16, 8), Setting(1000, 8), Setting(4000, 8)),
)


def build(shape: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The shape with random weights, made in place and in its dtype (8 billion float32 weights would not fit)."""
    torch.manual_seed(0)
    config = SHAPES[shape]
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen2ForCausalLM
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return kind(config).eval()
    finally:
        torch.set_default_dtype(default)


def speaking_model(layers: int, width: int) -> LanguageModel:
    """A Llama of random weights, in the pocket model's tokens; its answers are gibberish of full length."""
    tokenizer = LanguageModel.from_pretrained("pocket").tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return LanguageModel.from_transformers(LlamaForCausalLM(config).eval(), tokenizer)


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


def naive_bytes(config: Any, setting: Setting, element: int) -> int:
    """The official algorithm's least memory above the weights: its graph, its logits, the head's gradient."""
    tokens = setting.prompt + setting.answer
    attention = config.num_attention_heads * tokens * tokens * 2
    layer = tokens * (10 * config.hidden_size + 4 * config.intermediate_size) + attention
    logits = tokens * config.vocab_size * element + setting.answer * config.vocab_size * 4 * 3
    head = config.vocab_size * config.hidden_size * (4 + element)
    return config.num_hidden_layers * layer * element + logits + head


def naive_flops(config: Any, setting: Setting) -> float:
    """Operations of the official algorithm over a batch: forward, and backward to every state and to the head."""
    tokens = setting.rows * (setting.prompt + setting.answer)
    head = config.vocab_size * config.hidden_size
    return tokens * (4.0 * layer_weights(config) * config.num_hidden_layers + 2.0 * head) + 4.0 * tokens * head


def layer_weights(config: Any) -> int:
    """Weights of one decoder layer."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size
    return width * width * 2 + 2 * width * width * groups // heads + 3 * width * config.intermediate_size


def leaves_naive_out(
    config: Any, setting: Setting, *, element: int, flops_per_second: float, free_bytes: int, rounds: int
) -> str | None:
    """Why the official algorithm is not run in this cell; None where it is."""
    needed = naive_bytes(config, setting, element)
    if needed > free_bytes:
        return f"the official algorithm would need {needed / 2**30:.0f} GiB of {free_bytes / 2**30:.0f}"
    minutes = rounds * naive_flops(config, setting) / flops_per_second / 60
    return f"the official algorithm would take {minutes:.0f} minutes" if minutes > NAIVE_MINUTES else None

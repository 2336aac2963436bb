"""Tiny random sequence classifiers, saved as checkpoints: NLI models and cross-encoders of three architectures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_SETTINGS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
_DIFFERENCES: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 40, "type_vocab_size": 2},
    "roberta": {"max_position_embeddings": 42, "type_vocab_size": 1},
    "deberta-v2": {
        "max_position_embeddings": 40,
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "type_vocab_size": 0,
    },
}
ARCHITECTURES = tuple(_DIFFERENCES)
MNLI = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")


def save_pair_model(
    folder: Path, *, labels: Sequence[str], architecture: str = "bert", seed: int = 0, safe: bool = True
) -> Path:
    """A checkpoint with these labels; one label makes a cross-encoder."""
    tokenizer = _byte_pair_tokenizer()
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **_SETTINGS,
        **_DIFFERENCES[architecture],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
    if safe:
        model.save_pretrained(folder)
    else:
        folder.mkdir()
        config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    tokenizer.save_pretrained(folder)
    return folder


def _byte_pair_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )

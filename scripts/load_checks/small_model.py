"""A model that is fast and knows nothing: for checks that do not depend on the answers' text."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from semgrad_guard.pocket import POCKET_PATH


def small_model(folder: Path) -> Path:
    """A folder with a Llama of four layers, random weights and the embedded model's tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(POCKET_PATH)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in POCKET_PATH.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder

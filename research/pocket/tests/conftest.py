"""One thread, as in training; the tokenizer, and the Llama that the committed reader is written into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from research.pocket.reader.network import READER, load_reader
from research.pocket.reader.to_llama import to_llama
from research.pocket.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


@pytest.fixture(scope="session")
def llama(tokenizer: Tokenizer) -> LlamaForCausalLM:
    return to_llama(load_reader(READER, tokenizer), tokenizer)

"""Tiny models of every layout that is known, and what a process with vLLM finds about each (`make check-vllm`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from semgrad_guard.named import folder_of

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "vocab_size": 13_312 + 7,  # no multiple of 64, so vLLM pads it
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
Found = dict[str, Any]
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n"
    "{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)
"""A template whose prompts open a thought."""


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Found]:
    """`found("llama", "float32")`: what a process found about a model of that type."""

    @cache
    def look(kind: str, dtype: str) -> Found:
        folder = tmp_path_factory.mktemp(kind)
        path = folder_of("smollm2") if kind == "smollm2" else made(kind, folder / "model")
        return run("child.py", path, dtype, folder / "found.json")

    return look


def run(script: str, *arguments: object, **environment: str) -> Found:
    """What a script of this folder writes, in a process of its own; its output is its last argument."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: make check-vllm has an environment for it")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT | environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(Path(str(arguments[-1])).read_text())


def made(kind: str, folder: Path, *, template: str | None = None, positions: int = 512) -> Path:
    """A random model of a type, with the embedded model's tokenizer."""
    tokenizer = folder_of("pocket")
    assert tokenizer is not None
    torch.manual_seed(3)
    sizes = {**SIZES, "max_position_embeddings": positions}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
    model.generation_config.eos_token_id = [0, 17]  # chat models list several
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder

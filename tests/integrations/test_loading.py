"""Whatever `LanguageModel.from_pretrained` loads, the doors and the commands load by the same name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from langchain_semgrad_guard import ChatSemGrad
from llama_index_semgrad_guard import SemGradLLM
from semgrad_guard import LanguageModel
from semgrad_guard.cli import app
from semgrad_guard.errors import InputError
from tests.engine.gguf_files import tiny, write

QUESTION = "in a box?"


def by_langchain(path: str, **settings: object) -> str:
    return str(ChatSemGrad(model=path, max_tokens=6, **settings).invoke(QUESTION).content)


def by_llama_index(path: str, **settings: object) -> str:
    return SemGradLLM(model=path, max_tokens=6, **settings).complete(QUESTION).text


def by_command(path: str) -> str:
    ran = CliRunner().invoke(app, ["ask", QUESTION, "--model", path, "--max-tokens", "6", "--json"])
    assert ran.exit_code == 0, ran.output
    return str(json.loads(ran.stdout)["text"])


def test_every_door_loads_a_gguf_file(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", tiny())
    expected = LanguageModel.from_pretrained(str(file)).generate(QUESTION, None)
    for door in (by_langchain, by_llama_index, by_command):
        assert expected.text.startswith(door(str(file)))
        assert door(str(file)) == door(str(file.parent))


@pytest.mark.parametrize("door", [by_langchain, by_llama_index, LanguageModel.from_pretrained])
def test_every_door_takes_a_quantization(door: Callable[..., object], checkpoint: Path) -> None:
    """Of a method that there is not, so that the message about it comes back through the door."""
    with pytest.raises(InputError, match="no quantization with quant_method 'nosuch'"):
        door(str(checkpoint), quantization_config={"quant_method": "nosuch"})

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


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny())


def by_langchain(path: str) -> str:
    return str(ChatSemGrad(model=path, max_tokens=6).invoke(QUESTION).content)


def by_llama_index(path: str) -> str:
    return SemGradLLM(model=path, max_tokens=6).complete(QUESTION).text


def by_command(path: str) -> str:
    ran = CliRunner().invoke(app, ["ask", QUESTION, "--model", path, "--max-tokens", "6", "--json"])
    assert ran.exit_code == 0, ran.output
    return str(json.loads(ran.stdout)["text"])


@pytest.mark.parametrize("door", [by_langchain, by_llama_index, by_command])
def test_every_door_loads_a_gguf_file(door: Callable[[str], str], file: Path, tmp_path: Path) -> None:
    expected = LanguageModel.from_pretrained(str(file)).generate(QUESTION, None)
    assert expected.text.startswith(door(str(file)))
    assert door(str(file)) == door(str(file.parent))


def quantized_by_langchain(path: str, settings: dict[str, object]) -> object:
    return ChatSemGrad(model=path, quantization_config=settings).invoke(QUESTION)


def quantized_by_llama_index(path: str, settings: dict[str, object]) -> object:
    return SemGradLLM(model=path, quantization_config=settings).complete(QUESTION)


def quantized_by_hand(path: str, settings: dict[str, object]) -> object:
    return LanguageModel.from_pretrained(path, quantization_config=settings)


@pytest.mark.parametrize("door", [quantized_by_langchain, quantized_by_llama_index, quantized_by_hand])
def test_every_door_takes_a_quantization(door: Callable[..., object], checkpoint: Path) -> None:
    """Of a method that there is not, so that the message about it comes back through the door."""
    with pytest.raises(InputError, match="no quantization with quant_method 'nosuch'"):
        door(str(checkpoint), {"quant_method": "nosuch"})

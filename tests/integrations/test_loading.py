"""Whatever `LanguageModel.from_pretrained` loads, doors and commands load by the same name; and unknown options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from langchain_semgrad_guard import ChatSemGrad
from llama_index_semgrad_guard import SemGradLLM
from semgrad_guard import LanguageModel
from semgrad_guard.cli import app
from semgrad_guard.errors import InputError
from tests.engine.gguf_files import tiny, write

QUESTION = "in a box?"


def by_command(path: str) -> str:
    ran = CliRunner().invoke(app, ["ask", QUESTION, "--model", path, "--max-tokens", "6", "--json"])
    assert ran.exit_code == 0, ran.output
    return str(json.loads(ran.stdout)["text"])


TEXTS: dict[str, Callable[[str], str]] = {
    "langchain": lambda path: ChatSemGrad(model=path, max_tokens=6).invoke(QUESTION).text,
    "llama_index": lambda path: SemGradLLM(model=path, max_tokens=6).complete(QUESTION).text,
    "command": by_command,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny())


@pytest.mark.parametrize("door", TEXTS)
def test_every_door_loads_a_gguf_file(door: str, file: Path) -> None:
    expected = LanguageModel.from_pretrained(str(file)).generate(QUESTION, None)
    assert expected.text.startswith(TEXTS[door](str(file)))
    assert TEXTS[door](str(file)) == TEXTS[door](str(file.parent))


ANSWERS: dict[str, Callable[..., Any]] = {
    "ChatSemGrad": lambda path, **fields: ChatSemGrad(model=path, **fields).invoke(QUESTION),
    "SemGradLLM": lambda path, **fields: SemGradLLM(model=path, **fields).complete(QUESTION),
}


@pytest.mark.parametrize("door", ANSWERS)
def test_every_door_takes_a_quantization(door: str, checkpoint: Path) -> None:
    """Of a method that there is not, so that the message about it comes back through the door."""
    with pytest.raises(InputError, match="no quantization with quant_method 'nosuch'"):
        ANSWERS[door](str(checkpoint), quantization_config={"quant_method": "nosuch"})


@pytest.mark.parametrize("door", ANSWERS)
def test_unknown_options_are_named(door: str) -> None:
    with pytest.raises(InputError, match=rf"{door} takes no temprature; it takes .*max_tokens.*temperature"):
        ANSWERS[door]("pocket", temprature=1)
    ask: Any = ChatSemGrad().invoke if door == "ChatSemGrad" else SemGradLLM().complete
    with pytest.raises(InputError, match=rf"a call of {door} takes no temprature; it takes .*max_tokens.*temperature"):
        ask("hi", temprature=1)

"""The package's door: its names, and its message where LlamaIndex is missing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import llama_index_semgrad_guard
from tests.warm_python import WarmPython

WITHOUT = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "llama_index" else found(name, *rest)
from semgrad_guard.errors import MissingExtraError
try:
    import llama_index_semgrad_guard
except MissingExtraError as error:
    print(error)
"""


def test_its_names() -> None:
    assert all(hasattr(llama_index_semgrad_guard, name) for name in llama_index_semgrad_guard.__all__)
    assert (files(llama_index_semgrad_guard) / "py.typed").is_file()


def test_a_missing_llama_index_is_named_with_the_command(warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run(["-c", WITHOUT], folder=tmp_path)
    assert done.stdout.strip() == "llama-index-core is not installed. Run: pip install 'semgrad-guard[llama-index]'"

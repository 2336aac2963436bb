"""The package's door: its names, and its message where LlamaIndex is missing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

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

WITHOUT_A_PRIVATE_NAME = """
{change}
from semgrad_guard.errors import UnsupportedFrameworkError
try:
    import llama_index_semgrad_guard
except UnsupportedFrameworkError as error:
    print(error)
"""


def test_its_names() -> None:
    assert all(hasattr(llama_index_semgrad_guard, name) for name in llama_index_semgrad_guard.__all__)
    assert (files(llama_index_semgrad_guard) / "py.typed").is_file()


def test_a_missing_llama_index_is_named_with_the_command(warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run(["-c", WITHOUT], folder=tmp_path)
    assert done.stdout.strip() == "llama-index-core is not installed. Run: pip install 'semgrad-guard[llama-index]'"


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        (
            "from llama_index.core.base.base_retriever import BaseRetriever as R; R.retrieve = lambda *_, **__: []",
            "use of _retrieve",
        ),
        ("from llama_index_instrumentation import span; del span.active_span_id", "span.active_span_id"),
    ],
)
def test_a_llama_index_without_a_private_name_is_refused(
    warm_python: WarmPython, tmp_path: Path, change: str, absent: str
) -> None:
    """Withholding hangs on these names: without one, texts would be taken for others."""
    done = warm_python.run(["-c", WITHOUT_A_PRIVATE_NAME.format(change=change)], folder=tmp_path)
    assert absent in done.stdout
    assert "pip install 'semgrad-guard[llama-index]'" in done.stdout

"""The packages: their names, and their errors where a framework is missing or cannot be guarded."""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

from tests.warm_python import WarmPython

LANGCHAIN = ("langchain_semgrad_guard", "langchain_core", "langchain-core", "langchain")
LLAMA_INDEX = ("llama_index_semgrad_guard", "llama_index", "llama-index-core", "llama-index")
PACKAGES = (LANGCHAIN, LLAMA_INDEX)
"""A package, its framework, and the names of the framework's distribution and of our extra."""

WITHOUT = """
import importlib.util, sys
package, framework = sys.argv[1:]
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == framework else known(name, *rest)
from semgrad_guard.errors import MissingExtraError
try:
    __import__(package)
except MissingExtraError as error:
    print(error)
"""

WITHOUT_AN_EXTRA = """
import sys
sys.modules[sys.argv[1]] = None
import langchain_semgrad_guard
from semgrad_guard.errors import MissingExtraError
print(langchain_semgrad_guard.ChatSemGrad.__name__)
try:
    getattr(langchain_semgrad_guard, sys.argv[2])
except MissingExtraError as error:
    print(error)
"""


@pytest.mark.parametrize("package", [package for package, *_ in PACKAGES])
def test_its_names(package: str) -> None:
    module = import_module(package)
    assert all(hasattr(module, name) for name in module.__all__)
    assert (files(module) / "py.typed").is_file()


@pytest.mark.parametrize(("package", "framework", "distribution", "extra"), PACKAGES)
def test_a_missing_framework_is_named_with_the_command(
    warm_python: WarmPython, tmp_path: Path, package: str, framework: str, distribution: str, extra: str
) -> None:
    done = warm_python.run(["-c", WITHOUT, package, framework], folder=tmp_path)
    assert done.stdout.strip() == f"{distribution} is not installed. Run: pip install 'semgrad-guard[{extra}]'"


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [("langchain", "UncertaintyMiddleware", "agents"), ("opentelemetry", "UncertaintyTracer", "tracing")],
)
def test_a_name_that_needs_an_extra_names_it(
    warm_python: WarmPython, tmp_path: Path, package: str, name: str, extra: str
) -> None:
    done = warm_python.run(["-c", WITHOUT_AN_EXTRA, package, name], folder=tmp_path)
    works, message = done.stdout.splitlines()
    assert works == "ChatSemGrad"
    assert message.endswith(f"is not installed. Run: pip install 'semgrad-guard[{extra}]'")

"""The package: its names, and its errors where LangChain is missing or cannot be guarded."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

import langchain_semgrad_guard
from tests.warm_python import WarmPython

WITHOUT_LANGCHAIN = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "langchain_core" else found(name, *rest)
from semgrad_guard.errors import MissingExtraError
try:
    import langchain_semgrad_guard
except MissingExtraError as error:
    print(error)
"""

WITHOUT_A_PRIVATE_NAME = """
from langchain_core.language_models.chat_models import BaseChatModel
from semgrad_guard.errors import UnsupportedFrameworkError
{change}
try:
    import langchain_semgrad_guard
except UnsupportedFrameworkError as error:
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


def test_its_names() -> None:
    assert all(hasattr(langchain_semgrad_guard, name) for name in langchain_semgrad_guard.__all__)
    assert (files(langchain_semgrad_guard) / "py.typed").is_file()


def test_a_missing_langchain_is_named_with_the_command(warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run(["-c", WITHOUT_LANGCHAIN], folder=tmp_path)
    assert done.stdout.strip() == "langchain-core is not installed. Run: pip install 'semgrad-guard[langchain]'"


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        ("del BaseChatModel._generate_with_cache", "BaseChatModel._generate_with_cache"),
        ("BaseChatModel.astream = lambda *_, **__: None", "use of _astream"),
        ("from langchain_core.tracers import context; del context._configure_hooks", "context._configure_hooks"),
    ],
)
def test_a_langchain_without_a_private_name_is_refused(
    warm_python: WarmPython, tmp_path: Path, change: str, absent: str
) -> None:
    """Withholding hangs on these names: without one, answers would be delivered unjudged."""
    done = warm_python.run(["-c", WITHOUT_A_PRIVATE_NAME.format(change=change)], folder=tmp_path)
    assert absent in done.stdout
    assert "pip install 'semgrad-guard[langchain]'" in done.stdout


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [("langchain", "UncertaintyMiddleware", "agents"), ("opentelemetry", "UncertaintyTracer", "tracing")],
)
def test_what_needs_an_extra_says_which(
    warm_python: WarmPython, tmp_path: Path, package: str, name: str, extra: str
) -> None:
    done = warm_python.run(["-c", WITHOUT_AN_EXTRA, package, name], folder=tmp_path)
    works, says = done.stdout.splitlines()
    assert works == "ChatSemGrad"
    assert says.endswith(f"is not installed. Run: pip install 'semgrad-guard[{extra}]'")

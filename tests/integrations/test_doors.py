"""Every door: whatever `LanguageModel.from_pretrained` loads, by the same name; unknown options; one row in one log."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex
from typer.testing import CliRunner

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback
from langchain_semgrad_guard import guarded as chain_of_questions
from llama_index_semgrad_guard import SemGradLLM
from llama_index_semgrad_guard import UncertaintyRouterCallback as LlamaIndexRouter
from llama_index_semgrad_guard import guarded as guarded_engine
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.cli import app
from semgrad_guard.decision_log.entries import DecisionSink
from semgrad_guard.errors import InputError
from tests.engine.gguf_files import tiny, write
from tests.warm_python import WarmPython

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


CALLS: dict[str, Callable[..., Any]] = {
    "ChatSemGrad": lambda path, **fields: ChatSemGrad(model=path, **fields).invoke(QUESTION),
    "SemGradLLM": lambda path, **fields: SemGradLLM(model=path, **fields).complete(QUESTION),
}


@pytest.mark.parametrize("door", CALLS)
def test_every_door_takes_a_quantization(door: str, checkpoint: Path) -> None:
    """Of a method that there is not, so that the message about it comes back through the door."""
    with pytest.raises(InputError, match="quantization config for 'nosuch' is not right"):
        CALLS[door](str(checkpoint), quantization_config={"quant_method": "nosuch"})


@pytest.mark.parametrize("door", CALLS)
def test_unknown_options_are_named(door: str) -> None:
    with pytest.raises(InputError, match=rf"{door} takes no temprature; it takes .*max_tokens.*temperature"):
        CALLS[door]("pocket", temprature=1)
    ask: Any = ChatSemGrad().invoke if door == "ChatSemGrad" else SemGradLLM().complete
    with pytest.raises(InputError, match=rf"a call of {door} takes no temprature; it takes .*max_tokens.*temperature"):
        ask("hi", temprature=1)


# The decision log.

NONE = Policy(threshold=-1.0, on_cut="score")


def chat(model: LanguageModel, log: DecisionSink) -> ChatSemGrad:
    return ChatSemGrad.from_model(model, max_tokens=4, router=UncertaintyRouterCallback(NONE, log=log))


def routed(model: LanguageModel, log: DecisionSink) -> Any:
    router = UncertaintyRouterCallback(NONE, log=log)
    return ChatSemGrad.from_model(model, max_tokens=4).invoke("question", {"callbacks": [router]}).response_metadata


def guarded_chain(model: LanguageModel, log: DecisionSink) -> Any:
    own = chat(model, log)
    return chain_of_questions(own | (lambda message: message.text) | own, own.router)


def llm(model: LanguageModel, log: DecisionSink) -> SemGradLLM:
    return SemGradLLM.from_model(model, max_tokens=4, router=LlamaIndexRouter(NONE, log=log))


def guarded(model: LanguageModel, log: DecisionSink, make: str) -> Any:
    own = llm(model, log)
    engine: Any = getattr(SummaryIndex.from_documents([Document(text="a")]), make)
    return guarded_engine(engine(llm=own, **({"chat_mode": "simple"} if "chat" in make else {})), own.router)


DOORS: dict[str, Callable[[LanguageModel, DecisionSink], Any]] = {
    "field": lambda model, log: chat(model, log).invoke("question").response_metadata,
    "stream": lambda model, log: list(chat(model, log).stream("question"))[-1].response_metadata,
    "config": routed,
    "guarded chain": lambda model, log: guarded_chain(model, log).invoke("question").response_metadata,
    "llm": lambda model, log: llm(model, log).complete("question").raw,
    "engine": lambda model, log: guarded(model, log, "as_query_engine").query("question").metadata,
    "chat engine": lambda model, log: guarded(model, log, "as_chat_engine").chat("question").metadata,
}
"""Ask a question, and return the metadata of the answer."""


@pytest.mark.parametrize("door", DOORS)
def test_a_door_writes_its_decisions_down(
    door: str, tmp_path: Path, make_language_model: Callable[..., LanguageModel]
) -> None:
    pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")
    from semgrad_guard.decision_log.decision_log import DecisionLog

    model = make_language_model(max_position_embeddings=2048)
    with DecisionLog(tmp_path / "log.db") as log:
        metadata = DOORS[door](model, log)
        assert log.flush()
        ((decision, _),) = log.database.decisions()
    assert decision.id == metadata["semgrad_guard"]["decision_id"]
    assert (decision.action, decision.model) == ("abstain", "random-llama")


# The packages.

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

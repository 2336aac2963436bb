"""Fixtures for the LangChain tests: the tiny model, and a chat model around it."""

from __future__ import annotations

import pytest
import torch

from langchain_semgrad_guard import ChatSemGrad
from semgrad_guard import LanguageModel
from tests.random_llama import CALLS

from .support import QUESTION, ROUTES, RUNS, Route, Run, save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny checkpoint."""
    torch.set_num_threads(1)
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def tiny_for_tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny checkpoint with room for tools, and a token for every word of them."""
    torch.set_num_threads(1)
    return str(save_tiny(tmp_path_factory.mktemp("tiny-for-tools"), text=CALLS, window=8192))


@pytest.fixture(scope="session")
def language_model(tiny: str) -> LanguageModel:
    """The tiny checkpoint, loaded once."""
    return LanguageModel.from_pretrained(tiny)


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Other weights: an escalation target that answers something else."""
    return LanguageModel.from_pretrained(str(save_tiny(tmp_path_factory.mktemp("larger"), seed=5)))


@pytest.fixture
def chat(language_model: LanguageModel) -> ChatSemGrad:
    """A chat model around the tiny checkpoint."""
    return ChatSemGrad.from_model(language_model, max_tokens=12)


@pytest.fixture(scope="session")
def draft(language_model: LanguageModel) -> str:
    """The tiny model's answer to `QUESTION`, unguarded."""
    text = ChatSemGrad.from_model(language_model, max_tokens=12).invoke(QUESTION).text
    assert len(text) >= 8, "the draft must be long enough to be recognised where it leaks"
    return text


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    """One way to run a graph."""
    return RUNS[request.param]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> Route:
    """One way to get an answer."""
    return ROUTES[request.param]

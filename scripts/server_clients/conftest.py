"""Real clients against real servers; `scripts/check_server.py` starts the servers and names them in the environment."""

from __future__ import annotations

import os
from typing import Any, Literal

import pytest
from required import pytest_addoption as pytest_addoption
from required import pytest_runtest_makereport as pytest_runtest_makereport

KNOWN, UNKNOWN = "What is the capital of Japan?", "What is the capital of Mongolia?"
MODEL, DRAFT = "pocket", "Vienna"
BOTH = pytest.mark.parametrize(
    ("question", "text", "action"), [(KNOWN, "Tokyo", "answer"), (UNKNOWN, "I don't know.", "abstain")]
)


def turn(question: str) -> list[Any]:
    """A conversation of one question."""
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="session")
def url() -> str:
    """A server that withholds."""
    return os.environ["SEMGRAD_GUARD_TEST_URL"]


@pytest.fixture(scope="session")
def live_url() -> str:
    """A server that annotates, so that its streams are live."""
    return os.environ["SEMGRAD_GUARD_TEST_LIVE_URL"]


@pytest.fixture(scope="session")
def strict_url() -> str:
    """A server that lets nothing through."""
    return os.environ["SEMGRAD_GUARD_TEST_STRICT_URL"]


@pytest.fixture(scope="session")
def key() -> str:
    return os.environ["SEMGRAD_GUARD_TEST_KEY"]


@pytest.fixture(scope="session")
def city() -> Any:
    """The form of a structured answer."""
    pydantic = pytest.importorskip("pydantic")
    return pydantic.create_model("City", name=(Literal["Tokyo", "Vienna"], ...))

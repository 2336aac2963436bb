"""Shared by all tests. What needs a model is in model_fixtures.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads anything
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, on tiny models

from hypothesis import settings

from .postgresql import Postgres, require_postgresql
from .warm_python import WarmPython, warm_python

settings.register_profile("outcome", deadline=None)  # judged by the outcome, not by how busy the machine is
settings.load_profile("outcome")

HERE = Path(__file__).parent

_SLOW = """
    calibration/test_monitors.py calibration/test_prompt_shape.py cli/ decision_log/
    engine/test_adapter_folders.py engine/test_adapters.py engine/test_architectures.py engine/test_gguf.py
    engine/test_loading.py engine/test_identity.py engine/test_interruption.py engine/test_low_precision.py
    engine/test_parity.py engine/test_quantized.py engine/test_rows.py engine/test_running_batch
    engine/test_sampling.py engine/test_self_check.py engine/test_tapes.py engine/test_untouched.py
    fetching/test_fetch.py grading/test_learning.py integrations/langchain/ integrations/llama_index/
    paper/test_experiment.py paper/test_figures.py paper/test_report.py server/ test_benchmarks.py test_examples.py
    test_markdown.py test_packaging.py
"""
SLOW = tuple(_SLOW.split())
"""What `make check-fast` leaves out: whole programs, documents, simulations, and what takes more than five seconds."""

FAST = (
    "integrations/langchain/test_chat_model.py",
    "integrations/langchain/test_router.py",
    "integrations/llama_index/test_llm.py",
    "server/test_chat.py",
)
"""What it keeps of the doors' suites: that a door answers, decides and withholds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what is slow (`make check-fast`)")
    parser.addoption("--require", action="store_true", help="a skipped test is a failure: nothing was left out")


def pytest_configure(config: pytest.Config) -> None:
    """Loads the libraries, but not where tests are only handed to workers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # next to nothing of what is imported and collected is garbage
        config.pluginmanager.import_plugin("tests.model_fixtures")


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `--fast`, not even the imports of what is slow are paid for."""
    if not config.getoption("--fast") or not collection_path.is_relative_to(HERE):
        return None
    name = collection_path.relative_to(HERE).as_posix()
    return (collection_path.is_file() and name.startswith(SLOW) and not name.startswith(FAST)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--require"):
        report.outcome = "failed"
        report.longrepr = f"skipped under --require: {report.longrepr}"
    return report


@pytest.fixture(scope="session", name="warm_python")
def _warm_python() -> Generator[WarmPython]:
    """Runs programs in processes of their own, without the seconds that the libraries take to load."""
    with warm_python() as python:
        yield python


@pytest.fixture(scope="module", autouse=True)
def _what_stays() -> None:
    """What has been imported by now stays, so that no later collection has to walk over it: a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def postgres() -> Generator[Postgres]:
    """A PostgreSQL server; skips where there is none to start."""
    require_postgresql()
    made = Postgres()
    yield made
    made.remove()

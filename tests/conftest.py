"""Shared by all tests: one thread, and a tiny random chat model with a byte-level tokenizer."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads anything
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from semgrad_guard import LanguageModel

from .engine.tiny_pair_models import save_pair_model
from .postgresql import Postgres, require_postgresql
from .warm_python import WarmPython, warm_python

torch.set_num_threads(1)
settings.register_profile("outcome", deadline=None)  # judged by the outcome, not by how busy the machine is
settings.load_profile("outcome")

HERE = Path(__file__).parent

SLOW = (
    "test_examples.py",
    "test_markdown.py",
    "test_packaging.py",
    "test_benchmarks.py",
    "calibration/test_drift.py",
    "calibration/test_guarantee.py",
    "calibration/test_prompt_shape.py",
    "cli/",
    "engine/test_adapter_folders.py",
    "engine/test_adapters.py",
    "engine/test_architectures.py",
    "engine/test_attention_reading.py",
    "engine/test_gguf.py",
    "engine/test_hub.py",
    "engine/test_identity.py",
    "decision_log/",
    "engine/test_interruption.py",
    "engine/test_low_precision.py",
    "engine/test_model_as_it_is.py",
    "engine/test_objectives_exact.py",
    "engine/test_parity.py",
    "engine/test_plain_data.py",
    "engine/test_projections.py",
    "engine/test_prompt_store.py",
    "engine/test_quantized.py",
    "engine/test_running_batch.py",
    "engine/test_sampling.py",
    "engine/test_self_check.py",
    "engine/test_stratified_rows.py",
    "engine/test_threads.py",
    "engine/test_untouched.py",
    "evaluation/test_experiment.py",
    "evaluation/test_figures.py",
    "evaluation/test_learning.py",
    "evaluation/test_report.py",
    "fetching/test_fetch.py",
    "integrations/langchain/",
    "integrations/llama_index/",
    "server/",
)
"""What `make check-fast` leaves out: whole programs, documents, simulations, and what takes more than five seconds."""

FAST = (
    "integrations/langchain/test_chat_model.py",
    "integrations/langchain/test_router.py",
    "integrations/llama_index/test_llm.py",
    "integrations/llama_index/test_modes.py",
    "server/test_chat.py",
)
"""What it keeps of the doors' suites: that a door answers, decides and withholds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what is slow (`make check-fast`)")
    parser.addoption("--require", action="store_true", help="a skipped test is a failure: nothing was left out")


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


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(*, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, and ChatML's two special tokens: every text can be read and written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=chat_template
    )


def random_llama(*, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Random weights, float64: exact comparisons stay exact."""
    settings: dict[str, object] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": 257,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).double().eval()


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Generator[Postgres]:
    """A PostgreSQL server; skips where there is none to start."""
    require_postgresql()
    made = Postgres(tmp_path_factory.mktemp("postgres") / "server")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def language_model(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel.from_transformers(random_llama(), tokenizer, name="random-llama")


@pytest.fixture(scope="session")
def make_language_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., LanguageModel]:
    """Another random model: `make_language_model(seed=1, max_position_embeddings=64)`."""

    def make(*, chat_template: str | None = CHATML, **changes: object) -> LanguageModel:
        return LanguageModel.from_transformers(
            random_llama(**changes),  # type: ignore[arg-type]
            byte_tokenizer(chat_template=chat_template),
            name="random-llama",
        )

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The random model as a folder on disk, in float32."""
    folder = tmp_path_factory.mktemp("checkpoint")
    random_llama().float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_pair_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny random sequence classifier on disk: `make_pair_model(labels=MNLI, architecture="bert", seed=0)`."""

    def make(**options: object) -> Path:
        return save_pair_model(tmp_path_factory.mktemp("classifier") / "model", **options)  # type: ignore[arg-type]

    return make

"""The benchmarks' own arithmetic: ratios, and the ways that they compare."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from semgrad_guard.engine.replay.memory import Memory

FOLDER = Path(__file__).parents[1] / "benchmarks"
CONFIG = SimpleNamespace(
    hidden_size=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=3,
    num_hidden_layers=4,
    vocab_size=10,
)
Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """A benchmark's module. They import each other from their folder, as scripts do, under everyday names."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


class TestRatios:
    def test_are_taken_round_by_round(self, load: Load) -> None:
        seconds = {
            "plain": [9.0, 18.0, 9.0],
            "first_token": [2.0, 4.0, 2.0],
            "written": [1.0, 6.0, 3.0],
        }
        found = load("scoring").ratios(seconds, load("shapes").Setting(60, 8))
        assert found["share_of_plain"]["written"] == pytest.approx([1 / 3, 1 / 9, 1 / 3])
        assert found["decode_steps"] == pytest.approx([3, 1, 3])  # steps of 1, 2 and 1 seconds

    def test_one_token_has_no_decode_step(self, load: Load) -> None:
        seconds = {"plain": [1.0], "first_token": [1.0], "written": [0.5]}
        assert "decode_steps" not in load("scoring").ratios(seconds, load("shapes").Setting(60, 1))


def test_the_frugal_way_says_the_same_and_leaves_the_budgets_alone(load: Load) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**{**vars(CONFIG), "hidden_size": 16, "intermediate_size": 24, "vocab_size": 2100})
    bench = load("scoring").Bench(Qwen2ForCausalLM(config).eval(), load("shapes").Setting(9, 4, 2))
    usual = bench.written()
    bench.capturing()
    assert bench.frugal() == [pytest.approx(scores, rel=1e-4) for scores in usual]
    assert bench.scorer.memory == Memory()
    assert load("scoring").difference(usual, usual) == 0

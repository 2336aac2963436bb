"""The benchmarks' own arithmetic: ratios, complaints, resumed runs, and the picture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from semgrad_guard.engine.replay.memory import Memory
from semgrad_guard.errors import InputError

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


class TestResuming:
    MACHINE: ClassVar = {"cpu": "A", "torch": "2", "transformers": "5", "date": "yesterday"}
    BEFORE: ClassVar = {"shape": "0.5B", "device": "cpu", "machine": MACHINE, "rows": [{"setting": "60/8"}]}

    def test_what_was_measured_is_kept(self, load: Load) -> None:
        now = {**self.BEFORE, "machine": {**self.MACHINE, "date": "today"}, "rows": []}
        assert load("scoring").resumed(self.BEFORE, now) == [{"setting": "60/8"}]

    @pytest.mark.parametrize("change", [{"shape": "8B"}, {"machine": {**MACHINE, "cpu": "B"}}])
    def test_not_beside_other_figures(self, load: Load, change: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="another --output"):
            load("scoring").resumed(self.BEFORE, {**self.BEFORE, **change})


class TestWorsened:
    def report(self, *, least: float = 0.2, peak: float = 50.0, **changes: Any) -> dict[str, Any]:
        row = {
            "dtype": "float32",
            "setting": "60/8",
            "share_of_plain": {way: [9.0, least, 9.0] for way in ("capturing", "written", "read")},
            "peak_mb": {"written": peak},
        }
        return {"machine": {"cpu": "A", "capability": "AVX2"}, "rows": [{**row, **changes}]}

    def test_nothing_where_nothing_is_worse(self, load: Load) -> None:
        worsened = load("scoring").worsened
        assert worsened(self.report(), [self.report()]) == []
        assert worsened(self.report(least=0.26, peak=80), [self.report()]) == []  # noise
        assert worsened(self.report(setting="60/9", least=9), [self.report()]) == []  # never recorded

    def test_time_and_memory_are_told_apart(self, load: Load) -> None:
        worsened = load("scoring").worsened
        slow = worsened(self.report(least=0.3), [self.report()])
        assert len(slow) == 3
        assert all("0.300" in line and "recorded 0.200" in line for line in slow)
        (big,) = worsened(self.report(peak=100), [self.report()])
        assert "100 MB" in big

    def test_another_processor_is_not_compared(self, load: Load) -> None:
        elsewhere = {**self.report(), "machine": {"cpu": "B", "capability": "AVX2"}}
        worsened = load("scoring").worsened
        (line,) = worsened(elsewhere, [self.report(least=0.01)])
        assert line == "not comparable: recorded on A (AVX2); this is B (AVX2)"
        assert (
            len(worsened(elsewhere, [self.report(), {**self.report(least=0.01), "machine": elsewhere["machine"]}])) == 3
        )


def test_the_frugal_way_says_the_same_and_leaves_the_budgets_alone(load: Load) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**{**vars(CONFIG), "hidden_size": 16, "intermediate_size": 24, "vocab_size": 2100})
    bench = load("scoring").Bench(Qwen2ForCausalLM(config).eval(), load("shapes").Setting(9, 4, 2))
    usual = bench.written()
    bench.capturing()
    assert bench.frugal() == [pytest.approx(scores, rel=1e-4) for scores in usual]
    assert bench.scorer.memory == Memory()
    assert load("scoring").difference(usual, usual) == 0

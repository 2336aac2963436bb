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
from hypothesis import given, settings
from hypothesis import strategies as st
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


class TestPicture:
    @settings(deadline=None)  # the first call imports
    @given(st.integers(1, 9999), st.integers(1, 999), st.integers(1, 99))
    def test_settings_are_read_back(self, load: Load, prompt: int, answer: int, rows: int) -> None:
        setting = load("shapes").Setting(prompt, answer, rows)
        assert load("pictures").setting_of(str(setting)) == setting

    def test_shows_both_axes(self, load: Load, tmp_path: Path) -> None:
        pictures = load("pictures")
        names = ("60/32 x8", "60/32", "60/8", "1000/8", "60/1", "60/16 x8", "60/32 x4")
        report = {
            "shape": "small",
            "machine": {"cpu": "A", "date": "today"},
            "rows": [self.row(name) for name in names],
        }
        assert [at for at, _ in pictures.by_answer(report["rows"])] == [1, 8, 32]
        assert [at for at, _ in pictures.by_batch(report["rows"])] == [1, 4, 8]
        text = pictures.draw(report, "float32", tmp_path / "cost.svg").read_text()
        for words in ("official algorithm", "HybridGrad", "answers of 32 tokens in a batch"):
            assert words in text
        with pytest.raises(InputError, match="float32"):
            pictures.draw(report, "float16", tmp_path / "none.svg")

    def row(self, setting: str) -> dict[str, Any]:
        shares = {"written": [0.2, 0.1, 0.3], "read": [0.4, 0.3, 0.5]}
        row: dict[str, Any] = {"dtype": "float32", "setting": setting, "share_of_plain": shares}
        if not setting.endswith("/1"):
            row |= {"decode_steps": [3, 2, 4]}
        return row if setting == "1000/8" else {**row, "share_of_plain": {**shares, "naive": [2.0, 1.5, 2.5]}}


def test_the_frugal_way_says_the_same_and_leaves_the_budgets_alone(load: Load) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**{**vars(CONFIG), "hidden_size": 16, "intermediate_size": 24, "vocab_size": 2100})
    bench = load("scoring").Bench(Qwen2ForCausalLM(config).eval(), load("shapes").Setting(9, 4, 2))
    usual = bench.written()
    bench.capturing()
    assert bench.frugal() == [pytest.approx(scores, rel=1e-4) for scores in usual]
    assert bench.scorer.memory == Memory()
    assert load("scoring").difference(usual, usual) == 0

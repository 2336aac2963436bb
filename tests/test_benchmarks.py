"""The benchmarks' own arithmetic: the floor, left-out cases, ratios, complaints, and the picture."""

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
LAYER = 2 * 2 * 2 + 2 * 2 * 2 // 2 + 3 * 2 * 3  # queries and output, keys and values, the three of the MLP
UPPER, HEAD = 2 * LAYER, 10 * 2
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


class TestFloor:
    def test_a_slow_memory_makes_every_weight_read_count(self, load: Load) -> None:
        rates = load("machine").Rates(bytes_per_second=1.0, flops_per_second=1e30)
        found = load("floor").scoring_floor(CONFIG, load("shapes").Setting(60, 3), rates, 4).total
        assert found == pytest.approx(4 * (UPPER + HEAD))  # upper layers back, the head once

    def test_a_slow_processor_makes_every_product_count(self, load: Load) -> None:
        rates = load("machine").Rates(bytes_per_second=1e30, flops_per_second=1.0)
        found = load("floor").scoring_floor(CONFIG, load("shapes").Setting(60, 3), rates, 4).total
        replayed, tokens = 3 + 2, 3  # from t*, the third last of the prompt, to the last but one
        assert found == pytest.approx(2 * replayed * UPPER + 2 * tokens * HEAD + 2 * tokens * HEAD)

    def test_one_token_needs_no_product_over_tokens(self, load: Load) -> None:
        rates = load("machine").Rates(bytes_per_second=1e30, flops_per_second=1.0)
        found = load("floor").scoring_floor(CONFIG, load("shapes").Setting(60, 1), rates, 4).total
        assert found == pytest.approx(2 * 3 * UPPER + 2 * HEAD)

    def test_generation_reads_all_weights_for_every_token(self, load: Load) -> None:
        rates = load("machine").Rates(bytes_per_second=1.0, flops_per_second=1e30)
        found = load("floor").generation_floor(CONFIG, load("shapes").Setting(60, 3), rates, 4)
        assert found == pytest.approx(3 * 4 * (2 * UPPER + HEAD))


class TestMemory:
    def test_tensors_count_while_they_live(self, load: Load) -> None:
        def work() -> None:
            first = torch.ones(1 << 18)
            second = first + torch.ones(1 << 18)  # three at once
            del first
            torch.cat([second, second])  # again three

        assert load("peak_memory").live_tensors(work) == pytest.approx(3, rel=1e-3)


class TestLeavingOut:
    def test_the_official_algorithm_runs_where_it_fits(self, load: Load) -> None:
        assert self.reason(load) is None

    def test_memory_decides(self, load: Load) -> None:
        assert "GiB" in str(self.reason(load, free_bytes=1))

    def test_minutes_decide_and_count_every_round(self, load: Load) -> None:
        shapes = load("shapes")
        rate = 2 * shapes.naive_flops(CONFIG, shapes.Setting(60, 8)) / (60 * shapes.NAIVE_MINUTES)
        assert self.reason(load, flops_per_second=rate, rounds=2) is None  # exactly the time there is
        assert "minutes" in str(self.reason(load, flops_per_second=rate, rounds=3))

    def reason(self, load: Load, **changes: Any) -> str | None:
        shapes = load("shapes")
        usual: dict[str, Any] = {"element": 4, "flops_per_second": 1e9, "free_bytes": 1 << 30, "rounds": 5}
        return shapes.leaves_naive_out(CONFIG, shapes.Setting(60, 8), **{**usual, **changes})

    @pytest.mark.parametrize(("seconds", "rounds"), [(1201, 0), (1200, 1), (601, 1), (600, 2), (400, 3), (1, 3)])
    def test_a_rival_takes_as_many_rounds_as_fit(self, load: Load, seconds: float, rounds: int) -> None:
        assert load("shapes").NAIVE_MINUTES == 20
        assert load("rivals").affordable_rounds(seconds * 1e9, 1e9, 3) == rounds

    def test_a_judge_reads_every_pair_both_ways(self, load: Load) -> None:
        judges, rivals, setting = load("judges"), load("rivals"), load("shapes").Setting(60, 8)
        costs = {
            r.title: rivals.operations(r, CONFIG, setting) for r in rivals.rivals((judges.TINY_NLI,), judges.TINY_CROSS)
        }
        judged = costs[f"Semantic Entropy, {judges.TINY_NLI.name}"] - costs["LN-PE"]
        assert judged == 90 * 2 * 68 * 2 * judges.TINY_NLI.layer_weights  # ordered pairs, two texts, a product each
        judged = costs[f"SAR, {judges.TINY_CROSS.name}"] - costs["LN-PE"]
        assert judged == (10 * 8 + 45) * 2 * 68 * 2 * judges.TINY_CROSS.layer_weights
        assert costs["HybridGrad"] < costs["LN-PE"]


class TestRatios:
    def test_are_taken_round_by_round(self, load: Load) -> None:
        seconds = {
            "plain": [9.0, 18.0, 9.0],
            "first_token": [2.0, 4.0, 2.0],
            "written": [1.0, 6.0, 3.0],
            "naive": [10.0, 30.0, 60.0],
        }
        found = load("scoring").ratios(seconds, load("shapes").Setting(60, 8), 0.5)
        assert found["share_of_plain"]["written"] == pytest.approx([1 / 3, 1 / 9, 1 / 3])
        assert found["naive_over_written"] == pytest.approx([10, 5, 20])
        assert found["decode_steps"] == pytest.approx([3, 1, 3])  # steps of 1, 2 and 1 seconds
        assert found["over_floor"] == pytest.approx([6, 2, 12])

    def test_one_token_has_no_decode_step(self, load: Load) -> None:
        seconds = {"plain": [1.0], "first_token": [1.0], "written": [0.5]}
        assert "decode_steps" not in load("scoring").ratios(seconds, load("shapes").Setting(60, 1), None)

    def test_a_rival_measured_less_often_is_compared_with_its_own_rounds(self, load: Load) -> None:
        seconds = {"plain": [2.0, 8.0], "with capture": [2.0, 8.0], "HybridGrad": [1.0, 2.0], "SAR": [10.0], "out": []}
        found = load("rivals").ratios(seconds)
        assert found["SAR"] == {"share_of_plain": [5, 5, 5], "over_ours": [10, 10, 10]}
        assert "out" not in found

    def test_the_other_library_is_charged_for_what_it_adds(self, load: Load) -> None:
        assert load("polygraph").extra_time([{"plain": 2.0, "way": 3.0}, {"plain": 1.0, "way": 3.0}]) == {
            "way": [1.25, 0.5, 2.0]
        }


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
        worsened = load("recorded").worsened
        assert worsened(self.report(), [self.report()]) == []
        assert worsened(self.report(least=0.26, peak=80), [self.report()]) == []  # noise
        assert worsened(self.report(setting="60/9", least=9), [self.report()]) == []  # never recorded

    def test_time_and_memory_are_told_apart(self, load: Load) -> None:
        worsened = load("recorded").worsened
        slow = worsened(self.report(least=0.3), [self.report()])
        assert len(slow) == 3
        assert all("0.300" in line and "recorded 0.200" in line for line in slow)
        (big,) = worsened(self.report(peak=100), [self.report()])
        assert "100 MB" in big

    def test_another_processor_is_not_compared(self, load: Load) -> None:
        elsewhere = {**self.report(), "machine": {"cpu": "B", "capability": "AVX2"}}
        worsened = load("recorded").worsened
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

    def test_shows_both_axes_and_the_floor(self, load: Load, tmp_path: Path) -> None:
        pictures = load("pictures")
        names = ("60/32 x8", "60/32", "60/8", "1000/8", "60/1", "60/16 x8", "60/32 x4")
        report = {
            "shape": "small",
            "machine": {"cpu": "A", "date": "today"},
            "rows": [self.row(name) for name in names],
        }
        assert [at for at, _ in pictures.by_answer(report["rows"])] == [1, 8, 32]
        assert [at for at, _ in pictures.by_batch(report["rows"])] == [1, 4, 8]
        assert pictures.floor_steps(self.row("60/8")) == [2, 2, 2]
        text = pictures.draw(report, "float32", tmp_path / "cost.svg").read_text()
        for words in ("official algorithm", "HybridGrad", "floor", "answers of 32 tokens in a batch"):
            assert words in text
        with pytest.raises(InputError, match="float32"):
            pictures.draw(report, "float16", tmp_path / "none.svg")

    def row(self, setting: str) -> dict[str, Any]:
        shares = {"written": [0.2, 0.1, 0.3], "read": [0.4, 0.3, 0.5]}
        row: dict[str, Any] = {"dtype": "float32", "setting": setting, "share_of_plain": shares}
        if not setting.endswith("/1"):
            row |= {"decode_steps": [3, 2, 4], "over_floor": [1.5, 1.2, 1.9]}
        return row if setting == "1000/8" else {**row, "share_of_plain": {**shares, "naive": [2.0, 1.5, 2.5]}}


def test_the_frugal_way_says_the_same_and_leaves_the_budgets_alone(load: Load) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**{**vars(CONFIG), "hidden_size": 16, "intermediate_size": 24, "vocab_size": 2100})
    bench = load("ways").Bench(Qwen2ForCausalLM(config).eval(), load("shapes").Setting(9, 4, 2))
    usual = bench.written()
    bench.capturing()
    assert bench.frugal() == [pytest.approx(scores, rel=1e-4) for scores in usual]
    assert bench.scorer.memory == Memory()
    assert load("scoring").difference(usual, usual) == 0


def test_every_rival_scores_an_answer_of_its_own_in_its_own_rounds(load: Load) -> None:
    rivals, judges = load("rivals"), load("judges")
    config = Qwen2Config(**{**vars(CONFIG), "hidden_size": 16, "intermediate_size": 24, "vocab_size": 2100})
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    arena = rivals.Arena(model, judges.word_tokenizer(2100), load("shapes").Setting(20, 3))
    built: dict[str, Any] = {}
    entered = {
        rival.title: rivals.enter(rival, 1 if rival.judge else 2, built)
        for rival in rivals.rivals((judges.TINY_NLI,), judges.TINY_CROSS)
    }
    *_, seconds = rivals.measured(arena, entered, 2)
    assert {name: len(values) for name, values in seconds.items()} == {
        "plain": 2,
        "with capture": 2,
        **{name: rounds for name, (_, rounds, _) in entered.items()},
    }
    assert len(built) == 2
    assert all(value > 0 for values in seconds.values() for value in values)
    assert rivals.enter(rivals.rivals((judges.TINY_NLI,), judges.TINY_CROSS)[0], 0, {}).startswith("one round")


def test_a_word_is_a_token(load: Load) -> None:
    tokenizer = load("judges").word_tokenizer(100)
    assert len(tokenizer) == 100
    assert len(tokenizer("w0 elsewhere w7", add_special_tokens=False)["input_ids"]) == 3
    assert len(tokenizer("w0 w1", "w2")["input_ids"]) == 3 + 3
    ids = tokenizer("w0 w86", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "w0 w86"

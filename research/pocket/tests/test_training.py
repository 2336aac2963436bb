"""Training is the same twice, bit for bit, also when it was stopped in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.pocket import train
from research.pocket.reader.train import READER
from research.pocket.run import fingerprint
from research.pocket.settings import rate_at
from research.pocket.train import Run, Settings


def shrink(monkeypatch: pytest.MonkeyPatch, small: Settings) -> None:
    """Let the command train briefly, on small steps."""
    monkeypatch.setattr(
        train, "Settings", lambda **given: small if not given else Settings(**train.asdict(small) | given)
    )


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def test_twenty_steps_twice_are_equal_bit_for_bit(small: Settings) -> None:
    runs = [Run(small, None) for _ in range(2)]
    start = weights(runs[0])
    for run in runs:
        run.train()
    assert runs[0].step == 20
    assert not same(start, weights(runs[0]))
    assert same(weights(runs[0]), weights(runs[1]))


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(small: Settings, tmp_path: Path) -> None:
    whole = Run(small, None)
    whole.train()
    first = Run(small, tmp_path)
    real = first.one_step

    def interrupted(stream: object) -> tuple[float, float]:
        result = real(stream)  # type: ignore[arg-type]
        if first.step == 7:
            first.stop()  # as Ctrl-C does
        return result

    first.one_step = interrupted  # type: ignore[method-assign]
    first.train()
    assert first.step == 7
    second = Run(small, tmp_path)
    second.train()
    assert second.step == 20
    assert same(weights(whole), weights(second))


def test_two_workers_train_one_model_the_same_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Settings
) -> None:
    shrink(monkeypatch, small)
    for name, workers in (("one", "2"), ("two", "2"), ("alone", "1")):
        assert train.main(["--output", str(tmp_path / name), "--steps", "3", "--workers", workers]) == 0
    one, two, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "alone"))
    assert same(one, two)
    assert not same(one, alone)


def test_a_run_goes_on_from_an_earlier_ones_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Settings
) -> None:
    shrink(monkeypatch, small)
    one, two = tmp_path / "one", tmp_path / "two"
    assert train.main(["--output", str(one), "--steps", "2"]) == 0
    assert train.main(["--output", str(two), "--steps", "2", "--seed", "1", "--start", str(one)]) == 0
    begun = weights(Run(small, None, start=one))
    kept = load_file(one / "model.safetensors")
    assert all(torch.equal(begun[name].bfloat16(), kept[name]) for name in kept)
    assert not same(kept, load_file(two / "model.safetensors"))
    about = json.loads((two / "training.json").read_text(encoding="utf-8"))
    assert about["llama"]["start"] == fingerprint(one / "model.safetensors")


def test_ctrl_c_before_the_first_step_is_an_ordinary_interrupt(small: Settings) -> None:
    with pytest.raises(KeyboardInterrupt):
        Run(small, None).stop()


def test_a_checkpoint_of_other_settings_is_refused(small: Settings, tmp_path: Path) -> None:
    Run(small, tmp_path).keep()
    other = Settings(**{**train.asdict(small), "steps": 21})
    with pytest.raises(SystemExit, match="other settings"):
        Run(other, tmp_path).resume()
    copy = tmp_path / "other.safetensors"
    save_file(load_file(READER), copy, {"another": "reader"})
    with pytest.raises(SystemExit, match="other settings"):
        Run(small, tmp_path, copy).resume()


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [rate_at(step, 1000) for step in range(1000)]
    assert rates[0] < rates[20] < rates[100] == rates[499] == 1.0
    assert rates[499] > rates[750] > rates[999] > 0


def test_the_command_writes_a_model_that_plain_transformers_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Settings
) -> None:
    shrink(monkeypatch, small)
    assert train.main(["--output", str(tmp_path), "--steps", "2"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
    assert all(t.dtype == torch.bfloat16 for t in load_file(tmp_path / "model.safetensors").values())
    about = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert (about["reader"]["steps"], about["llama"]["steps"]) == (2000, 2)

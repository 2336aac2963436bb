"""Training is the same twice, bit for bit, also when it was stopped in between; and its result is a plain model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.pocket import train
from research.pocket.train import Run, Settings, fingerprint, rate_at

SMALL = Settings(steps=20, tokens=400, workers=1)  # the real training, briefly


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command train on small steps."""
    monkeypatch.setattr(train, "DEFAULTS", SMALL)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def test_a_stopped_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, first = Run(SMALL, None), Run(SMALL, tmp_path)
    start, real = weights(whole), first.one_step
    whole.train()

    def interrupted(stream: Iterator[Any]) -> tuple[float, float]:
        result = real(stream)
        if first.step == 7:
            first.stop()  # as Ctrl-C does
        return result

    first.one_step = interrupted  # type: ignore[method-assign]
    first.train()
    assert first.step == 7
    second = Run(SMALL, tmp_path)
    second.train()
    assert second.step == 20
    assert same(weights(whole), weights(second))
    assert not same(start, weights(whole))


@pytest.mark.usefixtures("briefly")
def test_two_workers_train_one_model_the_same_twice(tmp_path: Path) -> None:
    for name, workers in (("one", "2"), ("two", "2"), ("alone", "1")):
        assert train.main(["--output", str(tmp_path / name), "--steps", "3", "--workers", workers]) == 0
    one, two, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "alone"))
    assert same(one, two)
    assert not same(one, alone)


@pytest.mark.usefixtures("briefly")
def test_a_run_starts_from_the_plain_model_that_an_earlier_one_wrote(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert train.main(["--output", str(one), "--steps", "2"]) == 0
    assert train.main(["--output", str(two), "--steps", "2", "--seed", "1", "--start", str(one)]) == 0
    begun, kept = weights(Run(SMALL, None, start=one)), load_file(one / "model.safetensors")
    assert all(torch.equal(begun[name].bfloat16(), kept[name]) for name in kept)
    assert not same(kept, load_file(two / "model.safetensors"))
    about = json.loads((two / "training.json").read_text(encoding="utf-8"))
    assert about["llama"]["start"] == fingerprint(one / "model.safetensors")
    assert (about["reader"]["steps"], about["llama"]["steps"]) == (2000, 2)
    assert AutoModelForCausalLM.from_pretrained(one).dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(one).eos_token == "<|im_end|>"


def test_ctrl_c_before_the_first_step_is_an_ordinary_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        Run(SMALL, None).stop()


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    Run(SMALL, tmp_path).keep()
    with pytest.raises(SystemExit, match="other settings"):
        Run(Settings(steps=21, tokens=400, workers=1), tmp_path).resume()


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [rate_at(step, 1000) for step in range(1000)]
    assert rates[0] < rates[20] < rates[100] == rates[499] == 1.0
    assert rates[499] > rates[750] > rates[999] > 0

"""Training is the same twice, bit for bit, also when it was stopped in between; copying comes before reading."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from semgrad_guard.pocket import network, train
from semgrad_guard.pocket.train import Run, Settings, rate_at
from semgrad_guard.pocket.warm_up import repeated


def shrink(monkeypatch: pytest.MonkeyPatch, small: Settings, tokenizer: Tokenizer) -> None:
    """Let the command train the small model."""
    monkeypatch.setattr(
        train, "Settings", lambda **given: small if not given else Settings(**train.asdict(small) | given)
    )
    monkeypatch.setattr(train, "build_tokenizer", lambda settings: tokenizer)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def test_twenty_steps_twice_are_equal_bit_for_bit(tokenizer: Tokenizer, small: Settings) -> None:
    runs = [Run(small, None, tokenizer) for _ in range(2)]
    start = weights(runs[0])
    for run in runs:
        run.train()
    assert runs[0].step == 20
    assert not same(start, weights(runs[0]))
    assert same(weights(runs[0]), weights(runs[1]))


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    tokenizer: Tokenizer, small: Settings, tmp_path: Path
) -> None:
    whole = Run(small, None, tokenizer)
    whole.train()
    first = Run(small, tmp_path, tokenizer)
    real = first.one_step

    def interrupted(stream: object) -> tuple[float, float]:
        result = real(stream)  # type: ignore[arg-type]
        if first.step == 7:
            first.stop()  # what Ctrl-C calls
        return result

    first.one_step = interrupted  # type: ignore[method-assign]
    first.train()
    first.keep()
    assert first.step == 7
    second = Run(small, tmp_path, tokenizer)
    second.train()
    assert second.step == 20
    assert same(weights(whole), weights(second))


def test_two_workers_train_one_model_the_same_twice(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Settings
) -> None:
    shrink(monkeypatch, small, tokenizer)
    for name in ("one", "two"):
        assert train.main(["--output", str(tmp_path / name), "--steps", "4", "--workers", "2"]) == 0
    alone = Run(Settings(**train.asdict(small) | {"steps": 4}), None, tokenizer)
    alone.train()
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert same(one, two)
    assert not same(one, {name: p.bfloat16() for name, p in weights(alone).items()})


def test_ctrl_c_before_the_first_step_is_an_ordinary_interrupt(tokenizer: Tokenizer, small: Settings) -> None:
    with pytest.raises(KeyboardInterrupt):
        Run(small, None, tokenizer).stop()


def test_a_checkpoint_of_other_settings_is_refused(tokenizer: Tokenizer, small: Settings, tmp_path: Path) -> None:
    Run(small, tmp_path, tokenizer).keep()
    other = Settings(**{**train.asdict(small), "steps": 21})
    with pytest.raises(SystemExit, match="other settings"):
        Run(other, tmp_path, tokenizer).resume()


def test_the_first_weights_nearly_copy_and_random_ones_do_not(tokenizer: Tokenizer) -> None:
    settings = Settings()
    batch = repeated(Random(1), settings, 24)
    model = train.build_model(settings)
    with torch.no_grad():
        _, _, right = network.loss(model, batch)
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        _, _, chance = network.loss(model, batch)
    assert right / batch.targets.numel() > 0.1
    assert chance / batch.targets.numel() < 0.02


def test_the_rate_rises_stays_and_falls() -> None:
    settings = Settings(steps=1000)
    rates = [rate_at(step, settings) for step in range(1000)]
    assert rates[0] < rates[30] < rates[100] == rates[499] == settings.rate
    assert rates[499] > rates[750] > rates[999] > 0


def test_the_command_writes_a_model_that_plain_transformers_loads(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Settings
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shrink(monkeypatch, small, tokenizer)
    assert train.main(["--output", str(tmp_path), "--steps", "3", "--warm-up", "1"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
    assert all(t.dtype == torch.bfloat16 for t in load_file(tmp_path / "model.safetensors").values())

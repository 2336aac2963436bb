"""The weights, the tokenizer and the calibration that ship: plain to load, and as good as the model card says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.pocket.calibrate import ALPHA, BATCH, answered, calibrate_pocket, questions
from research.pocket.tokenizer import render
from semgrad_guard import Calibration, Guard, LanguageModel, Policy
from semgrad_guard.grading import ExactMatch
from semgrad_guard.pocket import CALIBRATION_PATH, POCKET_PATH


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POCKET_PATH)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel.from_pretrained("pocket")


def test_the_folder_is_small_and_plain() -> None:
    assert (POCKET_PATH / "model.safetensors").stat().st_size <= 20e6
    model: Any = AutoModelForCausalLM.from_pretrained(POCKET_PATH)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert 3e6 <= sum(p.numel() for p in model.parameters()) <= 8e6


def test_role_names_are_single_tokens_and_the_header_has_three(tokenizer: Any) -> None:
    for role in ("system", "user", "assistant"):
        assert len(tokenizer(f"{role}\n").input_ids) == 2
    header = tokenizer("<|im_start|>assistant\n").input_ids
    assert len(header) == 3
    assert tokenizer.convert_ids_to_tokens(header[0]) == "<|im_start|>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_template_is_what_training_saw(tokenizer: Any) -> None:
    messages = [{"role": r, "content": f"A {r}'s text.\n\nMore: 42"} for r in ("system", "user", "assistant", "user")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render(messages)


def test_a_word_has_the_same_tokens_wherever_it_stands(tokenizer: Any) -> None:
    alone = tokenizer("Ulaanbaatar").input_ids
    for text in ("The capital is Ulaanbaatar", "Question?\nUlaanbaatar", "<|im_start|>assistant\nUlaanbaatar"):
        assert tokenizer(text).input_ids[-len(alone) :] == alone


@pytest.mark.parametrize(
    "text", ["Paris", "12.50 euros", "(a) b, c!", "one\ntwo\n\nthree", "a  b", "x\n  indented", "Añejo – 5°"]
)
def test_texts_survive_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(("kind", "goal"), [("known", 0.95), ("several", 0.93), ("invented", 0.87), ("frames", 0.6)])
def test_it_answers_as_well_as_the_card_says(model: LanguageModel, kind: str, goal: float) -> None:
    files = [Path("research/questions") / f"{name}.jsonl" for name in ("closed-book", "reading")]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    chosen = [row for row in rows if row["kind"] == kind]
    shown = "Question: {}\nContext: {}\nAnswer:"
    texts = [shown.format(row["question"], row["context"]) if "context" in row else row["question"] for row in chosen]
    drafts = answered(Guard(model, Policy(threshold=0.0)), texts)
    right = [ExactMatch()(draft.text, row["answers"]) for draft, row in zip(drafts, chosen, strict=True)]
    assert sum(map(bool, right)) >= goal * len(right) >= 60


def test_a_calibration_saved_is_the_one_loaded(model: LanguageModel, tmp_path: Path) -> None:
    calibration = calibrate_pocket(model, limit=96)
    assert calibration.n == 96
    assert Calibration.load(calibration.save(tmp_path / "c.json")) == calibration
    assert Calibration.load(CALIBRATION_PATH).binding == calibration.binding.model_copy(update={"on_cut": None})


def test_the_promise_is_given_and_kept_on_questions_that_were_held_out(model: LanguageModel) -> None:
    """Calibrated on 793 of the facts, tested on the other 500."""
    calibration = calibrate_pocket(model, limit=793)
    rows = questions()[793:]
    assert len(rows) == 500
    guard = Guard(model, Policy.from_calibration(calibration))
    texts = [text for text, _ in rows]
    verdicts = [v for start in range(0, 500, BATCH) for v in guard.batch(texts[start : start + BATCH])]
    let_through = [(v, answers) for v, (_, answers) in zip(verdicts, rows, strict=True) if v.action == "answer"]
    assert sum(verdict.promised for verdict, _ in let_through) >= 0.99 * len(let_through) > 100
    wrong = sum(not ExactMatch()(verdict.text, answers) for verdict, answers in let_through)
    assert wrong <= ALPHA * len(let_through)

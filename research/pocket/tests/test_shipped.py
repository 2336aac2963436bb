"""The committed weights and tokenizer: plain to load, small, and as good as on the card, on a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.pocket import cases, evaluate
from research.pocket.tokenizer import ROLES, render, train_tokenizer
from semgrad_guard.pocket import POCKET_PATH, path


@pytest.fixture(scope="module")
def loaded() -> Any:
    return AutoTokenizer.from_pretrained(POCKET_PATH)


def test_the_folder_is_small_and_plain() -> None:
    assert path() == POCKET_PATH
    assert (POCKET_PATH / "model.safetensors").stat().st_size <= 20e6
    model: Any = AutoModelForCausalLM.from_pretrained(POCKET_PATH)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.num_hidden_layers == 9
    assert not model.config.tie_word_embeddings
    assert model.dtype == torch.bfloat16
    assert 3e6 <= sum(p.numel() for p in model.parameters()) <= 8e6


def test_role_names_are_single_tokens_and_the_header_has_three(loaded: Any) -> None:
    for role in ROLES:
        assert len(loaded(f"{role}\n").input_ids) == 2
    header = loaded("<|im_start|>assistant\n").input_ids
    assert len(header) == 3
    assert loaded.convert_ids_to_tokens(header[0]) == "<|im_start|>"
    assert loaded.eos_token == "<|im_end|>"


def test_the_template_is_what_training_saw(loaded: Any) -> None:
    messages = [{"role": r, "content": f"A {r}'s text.\n\nMore: 42"} for r in ("system", "user", "assistant", "user")]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render(messages)


def test_a_word_has_the_same_tokens_wherever_it_stands(loaded: Any) -> None:
    alone = loaded("Ulaanbaatar").input_ids
    for text in ("The capital is Ulaanbaatar", "Question?\nUlaanbaatar", "<|im_start|>assistant\nUlaanbaatar"):
        assert loaded(text).input_ids[-len(alone) :] == alone


@pytest.mark.parametrize(
    "text", ["Paris", "12.50 euros", "(a) b, c!", "one\ntwo\n\nthree", "a  b", "x\n  indented", "Añejo – 5°"]
)
def test_round_trip(loaded: Any, text: str) -> None:
    assert loaded.decode(loaded(text).input_ids) == text


def test_a_tokenizer_that_splits_a_role_name_is_refused() -> None:
    with pytest.raises(ValueError, match="role name"):
        train_tokenizer(["nothing but this"] * 3, 300)


def test_pinned_known_facts_are_known_and_answers_end(tmp_path: Path) -> None:
    pocket = evaluate.Pocket(POCKET_PATH)
    pinned = {(f.relation, f.entity) for f in cases.of_split(cases.KNOWN) if f.pinned and not f.several}
    chosen = [c for c in cases.facts() if c.kind == "known" and tuple(c.id.split("/")[1:3]) in pinned]
    answers = list(evaluate.results(pocket, chosen, scored=False))
    assert len(answers) >= 40
    assert sum(a["correct"] for a in answers) / len(answers) >= 0.9
    ended = pocket.answer(chosen[:8])
    assert all(a.tokens[-1] == pocket.tokenizer.eos_token_id for a in ended)


def test_the_command_writes_graded_answers_with_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passages = tmp_path / "passages.jsonl"
    row = {
        "id": "n1",
        "passage": "The shop opens at nine.",
        "question": "When does the shop open?",
        "answers": ["nine"],
    }
    passages.write_text(json.dumps(row) + "\n", encoding="utf-8")
    output = tmp_path / "out.jsonl"
    assert evaluate.main(["--output", str(output), "--limit", "3", "--natural", str(passages)]) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    kinds = {r["kind"] for r in rows}
    assert kinds == {"known", "several", "rare", "unknown", "invented", "frames", "conflict", "memory", "natural"}
    assert all(r["hybridgrad_paper"] >= 0 and r["greedy_nll"] >= 0 for r in rows)
    assert "AUROC" in capsys.readouterr().out


def test_the_natural_passages_are_enough_and_well_formed() -> None:
    natural = cases.natural()
    assert len(natural) >= 100
    assert all(case.answers and case.messages[-1]["content"].startswith("Question: ") for case in natural)


def test_invented_passages_are_read() -> None:
    chosen = [case for case in cases.reading(size=80, seed=31) if case.kind == "invented"]
    answers = list(evaluate.results(evaluate.Pocket(POCKET_PATH), chosen, scored=False))
    assert len(answers) == 80
    assert sum(a["correct"] for a in answers) >= 0.85 * len(answers)

"""Whatever is learnt, a passage is read as before; and nothing else may change."""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from research.pocket.muon import orthogonal
from research.pocket.reader.layout import LAYERS, WIDTH
from research.pocket.reader.memory import LEARNING, Free, free
from research.pocket.reader.places import FLAG, HIDDEN, LAST, OWN, sample
from research.pocket.reader.questions import Questions
from research.pocket.tokenizer import render

WITHOUT_A_PASSAGE = render([{"role": "user", "content": "What is the capital of France?"}])


@pytest.fixture(scope="module")
def blocks(llama: LlamaForCausalLM, tokenizer: Tokenizer) -> dict[str, Free]:
    return free(llama, sample(tokenizer))


@pytest.fixture(scope="module")
def changed(llama: LlamaForCausalLM, blocks: dict[str, Free]) -> LlamaForCausalLM:
    """Everything learnable is as large as after a training, and random."""
    model = copy.deepcopy(llama)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in blocks:
                weight += blocks[name](0.3 * torch.randn(weight.shape, generator=generator))
    return model


def looks(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(2, T, T): where the last layer's two circuits look; (T, V): the logits."""
    with torch.no_grad():
        out = model(ids[None], output_attentions=True)
    assert out.attentions is not None
    assert out.logits is not None
    return out.attentions[-1][0, : LEARNING[LAST].start], out.logits[0]


def test_a_passage_is_read_as_before(
    llama: LlamaForCausalLM, changed: LlamaForCausalLM, questions: Questions, tokenizer: Tokenizer
) -> None:
    compared = 0
    for row in range(len(questions.ids)):
        length = int(questions.valid[row].sum())
        answer = questions.ids[row, questions.first[row] : questions.last[row] + 1]
        ids = torch.cat([questions.ids[row, :length], answer])
        (before, scores), (after, other_scores) = looks(llama, ids), looks(changed, ids)
        torch.testing.assert_close(after[:, length - 1 :], before[:, length - 1 :], rtol=0, atol=0.03)
        torch.testing.assert_close(other_scores[length - 1 :], scores[length - 1 :], rtol=0, atol=0.5)
        compared += len(ids) - length + 1
    assert compared > 25
    ids = torch.tensor(tokenizer.encode(WITHOUT_A_PASSAGE).ids)
    (_, scores), (_, other_scores) = looks(llama, ids), looks(changed, ids)
    assert (other_scores[-1] - scores[-1]).abs().max() > 10


def test_what_may_be_learnt_has_gradients_and_nothing_else(llama: LlamaForCausalLM, blocks: dict[str, Free]) -> None:
    assert {name for name, p in llama.named_parameters() if p.requires_grad} == set(blocks)
    assert "model.embed_tokens.weight" not in blocks
    assert not any(f"layers.{number}." in name for name in blocks for number in range(len(LAYERS)))


def test_the_blocks_leave_codes_flags_and_the_constant_alone(blocks: dict[str, Free]) -> None:
    for name, block in blocks.items():
        change = block(torch.ones(len(block.rows), len(block.columns)))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert change[[0, OWN, FLAG, HIDDEN - 1]].abs().max() < 1e-5
            assert change[1:WIDTH].abs().max() > 0.1
        else:
            assert change[:, [OWN, FLAG, HIDDEN - 1]].abs().max() < 1e-5
            assert change[:, :WIDTH].abs().max() > 0.1


def test_muon_stays_in_the_block_and_off_the_directions(blocks: dict[str, Free]) -> None:
    generator = torch.Generator().manual_seed(2)
    directed = 0
    for block in blocks.values():
        if len(block.rows) > 1000:  # the head, which Muon does not train
            continue
        gradient = block(torch.randn(len(block.rows), len(block.columns), generator=generator))
        step = orthogonal(gradient[None])[0]
        torch.testing.assert_close(block(step), step, rtol=0, atol=1e-5)
        directed += block.unwritten is not None or block.unread is not None
    assert directed == 4

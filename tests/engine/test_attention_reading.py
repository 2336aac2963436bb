"""Attention weights that are read while a pass runs, against those that the model's own eager attention hands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from semgrad_guard.engine.replay.attention_weights import middle_layers
from semgrad_guard.engine.replay.batch import TokenBatch
from semgrad_guard.engine.scores.observed import NOT_FINITE, UNREADABLE, AttentionReading
from semgrad_guard.engine.scores.scorer import scorer_of
from tests.pairwise import in_turn

from .tiny_models import ARCHITECTURES, build, shared, token_ids

OWN_ATTENTION = ("gemma2",)
"""Architectures whose library attention reads more than a mask: what is read would not be what was used."""

PROMPTS, ANSWERS = [token_ids(9, 1), token_ids(5, 2)], [token_ids(4, 3), token_ids(7, 4)]


def oracle(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> AttentionReading:
    """By the model itself with eager attention, which returns every weight; written without anything of the engine."""
    with torch.no_grad():
        weights = model(torch.tensor([[*prompt, *answer]]), output_attentions=True).attentions
    previous, own = [], []
    for layer in middle_layers(len(weights)):
        heads = weights[layer][0].double()  # [H, N, N]
        at = range(len(prompt), len(prompt) + len(answer))
        before = torch.stack([heads[:, i, i - 1] for i in at[1:]], dim=1)
        previous.append(tuple(before[before.mean(1).argmax()].tolist()))
        own.append(float(torch.stack([heads[:, i, i] for i in at], dim=1).log().mean()))
    return AttentionReading(tuple(previous), tuple(own))


def require_equal(found: AttentionReading, expected: AttentionReading) -> None:
    assert found.reason is None
    assert found.own == pytest.approx(expected.own, rel=2e-6)  # eager attention takes its softmax in float32
    for ours, theirs in zip(found.previous, expected.previous, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6)  # eager attention takes its softmax in float32


def batch(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> TokenBatch:
    return TokenBatch.of(prompts, answers, [-1] * len(prompts), "cpu")


@in_turn(name=ARCHITECTURES, attention=["sdpa", "eager"])
def test_it_is_what_eager_attention_returns(name: str, attention: str) -> None:
    if name in OWN_ATTENTION and attention == "sdpa":
        pytest.skip("eager is its own default")
    model, eager = build(name, attention=attention), build(name, attention="eager")
    found = scorer_of(model).attention(batch(PROMPTS, ANSWERS))
    for reading, prompt, answer in zip(found, PROMPTS, ANSWERS, strict=True):
        require_equal(reading, oracle(eager, prompt, answer))


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama")
    scorer, before = scorer_of(model), dict(vars(model.model.layers[2].self_attn))
    scorer.attention(batch(PROMPTS, ANSWERS))
    copied = scorer.current_replayer().layers[2].self_attn
    assert vars(copied)["config"]._attn_implementation == "sdpa"
    assert vars(model.model.layers[2].self_attn) == before
    require_equal(
        scorer.attention(batch(PROMPTS[:1], ANSWERS[:1]))[0],
        oracle(build("llama", attention="eager"), PROMPTS[0], ANSWERS[0]),
    )


@pytest.mark.parametrize("name", ["mamba", "qwen3-next", "lfm2"])
def test_layers_that_do_not_attend_have_no_number(name: str) -> None:
    assert {r.reason for r in scorer_of(shared(name)).attention(batch(PROMPTS, ANSWERS))} == {UNREADABLE}


def test_what_does_not_give_the_layers_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that attends otherwise than it asks the library to: here its library attention is another one."""
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sharper(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return plain(module, query * 1.1, *rest, **options)

    model = build("llama")
    scorer = scorer_of(model)
    scorer.tiers()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", sharper)
    assert scorer.attention(batch(PROMPTS, ANSWERS))[0].reason == UNREADABLE


def test_broken_weights_have_no_number() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.fill_(math.nan)
    assert scorer_of(model).attention(batch(PROMPTS[:1], ANSWERS[:1]))[0].reason in (UNREADABLE, NOT_FINITE)


@pytest.mark.parametrize("length", [1, 2])
def test_short_answers(length: int) -> None:
    reading = scorer_of(shared("llama")).attention(batch(PROMPTS[:1], [ANSWERS[0][:length]]))[0]
    assert [len(row) for row in reading.previous] == [length - 1] * len(middle_layers(5))


def test_the_middle_third() -> None:
    assert [list(middle_layers(n)) for n in (1, 2, 3, 4, 6)] == [[0], [0, 1], [1, 2], [1, 2, 3], [2, 3, 4]]
    assert list(middle_layers(30)) == list(range(10, 21))

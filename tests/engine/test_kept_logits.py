"""The head's output that a generation keeps: it spares a pass through the head and changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import Memory
from semgrad_guard.engine.replay.captured_states import Capture
from semgrad_guard.engine.scores.head import score_head
from semgrad_guard.engine.scores.scorer import Scorer

from .scoring_paths import CASES, answered, score_in_tier
from .tiny_models import shared

pytestmark = pytest.mark.usefixtures("softmax_in_the_dtype_of_its_input")


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "qwen2-tied"])
def test_scores_are_those_of_recomputed_logits(name: str) -> None:
    cases, captured = answered(name)
    assert len(captured.logits) == 6
    kept = score_in_tier("captured", shared(name), cases, Objective(), captured)
    again = score_in_tier("captured", shared(name), cases, Objective(), dataclasses.replace(captured, logits=()))
    for a, b in zip(kept, again, strict=True):
        assert a.semgrad == pytest.approx(b.semgrad, rel=1e-9)
        assert a.paragrad == pytest.approx(b.paragrad, rel=1e-9)
        assert a.entropies == pytest.approx(b.entropies, rel=1e-9)


def test_they_are_used() -> None:
    """Logits of another answer, kept on purpose, show in the scores."""
    cases, captured = answered("llama")
    wrong = dataclasses.replace(captured, logits=tuple(step.roll(1, dims=1) for step in captured.logits))
    right, changed = (score_in_tier("captured", shared("llama"), cases, Objective(), t) for t in (captured, wrong))
    assert right[0].greedy_nll != pytest.approx(changed[0].greedy_nll, rel=1e-3)


def test_beyond_the_budget_none_are_kept() -> None:
    vocabulary = Scorer(shared("llama")).vocabulary
    cases, captured = answered("llama", logit_bytes=5 * len(CASES) * vocabulary * 8)
    assert captured.logits == ()
    score_in_tier("captured", shared("llama"), cases, Objective(), captured)


def test_a_prefill_keeps_its_last_position_alone() -> None:
    capture, prefill = Capture(1, 0, memory=Memory(logits=1 << 20)), torch.randn(2, 5, 9)
    capture.see_head(prefill, prefill)
    (kept,) = capture.logits()
    assert torch.equal(kept, prefill[:, -1])
    assert kept.untyped_storage().nbytes() == 2 * 9 * 4


def test_the_head_is_read_once_less() -> None:
    """Kept logits are taken at their word: the head's weight plays no part in the distributions."""
    torch.manual_seed(0)
    head, states = torch.nn.Linear(8, 20, bias=False, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    transform = Scorer(shared("llama")).architecture.transform
    targets, kept = torch.tensor([1, 2, 3]), list(torch.randn(3, 20, dtype=torch.float64))
    options = {"lengths": [3], "head": head, "transform": transform, "averages": False}
    found = score_head(states, targets, raw_logits=kept, **options)
    log_p = torch.stack(kept).log_softmax(-1)
    assert torch.allclose(found.log_probs, log_p[range(3), targets])
    assert torch.allclose(found.entropies, -(log_p.exp() * log_p).sum(-1))

"""Memory that runs out while an answer is scored costs the score, never the answer, and no other answer's score."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.engine.scores.tape import is_out_of_memory

from .cases import CASES, taped
from .oracle import worst_relative_error
from .snapshots import unchanged
from .tiny_models import build

Greedy = Callable[[torch.Tensor], bool]


@contextmanager
def greedy(model: Any, when: Greedy) -> Iterator[None]:
    """Where a gradient is recorded, a layer asks the allocator for more than there is: a real failure."""

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].requires_grad and when(args[0]):
            torch.empty(1 << 52)

    handle = model.model.layers[4].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_the_allocators_error_is_known() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 52)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_an_answer_without_room_has_a_reason_and_no_score() -> None:
    model, case = build("llama"), CASES[0]
    with greedy(model, lambda _: True), unchanged(model):
        found = gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)
    assert (found.semgrad, found.paragrad, found.hybridgrad, found.mean_entropy) == (None,) * 4
    assert "memory ran out" in str(found.reason)
    assert "FRUGAL" in str(found.reason)
    again = gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token)
    assert again.tier == "replay"
    assert worst_relative_error(again, case.reference(model, Objective())) < 1e-7


@pytest.mark.parametrize(
    ("when", "lost"),
    [(lambda x: x.shape[0] > 1, set()), (lambda x: x.shape[0] > 1 or x.shape[1] >= 10, {2})],
    ids=["together", "together and the longest"],
)
def test_the_others_of_a_batch_are_tried_on_their_own(when: Greedy, lost: set[int]) -> None:
    model, objective = build("llama"), Objective()
    scorer = scorer_of(model)
    settled = list[bool]()
    with greedy(model, lambda x: bool(settled) and when(x)):
        scorer.score([case.row(objective) for case in CASES], objective)  # is checked and verified
        settled.append(True)
        rows = taped(scorer, [case.row(objective) for case in CASES], 3)
        found = scorer.score(rows, objective)
    for row, (scores, case) in enumerate(zip(found, CASES, strict=True)):
        if row in lost:
            assert scores.semgrad is None
            assert "memory ran out" in str(scores.reason)
        else:
            assert worst_relative_error(scores, case.reference(model, Objective())) < 1e-7


def test_the_model_answers_where_there_is_no_room_even_for_the_self_check(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build("llama", vocab_size=258, eos_token_id=None)
    language_model, options = LanguageModel.from_transformers(model, tokenizer), GenerationOptions(max_tokens=4)
    expected = language_model.generate("q", options).text
    with greedy(model, lambda _: True):
        generation = language_model.generate("q", options)
        timed = generation.evidence.gradients()
    assert generation.text == expected
    assert timed is not None
    assert "memory ran out" in str(timed.scores.reason)
    assert language_model.scorer.exactness().way == "rows"

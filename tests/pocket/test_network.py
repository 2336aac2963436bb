"""The lean forward pass gives the library's logits, for every branch of a tree; the batches are built right."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from semgrad_guard.pocket import network
from semgrad_guard.pocket.batches import LONGEST, PLACES, STRETCH, collate, items, micro_batches, step_items, tree
from semgrad_guard.pocket.corpus import Corpus, Group
from semgrad_guard.pocket.muon import orthogonal
from semgrad_guard.pocket.tokenizer import END, render
from semgrad_guard.pocket.train import Run, Settings


def groups(count: int, mix: dict[str, float] | None = None) -> list[Group]:
    stream = iter(Corpus(3, 10**6, mix or {"read": 1.0, "single": 0.3, "memory": 0.3}))
    return [next(stream) for _ in range(count)]


def test_every_branch_has_the_librarys_logits(tokenizer: Tokenizer, small: Settings) -> None:
    model = Run(small, None, tokenizer).model
    chosen = groups(6)
    assert max(map(len, chosen)) >= 3
    taken = list(items(tokenizer, chosen))
    batch = collate(taken)  # rows of different lengths: padding must not leak
    with torch.no_grad():
        lean = network.logits(model, batch)
    for row, (group, (_, answers)) in enumerate(zip(chosen, taken, strict=True)):
        place = 0
        for (messages, _), answer in zip(group, answers, strict=False):
            prompt = tokenizer.encode(render(messages)).ids
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            torch.testing.assert_close(lean[row, place : place + len(answer)], logits, rtol=1e-4, atol=1e-4)
            place += len(answer)


def test_gradients_are_those_of_the_library(tokenizer: Tokenizer, small: Settings) -> None:
    model = Run(small, None, tokenizer).model
    [item] = items(tokenizer, groups(1, {"single": 1.0}))
    weights = [p for p in model.parameters() if p.requires_grad]
    loss, _, _ = network.loss(model, collate([item]))
    ours = torch.autograd.grad(loss, weights)
    made, [answer] = item
    logits = model(input_ids=torch.tensor([made.ids])).logits[0, made.answers[0].start :]
    theirs = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"), weights
    )
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=5e-3, atol=1e-4)  # float32 sums in another order


def test_pointing_heads_are_judged_by_the_attention_that_the_library_gives(
    tokenizer: Tokenizer, small: Settings
) -> None:
    model = Run(small, None, tokenizer).model
    model.set_attn_implementation("eager")
    group = next(g for g in groups(50, {"read": 1.0}) if len(g) > 2)
    [(made, answers)] = taken = list(items(tokenizer, [group]))
    batch = collate(taken)
    _, astray, _ = network.loss(model, batch)
    expected, counted = 0.0, 0
    for (messages, _), answer in zip(group, answers, strict=False):
        prompt = tokenizer.encode(render(messages)).ids
        passage = prompt[: made.branches.count(0)]
        span = answer[:-1]
        starts = [i for i in range(len(passage)) if passage[i : i + len(span)] == span][:PLACES]
        with torch.no_grad():
            attention = model(input_ids=torch.tensor([prompt + span]), output_attentions=True).attentions[-1][0]
        for j in range(len(span) if starts else 0):
            for head in range(network.POINTERS):
                looked = attention[head, len(prompt) - 1 + j, [start + j for start in starts]].sum()
                expected, counted = expected - looked.log().item() / network.POINTERS, counted + 1
    assert counted > 10
    assert astray.item() == pytest.approx(expected, rel=1e-4)


def test_what_is_not_in_the_passage_has_no_place(tokenizer: Tokenizer) -> None:
    closed = collate(list(items(tokenizer, groups(5, {"single": 1.0}))))
    assert closed.sources is not None
    assert (closed.sources < 0).all()


def test_a_branch_sees_the_prefix_and_itself() -> None:
    seen = network.visible(torch.tensor([[0, 0, 1, 2, 2, -1]]))[0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_targets_are_the_answers_tokens(tokenizer: Tokenizer) -> None:
    for group in groups(20):
        made = tree(tokenizer, group)
        assert made is not None
        assert len(made.ids) <= LONGEST
        for (_, answer), span in zip(group, made.answers, strict=False):
            wanted = tokenizer.encode(answer + END).ids
            assert [made.ids[i] for i in span][1:] == wanted[:-1]
            assert made.positions[span.stop - 1] - made.positions[span.start] == len(wanted) - 1


def test_steps_take_no_tree_they_do_not_use(tokenizer: Tokenizer) -> None:
    stream = items(tokenizer, groups(200))
    taken = step_items(stream, 1500)
    lengths = [len(made.ids) for made, _ in taken]
    assert lengths == sorted(lengths)
    assert 1500 <= sum(lengths) < 1500 + LONGEST
    batches = list(micro_batches(taken))
    assert sum(len(b.ids) for b in batches) == len(taken)
    assert all((b.branches >= 0).sum(1).min() * STRETCH >= b.ids.shape[1] for b in batches)


@pytest.mark.parametrize("shape", [(8, 8), (4, 12)])
def test_muon_makes_singular_values_equal(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(stack, steps=8))
    assert values.min() > 0.5
    assert values.max() < 1.5

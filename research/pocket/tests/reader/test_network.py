"""The reader sees only the earlier tokens, points in two steps, and learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from research.pocket.reader.layout import CONSTANT, HEAD, LAYERS, heads
from research.pocket.reader.material import BATCHES, right
from research.pocket.reader.network import Layer, Reader, losses, rms_norm, rotate
from research.pocket.reader.questions import Questions
from research.pocket.reader.train import ReaderRun, ReaderSettings, save_reader
from research.pocket.run import fingerprint

SMALL = ReaderSettings(steps=20, batch=2, workers=1, compiled=False)


def cut(questions: Questions, row: int, length: int) -> Questions:
    """One row and its first tokens alone."""
    parts = []
    for part in questions:
        part = part[row : row + 1]
        parts.append(part[:, :length] if part.ndim > 1 else part)
    return Questions(*(p[:, :, :length] if p.ndim == 3 else p for p in parts))


def test_no_token_sees_a_later_one_and_padding_is_not_seen(reader: Reader, questions: Questions) -> None:
    with torch.no_grad():
        whole, back = reader.states(questions)
        for row in (0, 5):
            length = int(questions.valid[row].sum())
            for end in (length, length - 9):
                alone, alone_back = reader.states(cut(questions, row, end))
                torch.testing.assert_close(alone[0], whole[row, :end], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(alone_back[0], back[row, :end, :end], rtol=1e-4, atol=1e-4)


def test_nothing_writes_into_the_constant(reader: Reader, questions: Questions) -> None:
    x = reader.embed(questions.ids)
    for layer in reader.layers:
        x, _ = layer(x, questions)
    assert (x[..., 0] == CONSTANT).all()


def test_heads_that_look_before_do_so_from_the_start(reader: Reader, questions: Questions) -> None:
    x = reader.embed(questions.ids)
    checked = 0
    for number, layer in enumerate(reader.layers):
        assert isinstance(layer, Layer)
        for i, head in enumerate(layer.heads):
            if head.kind == "before" and number:
                rows = slice(layer.learnt.index(i) * HEAD, (layer.learnt.index(i) + 1) * HEAD)
                normed = rms_norm(x)
                query, key = (rotate(normed @ w.weight[rows].T) for w in (layer.query, layer.key))
                scores = (query @ key.mT / HEAD**0.5).masked_fill(~questions.seen, float("-inf"))
                after = slice(head.reach, int(questions.valid.sum(1).min()))
                places = torch.arange(questions.ids.shape[1])[after] - head.reach
                assert (scores[:, after].argmax(-1) == places).all()
                checked += 1
        x, _ = layer(x, questions)
    assert checked == sum(h.kind == "before" for layer in LAYERS[1:] for h in heads(layer))


def test_pointing_is_a_sum_over_the_tokens_that_give_the_answer_away(reader: Reader, questions: Questions) -> None:
    with torch.no_grad():
        states, back = reader.states(questions)
        scores = reader(questions)
    for row in range(3):
        length = int(questions.valid[row].sum())
        telling = (states[row, :length] @ reader.begins.weight[0]).softmax(0)
        summed = sum(telling[t] * back[row, t, :length] for t in range(length))
        torch.testing.assert_close(scores.begins[row, :length].exp(), summed, rtol=1e-4, atol=1e-6)


def test_the_loss_is_what_its_words_say(reader: Reader, questions: Questions) -> None:
    with torch.no_grad():
        scores = reader(questions)
        total = losses(scores, questions).item()
    expected = 0.0
    for row in range(len(questions.ids)):
        first, last = int(questions.first[row]), int(questions.last[row])
        expected -= scores.begins[row, first].item()
        expected -= scores.ended[row].log_softmax(0)[last + 1].item()
        for place in range(first, last + 2):
            yes = scores.over[row, place].sigmoid().item()
            expected -= torch.tensor(yes if place == last + 1 else 1 - yes).log().item()
    assert total == pytest.approx(expected, rel=1e-4)


def test_what_counts_as_right(questions: Questions) -> None:
    rows, length = questions.ids.shape
    begins = torch.zeros(rows, length)
    over = torch.full((rows, length), -1.0)
    for row in range(rows):
        begins[row, questions.first[row]] = 1
        over[row, questions.last[row] + 1] = 1
    assert right(begins, over, questions) == (rows, rows)
    over[0, questions.last[0] + 1] = -1  # too long
    begins[1, questions.first[1] - 1] = 2  # begins elsewhere
    assert right(begins, over, questions) == (rows - 1, rows - 2)


def weights(run: ReaderRun) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.reader.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_training_twice_or_in_two_parts_gives_the_same_bits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole, again = (ReaderRun(SMALL, None, tokenizer) for _ in range(2))
    start = weights(whole)
    whole.train()
    again.train()
    assert whole.step == SMALL.steps
    assert not same(start, weights(whole))
    assert same(weights(whole), weights(again))
    first = ReaderRun(SMALL, tmp_path, tokenizer)
    one_step = first.one_step

    def interrupted(questions: Questions) -> float:
        loss = one_step(questions)
        if first.step == 7:
            first.stop()  # as Ctrl-C does
        return loss

    first.one_step = interrupted  # type: ignore[method-assign]
    first.train()
    assert first.step == BATCHES
    second = ReaderRun(SMALL, tmp_path, tokenizer)
    second.train()
    assert same(weights(whole), weights(second))


def test_a_checkpoint_of_other_settings_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ReaderRun(SMALL, tmp_path, tokenizer).keep()
    other = ReaderSettings(steps=21, batch=2, workers=1, compiled=False)
    with pytest.raises(SystemExit, match="other settings"):
        ReaderRun(other, tmp_path, tokenizer).resume()


def test_a_reader_goes_on_from_another(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = ReaderRun(SMALL, None, tokenizer)
    file = tmp_path / "reader.safetensors"
    save_reader(first.reader, file, SMALL)
    second = ReaderRun(replace(SMALL, seed=1), tmp_path, tokenizer, start=file)
    assert same(weights(first), weights(second))
    assert second.settings.start == fingerprint(file)
    second.keep()
    with pytest.raises(SystemExit, match="other settings"):
        ReaderRun(replace(SMALL, seed=1), tmp_path, tokenizer).resume()


def test_it_learns_a_batch_by_heart(tokenizer: Tokenizer, questions: Questions) -> None:
    run = ReaderRun(ReaderSettings(steps=200, compiled=False), None, tokenizer)
    first = run.one_step(questions)
    for _ in range(39):
        last = run.one_step(questions)
    assert last < first / 4
    assert run.accuracy([questions])[0] > 0.7

"""Prompts, codes and masks: the reader's inputs apart from the tokens."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from research.pocket.frames import Reading
from research.pocket.reader.codes import MATCHED, SIGNS, SIZE, codes, token_names, word_numbers
from research.pocket.reader.material import BATCHES, DEVELOPMENT, SECOND, WRITTEN, Material, written
from research.pocket.reader.questions import LONGEST, Questions, bare, prompts


def test_an_answer_is_found_token_by_token(tokenizer: Tokenizer, readings: list[Reading]) -> None:
    seen = 0
    for reading in readings:
        for (_, answer), prompt in zip(reading.questions, prompts(tokenizer, reading), strict=True):
            found = tokenizer.decode(prompt.ids[prompt.first : prompt.last + 1]).strip()
            assert found.startswith(bare(answer))
            assert len(found) <= len(answer) + 2  # a token may hold the comma after it
            assert tokenizer.id_to_token(prompt.ids[prompt.mark]) == "ĠContext"
            seen += 1
    assert seen > 20


def test_an_answer_loses_its_article_and_nothing_else(tokenizer: Tokenizer) -> None:
    assert [bare(a) for a in ("a red boat", "The Hague", "another", "Anne", "the")] == [
        "red boat",
        "Hague",
        "another",
        "Anne",
        "the",
    ]
    [prompt] = prompts(tokenizer, Reading("Then the boat left the quay.", (("What left?", "the boat"),)))
    assert tokenizer.decode(prompt.ids[prompt.first : prompt.last + 1]).strip() == "boat"


def test_an_answer_is_looked_for_in_the_passage_and_not_in_the_question(tokenizer: Tokenizer) -> None:
    reading = Reading("The red boat is old.", (("Is the red boat or the blue one old?", "red"),))
    [prompt] = prompts(tokenizer, reading)
    assert prompt.first > prompt.mark


def test_what_has_no_answer_or_is_too_long_is_left_out(tokenizer: Tokenizer) -> None:
    assert not list(prompts(tokenizer, Reading("The boat is old.", (("Who?", "Mara"),))))
    assert not list(prompts(tokenizer, Reading("The boat is old. " * LONGEST, (("What?", "boat"),))))


def test_codes_of_one_word_share_their_signs_and_others_differ(tokenizer: Tokenizer) -> None:
    table, numbers, names = codes(tokenizer), word_numbers(tokenizer), token_names(tokenizer)
    assert table.shape == (len(names), SIZE)
    capital, small = names.index("ĠThe"), names.index("Ġthe")
    assert torch.equal(table[capital, :SIGNS], table[small, :SIGNS])
    assert not torch.equal(table[capital], table[small])
    assert len(torch.unique(table, dim=0)) == len(names)
    words = torch.unique(numbers)
    first = torch.stack([table[(numbers == n).nonzero()[0, 0], :MATCHED] for n in words[:1500]])
    alike = first @ first.T - torch.eye(len(first)) * 2 * MATCHED
    assert alike.max() <= MATCHED - 2
    assert torch.equal(table, codes(tokenizer))


def test_masks_are_what_brute_force_says(tokenizer: Tokenizer, material: Material, questions: Questions) -> None:
    rows, length = questions.ids.shape
    names = token_names(tokenizer)
    assert questions.valid.sum(1).unique().numel() > 3  # there is padding
    for row in range(0, rows, 3):
        mark = int(questions.after_mark[row].argmax())
        ids = questions.ids[row].tolist()
        bare = [names[i].replace("Ġ", "").lower() for i in ids]
        for at in range(0, length, 7):
            real = bool(questions.valid[row, at])
            seen = [(k <= at and bool(questions.valid[row, k])) or k == at for k in range(length)]
            assert questions.seen[row, at].tolist() == seen
            assert questions.seen_question[row, at].tolist() == [k <= at and k < mark for k in range(length)]
            same = (
                [k for k in range(mark) if bare[k] == bare[at] and bare[k] not in ("ċ", "ċċ")]
                if real and at >= mark
                else []
            )
            expected = torch.tensor([1 / len(same) if k in same else 0.0 for k in range(length)])
            torch.testing.assert_close(questions.same[row, at], expected)
    assert questions.same.sum() > 10


def test_a_chunk_is_the_same_whenever_it_is_asked_for(tokenizer: Tokenizer, material: Material) -> None:
    one, again = material.chunk(5), material.chunk(5)
    assert len(one) == BATCHES
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(one, again, strict=True))
    for other in (Material(tokenizer, seed=3, rank=1, size=4).chunk(5), material.chunk(6)):
        assert not all(
            a.ids.shape == b.ids.shape and torch.equal(a.ids, b.ids) for a, b in zip(one, other, strict=True)
        )


def test_the_development_passages_are_not_trained_on() -> None:
    trained = {" ".join(frame.sentences) for frame in written(WRITTEN, SECOND)}
    held = {" ".join(frame.sentences) for frame in written(DEVELOPMENT)}
    assert len(trained) > 7000
    assert len(held) == 60
    assert not trained & held

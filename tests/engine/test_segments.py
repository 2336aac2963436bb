"""Sentences and clauses: which tokens they own, and their scores against plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semgrad_guard import LanguageModel
from semgrad_guard.engine.objective import Objective

from .oracle import reference_scores, worst_relative_error

ANSWER = "Tea is a drink. It grows, they say, in Assam! Does it?\nYes."


@pytest.mark.parametrize("objective", [None, Objective("official", norm="l2", layers=(0, 3), last_tokens=3)])
def test_scores_equal_each_segments_own_objective(language_model: LanguageModel, objective: Objective | None) -> None:
    found = language_model.segments("What is tea?", ANSWER, objective=objective)
    assert [s.text for s in found] == [
        "Tea is a drink. ",
        "It grows, they say, in Assam! ",
        "Does it?\n",
        "Yes.",
    ]
    prompt, begin, wanted = language_model.render("What is tea?"), 0, objective or Objective()
    response = list(ANSWER.encode())
    ids = language_model.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    for segment in found:
        end = begin + len(segment.text)
        assert (segment.start, segment.end) == (begin, end)
        expected = reference_scores(
            language_model._model, prompt.ids, ids, prompt.semantic_token.offset, wanted.variant, wanted.layers,
            norm=wanted.norm, grid_tokens=wanted.last_tokens, part=slice(begin, end), context=begin,
        )  # fmt: skip
        assert segment.scores is not None
        assert worst_relative_error(segment.scores, expected) < 1e-9
        begin = end
    assert begin == len(response)


def test_one_sentence_is_the_whole_answer(language_model: LanguageModel) -> None:
    (segment,) = language_model.segments("q", "Tea is a drink.")
    assert segment.scores == language_model.score("q", "Tea is a drink.")


def test_a_segment_without_a_token_has_no_scores(make_language_model: Callable[..., LanguageModel]) -> None:
    model = make_language_model(vocab_size=259)
    model.tokenizer.add_tokens(["! B! C"])
    segments = model.segments("q", "A! B! C")
    assert [segment.text for segment in segments] == ["A! ", "B! ", "C"]
    assert [segment.scores is None for segment in segments] == [False, True, False]

"""Sentences: their borders in real texts and while a text is being written, their leanings, tokens and scores."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semgrad_guard import LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.text_units import decided, leanings, sentences

from .oracle import reference_scores, worst_relative_error

LINES = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()
DIVIDED = [
    [piece.replace("⏎", "\n").replace("¦", "|") for piece in line.partition(" ")[2].split("|")]
    for line in LINES
    if not line.startswith("#")
]
TEXTS = ["".join(pieces) for pieces in DIVIDED]
PIECES = [
    *'aZ1 .!?…\n"“”„«»()`。！「」と他说-*|,:',
    "Dr",
    "U.S",
    "The",
    " z. B",
    "am 3",
    "\n```\n",
    "\n  ~~~\n",
    "🎉",
    "x" * 45,
]


def texts(text: str) -> list[str]:
    return [text[start:end] for start, end in sentences(text)]


@pytest.mark.parametrize("pieces", DIVIDED, ids=range(len(DIVIDED)))
def test_sentences(pieces: list[str]) -> None:
    assert texts("".join(pieces)) == pieces


@pytest.mark.parametrize("text", ["", " \n", "Paris", "  Paris.  ", "...", "word " * 2000])
def test_one_sentence(text: str) -> None:
    assert sentences(text) == [(0, len(text))]


def require_decided_once(text: str) -> None:
    ends, begin, found = [end for _, end in sentences(text)], 0, list[int]()
    for length in range(len(text) + 1):
        whole = decided(text[:length])
        assert whole == ends[:-1][: len(whole)], text[:length]
        found += decided(text[:length], begin)
        assert found == whole, text[:length]
        begin = found[-1] if found else 0


INDENTED = "1. Run this:\n   ```py\n   print(1)\n   # It ends. Really.\n   ```\n2. Look at it. It is there."


@pytest.mark.parametrize("text", [*TEXTS, INDENTED], ids=range(len(TEXTS) + 1))
def test_a_border_of_a_text_that_is_being_written_never_moves(text: str) -> None:
    require_decided_once(text)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25))
def test_a_border_of_any_text_never_moves(pieces: list[str]) -> None:
    require_decided_once("".join(pieces))


def test_a_quotation_that_never_closes_holds_a_text_back_for_so_long() -> None:
    text = '"It is late. ' + "They wait here. " * 40
    assert decided(text[:280]) == []
    assert len(decided(text)) == 40


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, ";", "—", "、"]), max_size=25))
def test_spans_cover_the_text_and_none_is_blank(pieces: list[str]) -> None:
    text = "".join(pieces)
    spans = sentences(text)
    assert (spans[0][0], spans[-1][1]) == (0, len(text))
    assert all(one[1] == two[0] for one, two in pairwise(spans))
    assert len(spans) == 1 or all(text[start:end].strip() for start, end in spans)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Lima is old. It is big. However, they left. Peru is far.", [None, 0, 1, None]),
        ("It rains. Peru is far.", [None, None]),
        ("Cities:\n- Lima\n- Cusco\nPeru is far.", [None, 0, 0, None]),
        ("- Lima\n- Cusco", [None, None]),
        ("1. Kenya is far.\n2. It is big.\n3. Peru is old.", [None, 0, None]),
        ("Cities:\n- Lima\n- It is big\n- Cusco", [None, 0, 1, 0]),
        ("| Country |\n|---|\n| Peru |\n| Chile |", [None, 0, 0]),
        ("Run this:\n```\nls\n```\nHe did.", [None, 0, 1]),
        ("Lima ist alt. Sie ist groß. Peru liegt fern.", [None, 0, None]),
        ("东京很大。它很老。秘鲁很远。", [None, 0, None]),
        ("Itálie is far. Hereford is near.", [None, None]),
    ],
)
def test_sentences_that_lean_on_others(text: str, expected: list[int | None]) -> None:
    assert leanings(text, sentences(text)) == expected


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

"""The units of a text: sentences and their borders, also while it is written, fields of JSON, and their scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from semgrad_guard import HybridGrad, LanguageModel
from semgrad_guard.engine.answers.sentence_evidence import parts_of, token_ranges
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.thoughts import Codec
from semgrad_guard.engine.text_units import decided, fields_of, leanings, sentences

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


SCALARS = st.none() | st.booleans() | st.integers(-999, 9999) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.sampled_from('ab éß"\\\n{}[],:𝄞日0'), max_size=8)
VALUES = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)
FORMS: Any = st.fixed_dictionaries({"indent": st.sampled_from([None, 2]), "ensure_ascii": st.booleans()})


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[tuple[str | int, ...], Any]]:
    """Every value that holds no others."""
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for place, inner in enumerate(value) for leaf in leaves(inner, (*path, place))]
    return [(path, value)]


@settings(max_examples=500, deadline=None)
@given(value=VALUES, form=FORMS)
def test_every_value_is_found_where_it_stands(value: Any, form: Any) -> None:
    text = json.dumps(value, **form)
    found = fields_of(text)
    assert [(one.path, one.value) for one in found] == leaves(value)
    for one in found:
        own = text[one.start : one.end]
        assert one.value == json.loads(f'"{own}"' if isinstance(one.value, str) and own != '""' else own)


def test_the_names_before_a_value_are_known() -> None:
    text = '{"a": {"b c": 1, "d": []}, "e": ["x", {"f": {"g": null}}]}'
    found = [text[one.names : one.start] for one in fields_of(text)]
    assert found == ['"a": {"b c": ', '"d": ', '"e": ["', '"f": {"g": ']


@pytest.mark.parametrize("text", ["", "{", '{"a"', '{"a": ', '{"a": 1', "[1,", '"a', "{'a': 1}", "[1 2]", "nul", "tru"])
def test_what_is_no_json_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        fields_of(text)


def _trained(kind: str) -> Codec:
    """A tokenizer of this kind, trained on JSON, so that tokens reach over quotes, braces and commas."""
    corpus = [json.dumps({"city": f"Paris {n}", "ok": n % 2 == 0, "n": [n, None, "a, b"]}) for n in range(200)]
    alphabet = sorted(set("".join(corpus) + 'ab éß"\\\n{}[],:𝄞日0123456789eE.+-truefalsn'))
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        trainer: Any = trainers.BpeTrainer(vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=300, initial_alphabet=alphabet, unk_token="<unk>")
    else:
        made = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if kind == "unigram":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace()
    else:
        by_words = kind != "greedy"  # else tokens reach across words and marks
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
        made.decoder = decoders.ByteLevel()
        if kind == "digits":
            made.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), made.pre_tokenizer]
            )
    made.train_from_iterator(corpus, trainer)
    return Codec(PreTrainedTokenizerFast(tokenizer_object=made))


CODECS = {kind: _trained(kind) for kind in ("bytes", "words", "greedy", "digits", "unigram")}


@settings(max_examples=120, deadline=None)
@given(value=VALUES, form=FORMS, with_names=st.booleans())
@pytest.mark.parametrize("kind", CODECS)
def test_the_tokens_of_a_value_spell_it_and_its_end(kind: str, value: Any, form: Any, with_names: bool) -> None:
    codec, text = CODECS[kind], json.dumps(value, **form)
    ids = codec.encode(text)
    if codec.decode(ids, special=True) != text:
        return  # a tokenizer that does not spell the text back; such an answer has no fields in practice either
    found, reached = fields_of(text), 0
    starts = [one.names if with_names else one.start for one in found]
    ranges = token_ranges(ids, [(start, one.end) for start, one in zip(starts, found, strict=True)], codec)
    assert len(ranges) == len(found)
    for one, start, (begin, end) in zip(found, starts, ranges, strict=True):
        assert reached <= begin <= end, "a token belongs to one value alone"
        spelled = codec.decode(ids[:end], special=True)
        assert len(spelled) > one.end or end == len(ids), "what ends it is known"
        shorter = codec.decode(ids[: end - 1], special=True).rstrip("\ufffd")
        assert begin == end or len(shorter) <= one.end, "and nothing more"
        before = codec.decode(ids[:begin], special=True).rstrip("\ufffd")
        assert len(before) <= start or begin == reached, "all that spell it"
        reached = end


def test_scores_equal_each_values_own_objective(language_model: LanguageModel) -> None:
    text = '{"city": "Rome", "n": [1, null]}'
    answer, estimator = language_model.evidence("q", text), HybridGrad()
    assert language_model.decode(answer.response_ids, special=True) == text
    fields = fields_of(text)
    parts = parts_of(answer, [(one.start, one.end) for one in fields])
    ids, prompt, objective = list(answer.response_ids), answer.prompt, Objective()
    for one, part in zip(fields, parts, strict=True):
        assert part is not None
        assert language_model.tokenizer.decode(list(part.response_ids)) == text[one.start : one.end + 1]
        expected = reference_scores(
            language_model._model, prompt.ids, ids, prompt.semantic_token.offset, objective.variant, objective.layers,
            part=slice(one.start, one.end + 1), context=one.start,
        )  # fmt: skip
        scores = part.gradients(objective)
        assert scores is not None
        assert worst_relative_error(scores.scores, expected) < 1e-9
        assert estimator(part).uncertainty is not None

"""What a stop string cuts off is not scored: the score is that of the text that is delivered."""

from __future__ import annotations

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import Sampling
from semgrad_guard.engine.generation.visible import visible

QUESTION = "What is the capital of Mongolia?"


def uncertainty(generation: Generation) -> float:
    """HybridGrad of an answer."""
    timed = generation.evidence.gradients()
    assert timed is not None
    assert timed.scores.hybridgrad is not None
    return timed.scores.hybridgrad


@pytest.fixture(scope="module")
def whole(pocket: LanguageModel) -> Generation:
    """The answer without a stop string."""
    return pocket.generate(QUESTION, GenerationOptions(max_tokens=24))


def inside(pocket: LanguageModel, whole: Generation) -> str:
    """A stop string that begins in the middle of one of the answer's tokens, behind its first."""
    decode = pocket.tokenizer.decode
    for n in range(1, len(whole.response_ids)):
        start, end = len(decode(list(whole.response_ids[:n]))), len(decode(list(whole.response_ids[: n + 1])))
        if end - start > 2:
            return whole.text[start + 1 :]
    return whole.text[2:]


def test_a_stop_string_inside_a_token(pocket: LanguageModel, whole: Generation) -> None:
    stop = inside(pocket, whole)
    cut = pocket.generate(QUESTION, GenerationOptions(max_tokens=24, stop=(stop,)))
    assert cut.text == whole.text[: -len(stop)]
    assert pocket.tokenizer.decode(list(cut.response_ids)) == cut.text
    assert uncertainty(cut) == pytest.approx(pocket.score(QUESTION, cut.text).hybridgrad, rel=1e-6)
    assert uncertainty(cut) != uncertainty(whole)


def test_a_batch_in_which_one_answer_is_cut_inside_a_token(pocket: LanguageModel, whole: Generation) -> None:
    stop, other = inside(pocket, whole), "Who wrote Hamlet?"
    options = GenerationOptions(max_tokens=24, stop=(stop,))
    cut, apart = pocket.generate_batch([QUESTION, other], options)
    assert uncertainty(cut) == pytest.approx(pocket.score(QUESTION, cut.text).hybridgrad, rel=1e-5)
    assert uncertainty(apart) == pytest.approx(pocket.score(other, apart.text).hybridgrad, rel=1e-5)


def test_a_stop_string_between_tokens_keeps_what_was_captured(pocket: LanguageModel, whole: Generation) -> None:
    ids = whole.response_ids
    first = pocket.tokenizer.decode(list(ids[:1]))
    cut = pocket.generate(QUESTION, GenerationOptions(max_tokens=24, stop=(whole.text[len(first) :],)))
    assert cut.response_ids == ids[:1]
    timed = cut.evidence.gradients()
    assert timed is not None
    assert timed.scores.tier == "captured"


def test_a_stop_string_that_never_comes_changes_nothing(pocket: LanguageModel, whole: Generation) -> None:
    again = pocket.generate(QUESTION, GenerationOptions(max_tokens=24, stop=("→", "\x00")))
    assert again.response_ids == whole.response_ids
    assert uncertainty(again) == uncertainty(pocket.generate(QUESTION, GenerationOptions(max_tokens=24)))


def test_samples_end_where_their_text_ends(pocket: LanguageModel) -> None:
    plan = Sampling(count=4, max_tokens=8)
    evidence = pocket.generate(QUESTION, GenerationOptions(max_tokens=8, stop=("n",))).evidence
    for sample in evidence.samples(plan):
        assert "n" not in sample.text
        assert pocket.tokenizer.decode(list(sample.ids)) == sample.text


def test_half_a_character_is_no_end(pocket: LanguageModel) -> None:
    codec = pocket._decoder
    ids = codec.encode("Ω!")
    assert len(ids) > 2, "the first character must be spread over several tokens"
    assert visible(ids, ("!",), codec).ids == ids[:-1]


def test_tokens_that_show_no_text_stay_in_front(pocket: LanguageModel) -> None:
    """Marks of tool calls are such tokens: a cut behind them must not lose them."""
    codec, mark = pocket._decoder, pocket._end_tokens[0]
    ids = [mark, *codec.encode("Ulaanbaatar")]
    found = visible(ids, ("nbaatar",), codec)
    assert found.text == "Ulaa"
    assert found.ids == (mark, *codec.encode("Ulaa"))

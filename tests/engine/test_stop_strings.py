"""What a stop string cuts off is not scored: the score is that of the text that is delivered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.engine.answers.writing import visible
from tests.thinking import ANSWERS, THOUGHTS, thinking_model

from .worker_calls import Streamed, pieces_of

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
    assert timed.scores.tier == "replay"


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
    codec = pocket
    ids = codec.encode("Ω!")
    assert len(ids) > 2, "the first character must be spread over several tokens"
    assert visible(ids, ("!",), codec).ids == ids[:-1]


def test_tokens_that_show_no_text_stay_in_front(pocket: LanguageModel) -> None:
    """Marks of tool calls are such tokens: a cut behind them must not lose them."""
    codec, mark = pocket, pocket.end_tokens[0]
    ids = [mark, *codec.encode("Ulaanbaatar")]
    found = visible(ids, ("nbaatar",), codec)
    assert found.text == "Ulaa"
    assert found.ids == (mark, *codec.encode("Ulaa"))


QUESTIONS_TO_THINK = list(ANSWERS)
THOUGHT = ("\n\n", "\n", "It is", ".", "</think>", "<think>", "second")
"""Strings of the thought, its marks and the white space behind it."""


def answers_of(model: LanguageModel, way: str, options: GenerationOptions) -> list[Generation]:
    if way == "alone":
        return [model.generate(question, options) for question in QUESTIONS_TO_THINK]
    if way == "batch":
        return model.generate_batch(QUESTIONS_TO_THINK, options)
    streams = [Streamed(model, question, options) for question in QUESTIONS_TO_THINK]
    found = [(pieces_of(stream), stream.generation) for stream in streams]
    assert all(one and "".join(pieces) == one.text for pieces, one in found)
    return [one for _, one in found if one]


@pytest.mark.parametrize("way", ["alone", "batch", "stream"])
@pytest.mark.parametrize("string", THOUGHT)
def test_no_stop_string_is_looked_for_in_a_thought(way: str, string: str) -> None:
    model = thinking_model()
    options = GenerationOptions(max_tokens=60)
    plain = model.generate_batch(QUESTIONS_TO_THINK, options)
    for found, whole in zip(answers_of(model, way, replace(options, stop=(string,))), plain, strict=True):
        assert (found.text, found.finish_reason, found.cut) == (whole.text, "stop", None)
        assert found.reasoning == whole.reasoning


@pytest.mark.parametrize("way", ["alone", "batch", "stream"])
def test_it_ends_the_answer_behind_the_thought(way: str) -> None:
    """The thought holds it, too."""
    model = thinking_model()
    for found, question in zip(
        answers_of(model, way, GenerationOptions(max_tokens=60, stop=("i",))), QUESTIONS_TO_THINK, strict=True
    ):
        before, there, _ = ANSWERS[question].partition("i")
        assert (found.text, found.cut) == (before, "i" if there else None)
        assert found.reasoning is not None
        assert found.reasoning.text == THOUGHTS[question]


def test_nor_in_the_thought_of_a_sample() -> None:
    plan = Sampling(count=2, temperature=1e-6, max_tokens=60)
    model = thinking_model()
    found = model.generate(QUESTIONS_TO_THINK[0], GenerationOptions(max_tokens=60, stop=("It is", "\n\n")))
    assert [sample.text for sample in found.evidence.samples(plan)] == [ANSWERS[QUESTIONS_TO_THINK[0]]] * 2

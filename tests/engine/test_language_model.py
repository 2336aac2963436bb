"""Loading, generating, streaming and scoring with real (tiny, random) models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from semgrad_guard import GenerationOptions, LanguageModel, gradient_scores
from semgrad_guard.errors import EmptyResponseError, InputError, PromptTooLongError
from tests.random_llama import byte_tokenizer

from .generated_models import build as generated

Make = Callable[..., LanguageModel]
SAMPLED = GenerationOptions(max_tokens=12, temperature=1.0, seed=3)


def model_of(language_model: LanguageModel) -> torch.nn.Module:
    return language_model._model


def test_greedy_text_is_what_transformers_generates(language_model: LanguageModel) -> None:
    generation = language_model.generate("What is tea?", GenerationOptions(max_tokens=10))
    ids = torch.tensor([generation.prompt.ids])
    expected = model_of(language_model).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False
    )
    produced = expected[0, ids.shape[1] :].tolist()
    assert list(generation.response_ids) == [i for i in produced if i != 257]


def test_a_config_without_a_limit_of_positions_has_no_window() -> None:
    model = LanguageModel.from_transformers(generated("xlnet"), byte_tokenizer(), name="xlnet")
    assert model.context_window is None
    assert model.render("What is tea?").ids


def test_max_batch_bounds_the_rows_of_every_batch(make_language_model: Make) -> None:
    model, questions = make_language_model(), ["a", "bb", "a longer question", "d", "e"]
    singly = [model.generate(question, SAMPLED).text for question in questions]
    rows = list[int]()
    layer: Any = model.scorer.twin.layers[0]
    layer.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(args[0])), with_kwargs=True)
    model.max_batch = 2
    assert len(model.generate_batch(questions, SAMPLED)) == len(questions)
    assert set(rows) == {1, 2}
    model.max_batch = 1
    assert [model.generate_batch([question], SAMPLED)[0].text for question in questions] == singly
    greedy = GenerationOptions(max_tokens=6)
    expected = [model.generate(question, greedy).text for question in questions]
    assert [answer.text for answer in model.generate_batch(questions, greedy)] == expected
    with pytest.raises(InputError, match="at least 1"):
        model.max_batch = 0


def test_sampling_leaves_the_callers_random_state(language_model: LanguageModel) -> None:
    before = torch.random.get_rng_state()
    first = language_model.generate("x", GenerationOptions(max_tokens=6, temperature=1.0))
    second = language_model.generate("x", GenerationOptions(max_tokens=6, temperature=1.0))
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.response_ids != second.response_ids


def test_a_stop_string_that_no_token_spells_stops_nothing(language_model: LanguageModel) -> None:
    words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i + 2 for i in range(256)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    model = LanguageModel.from_transformers(model_of(language_model), plain)
    whole = model.generate("w1 w2", GenerationOptions(max_tokens=6))
    cut = model.generate("w1 w2", GenerationOptions(max_tokens=6, stop=("→", whole.text[-2:])))
    assert cut.text == whole.text[: whole.text.index(whole.text[-2:])]


def test_the_end_token_is_neither_shown_nor_scored(make_language_model: Make) -> None:
    model = make_language_model(seed=1)
    network = model_of(model)
    first = model.generate("x", GenerationOptions(max_tokens=3))
    with torch.no_grad():  # a head in which the end token copies and beats whatever came second
        network.lm_head.weight[257] = 5 * network.lm_head.weight[first.response_ids[1]]
    ended = model.generate("x", GenerationOptions(max_tokens=6))
    assert ended.finish_reason == "stop"
    assert 257 not in ended.response_ids
    assert ended.completion_tokens == len(ended.response_ids) + 1


def test_an_empty_answer_has_no_scores(make_language_model: Make) -> None:
    model = make_language_model(seed=1)
    with torch.no_grad():
        model_of(model).lm_head.weight[:] = 0
        model_of(model).lm_head.weight[257] = model.render("x").ids[0]
    states = model_of(model).model.norm.weight
    with torch.no_grad():
        states.zero_()  # every logit equal: argmax is token 0; make the end token win through a bias instead
    model_of(model).lm_head.bias = torch.nn.Parameter(torch.eye(258, dtype=torch.float64)[257] * 9)
    generation, other = model.generate_batch(["x", "yy"])
    assert (generation.text, generation.response_ids, generation.finish_reason) == ("", (), "stop")
    assert generation.evidence.gradients() is None
    assert other.evidence.gradients() is None


def test_an_error_in_the_model_reaches_the_caller(make_language_model: Make) -> None:
    model = make_language_model(seed=1)
    handle = model_of(model).model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate("x")
    handle.remove()
    assert model.generate("x", GenerationOptions(max_tokens=2)).text


def test_text_from_elsewhere_is_scored_as_the_prompts_continuation(language_model: LanguageModel) -> None:
    prompt = language_model.render("What is tea?")
    ids = language_model.tokenizer("A drink.", add_special_tokens=False)["input_ids"]
    by_ids = gradient_scores(model_of(language_model), prompt.ids, ids, semantic_token=prompt.semantic_token.offset)
    scores = language_model.score("What is tea?", "A drink.")
    assert scores == by_ids
    assert len(scores.entropies) == len("A drink.")


@pytest.mark.parametrize("response", ["", " \n"])
def test_empty_responses(language_model: LanguageModel, response: str) -> None:
    for score in (language_model.score, language_model.segments):
        with pytest.raises(EmptyResponseError):
            score("q", response)


def test_prompts_at_and_over_the_window(make_language_model: Make) -> None:
    model = make_language_model(max_position_embeddings=64)
    frame = len(model.render("x").ids) - 1
    almost = model.generate("x" * (63 - frame), GenerationOptions(max_tokens=50))
    assert almost.completion_tokens == 1
    assert almost.finish_reason == "length"
    for length in (64, 65, 200):
        with pytest.raises(PromptTooLongError, match="64"):
            model.generate("x" * (length - frame))
    with pytest.raises(PromptTooLongError):
        model.score("x" * 20, "y" * 40)


def test_no_tokenizer_is_refused(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="a NoneType is no tokenizer"):
        LanguageModel.from_transformers(model_of(language_model), None)  # type: ignore[arg-type]

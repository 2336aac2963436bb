"""Loading, generating, streaming and scoring with real (tiny, random) models; records of answers are plain data."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from semgrad_guard import Generation, GenerationOptions, HybridGrad, LanguageModel, Memory, Verdict, gradient_scores
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.engine.answers.running import Request
from semgrad_guard.engine.interruption import Stop
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import (
    DetachedRecordError,
    EmptyResponseError,
    InputError,
    PromptTooLongError,
    ScoringError,
    UnsupportedModelError,
)
from semgrad_guard.estimators.reading import PTrue
from semgrad_guard.estimators.samples import SemanticEntropy
from tests.random_llama import byte_tokenizer

from .generated_models import build as generated

Make = Callable[..., LanguageModel]
ONE = GenerationOptions(max_tokens=1)
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


WRONG: dict[str, Callable[[LanguageModel], Any]] = {
    "no conversation": lambda model: model.generate(None),  # type: ignore[arg-type]
    "a conversation of None": lambda model: model.generate([None]),  # type: ignore[list-item]
    "a text for several": lambda model: model.generate_batch("Hi"),
    "None for several": lambda model: model.generate_batch(None),  # type: ignore[arg-type]
    "options as a dict": lambda model: model.generate("Hi", {"max_tokens": 2}),  # type: ignore[arg-type]
    "an objective as a text": lambda model: model.score("Hi", "Yes", objective="paper"),  # type: ignore[arg-type]
    "a later objective": lambda model: model.generate("Hi", ONE, objective="paper"),  # type: ignore[arg-type]
    "no answers": lambda model: model.submit(Request(prompt=model.render("Hi"), options=(), finish=len)),
    "no text": lambda model: model.score("Hi", None),  # type: ignore[arg-type]
    "bytes": lambda model: model.score("Hi", b"Yes"),  # type: ignore[arg-type]
    "half a character": lambda model: model.score("Hi", "\ud800"),
    "a thought of bytes": lambda model: model.evidence("Hi", "Yes", reasoning=b"a"),  # type: ignore[arg-type]
    "a list of options": lambda model: model.generate("Hi", ONE, template_options=[1]),  # type: ignore[arg-type]
    "options without a name": lambda model: model.generate("Hi", ONE, template_options={1: 1}),  # type: ignore[dict-item]
    "half a row": lambda model: setattr(model, "max_batch", 2.5),
    "another memory": lambda model: setattr(model, "memory", "frugal"),
    "less than no memory": lambda _: Memory(logits=-1),
    "less than no token": lambda model: model.generate("Hi", ONE).evidence.likeliest(-1),
    "a time as a text": lambda _: Stop("1"),  # type: ignore[arg-type]
    "no ids": lambda model: gradient_scores(model_of(model), None, [1], semantic_token=-1),  # type: ignore[arg-type,call-overload]
    "one layer": lambda model: gradient_scores(model_of(model), [5], [1], semantic_token=-1, layers=5),  # type: ignore
}


@pytest.mark.parametrize("name", WRONG)
def test_every_value_is_checked_where_it_enters(language_model: LanguageModel, name: str) -> None:
    with pytest.raises(InputError):
        WRONG[name](language_model)


def test_no_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a NoneType is no model"):
        gradient_scores(None, [5], [1], semantic_token=-1)  # type: ignore[call-overload]


PLAN = Sampling(count=2, max_tokens=3)


def pickled(record: Any) -> Any:
    data = pickle.dumps(record)
    assert b"torch" not in data
    return pickle.loads(data)  # noqa: S301 - just written


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": pickled,
    "deepcopy": copy.deepcopy,
    "copied twice": lambda record: copy.deepcopy(pickled(record)),
}


@pytest.fixture(params=COPIES.values(), ids=COPIES.keys())
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param


@pytest.fixture
def answers(language_model: LanguageModel) -> list[Generation]:
    return language_model.generate_batch(["What is tea?", "And coffee?"], GenerationOptions(max_tokens=4))


def test_before_scoring(answers: list[Generation], copied: Callable[[Any], Any]) -> None:
    for answer in (*answers, *(a.evidence for a in answers)):
        twin = copied(answer)
        evidence = twin.evidence if isinstance(twin, Generation) else twin
        assert evidence.text == answer.text
        assert evidence.response_ids == answer.response_ids
        assert (twin.prompt, evidence.question) == (answer.prompt, answer.prompt.question)
        for ask in (evidence.gradients, lambda e=evidence: e.samples(PLAN), lambda e=evidence: e.model):
            with pytest.raises(DetachedRecordError, match="before you copy it"):
                ask()
        assert getattr(answer, "evidence", answer).model, "the original has its model still"


def test_after_scoring(answers: list[Generation], copied: Callable[[Any], Any]) -> None:
    first, second = answers
    scores, samples = first.evidence.gradients(), first.evidence.samples(PLAN)
    twin, other = copied(first), copied(second).evidence
    assert twin == first
    assert twin.evidence.gradients() == scores
    assert twin.evidence.samples(PLAN) == samples
    assert (other.gradients(), other.samples(PLAN)) == (second.evidence.gradients(), second.evidence.samples(PLAN))
    with pytest.raises(ScoringError):
        twin.evidence.gradients(Objective("official"))
    with pytest.raises(ScoringError):
        twin.evidence.samples(PLAN, temperature=0.5)


@pytest.mark.parametrize("estimator", [HybridGrad(), PTrue(), SemanticEntropy(PLAN)], ids=lambda e: e.name)
def test_an_estimator_reads_what_is_there_and_says_what_is_not(
    answers: list[Generation], copied: Callable[[Any], Any], estimator: Any
) -> None:
    evidence = answers[0].evidence
    with pytest.raises(ScoringError, match="copied without its model"):
        estimator(copied(evidence))
    score = estimator(evidence)
    assert estimator(copied(evidence)).uncertainty == score.uncertainty


def test_prompts_scores_samples_and_verdicts(language_model: LanguageModel, copied: Callable[[Any], Any]) -> None:
    target = Verdict.of(status="unscored", action="answer", text="Tea.", estimator="none", model="larger")
    verdict = Verdict.of(
        status="scored", action="escalate", text="Tea.", estimator="hybridgrad", model="m", draft="?", escalated=target
    )
    evidence = language_model.evidence("What is tea?", "A drink.")
    timed = evidence.gradients()
    assert timed is not None
    for record in (
        verdict,
        evidence.prompt,
        timed,
        timed.scores,
        evidence.samples(PLAN),
        language_model.identity,
        PLAN,
    ):
        assert copied(record) == record

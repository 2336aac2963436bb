"""What an answer tells without a gradient, against the model's own ordinary forward pass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.replay.memory import Memory, TokenBatch, cache_of
from semgrad_guard.engine.replay.captured_states import Capture, CapturedStates
from semgrad_guard.engine.scores.observed import Observation, observed_layer
from semgrad_guard.engine.scores.scorer import clean_slate, scorer_of
from semgrad_guard.estimators import KIND_OF, FusedStates, GreedyNLL, HybridGrad, MaxProbability, MeanEntropy
from semgrad_guard.records import FusedWeights

from .generated_models import build, require_known
from .test_self_check import CappedLogits, WarmLogits
from .test_self_check import tiny as build_as
from .tiny_models import ARCHITECTURES, shared, token_ids

PROMPTS = ["A", "What is it, then?", "Hello there"]
LONG = GenerationOptions(max_tokens=7, temperature=1.0, seed=1)
OBSERVING = Objective(gradients=False)


def oracle(
    model: Any, prompt: Sequence[int], answer: Sequence[int], *, own: bool = False
) -> tuple[list[float], list[float], torch.Tensor]:
    """Log-probabilities, entropies and the mean state, by one call of the model as any user makes it."""
    with torch.no_grad():
        output = model(torch.tensor([[*prompt, *answer]]), output_hidden_states=True)
    log_p = output.logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    states = output.hidden_states[observed_layer(model.config.num_hidden_layers)][0, len(prompt) - 1 :]
    states = states[1:] if own else states[:-1]
    chosen = log_p[range(len(answer)), list(answer)]
    return chosen.tolist(), (-(log_p.exp() * log_p).sum(-1)).tolist(), states.double().mean(0)


def require_equal(seen: Observation | None, expected: tuple[list[float], list[float], torch.Tensor]) -> None:
    assert seen is not None
    assert seen.log_probs == pytest.approx(expected[0], rel=1e-9)
    assert seen.entropies == pytest.approx(expected[1], rel=1e-9)
    assert torch.allclose(torch.tensor(seen.state, dtype=torch.float64), expected[2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("objective", [OBSERVING, Objective()])
@pytest.mark.parametrize("scored_before", [False, True])
def test_it_is_what_the_model_says(
    language_model: LanguageModel, objective: Objective, *, scored_before: bool, own: bool
) -> None:
    generations = language_model.generate_batch(PROMPTS, LONG, objective=objective)
    if scored_before:
        HybridGrad()(generations[0].evidence)
    for generation in generations:
        expected = oracle(language_model._model, generation.prompt.ids, generation.response_ids, own=own)
        require_equal(generation.evidence.observed(own=own), expected)
        read = language_model.evidence("x", "abc")
        require_equal(
            read.observed(own=own), oracle(language_model._model, read.prompt.ids, read.response_ids, own=own)
        )


def test_nothing_is_replayed(language_model: LanguageModel) -> None:
    """Neither a pass nor a gradient: what the generation kept is all that is read, and it stays there for scoring."""
    options = GenerationOptions(max_tokens=200, temperature=1.0, seed=1)
    generation = language_model.generate("A", options, objective=OBSERVING)
    assert generation.cut is None, "the last token of an answer that was cut off has not been read"
    calls: list[str] = []
    handle = (
        language_model._scorer.current_replayer().layers[-1].register_forward_hook(lambda *_: calls.append("layer"))
    )
    try:
        for estimator in (GreedyNLL(), MaxProbability(), MeanEntropy(), FusedStates()):
            assert estimator(generation.evidence).details
    finally:
        handle.remove()
    assert calls == []
    assert generation.scoring._done == {}


@pytest.mark.parametrize("name", ["gnll", "max_probability", "mean_entropy"])
def test_the_numbers_are_those_of_a_replay(language_model: LanguageModel, name: str) -> None:
    generation = language_model.generate("A", LONG)
    seen = KIND_OF[name]()(generation.evidence)
    scores = generation.evidence.gradients()
    assert scores is not None
    assert seen.uncertainty == pytest.approx(KIND_OF[name]().value(scores.scores), rel=1e-9)
    details = HybridGrad()(generation.evidence).details
    assert details is not None
    assert details[name] == pytest.approx(seen.uncertainty, rel=1e-9), "they come with every other score"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(name: str) -> None:
    """A padded batch, by one pass; log-probabilities are the model's own whatever tier it scores by."""
    model, scorer = shared(name), scorer_of(shared(name))
    prompts, answers = [token_ids(9, 1), token_ids(5, 2)], [token_ids(4, 3), token_ids(6, 4)]
    batch = TokenBatch.of(prompts, answers, [-1, -1], scorer.device)
    for seen, prompt, answer in zip(scorer.observe(batch), prompts, answers, strict=True):
        expected = oracle(model, prompt, answer)
        if scorer.tiers() == ("full",):
            assert seen.state == ()
            assert seen.log_probs == pytest.approx(expected[0], rel=1e-6)
        else:
            require_equal(seen, expected)


NAMED = ("roberta", "deepseek_v4", "gemma3n_text", "xlnet", "mllama", "mamba")
UNUSUAL: dict[str, Callable[[], Any]] = {
    "factor after the head": lambda: build_as(WarmLogits),
    "cap after the head": lambda: build_as(CappedLogits),
    **{name: partial(build, name) for name in NAMED},
}
"""What follows the head, positions of its own, residual streams, tokens before rows, idle layers, and no cuts."""


@pytest.mark.parametrize("name", UNUSUAL)
def test_models_that_do_it_in_their_own_way(name: str) -> None:
    if name in NAMED:
        require_known(name)
    model, prompt = UNUSUAL[name](), token_ids(9, 1)
    scorer, n_layers = scorer_of(model), scorer_of(model).architecture.n_layers
    with clean_slate():
        replayer = scorer.current_replayer()
        capture = Capture(observed_layer(n_layers), len(prompt) - 1, memory=scorer.memory)
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        own = replayer.generate(
            ids,
            torch.ones_like(ids),
            capture if "captured" in scorer.tiers() else None,
            **options,
            return_dict_in_generate=True,
        )
        captured = CapturedStates.of(cache_of(own), capture, scorer.epoch) if "captured" in scorer.tiers() else None
    answer = own.sequences[0, len(prompt) :].tolist()
    batch = TokenBatch.of([prompt], [answer], [-1], scorer.device)
    padded = TokenBatch.of([token_ids(12, 2), prompt], [token_ids(4, 3), answer], [-1, -1], scorer.device)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits
    log_p = logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    expected = log_p[range(len(answer)), answer].tolist()
    alone = scorer.observe(batch)[0]
    assert alone.state
    for seen in (alone, scorer.observe(batch, captured)[0], scorer.observe(padded)[1]):
        assert seen.log_probs == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert seen.state == pytest.approx(alone.state, rel=1e-3, abs=1e-4)


def test_a_copy_holds_what_was_seen(language_model: LanguageModel) -> None:
    evidence = language_model.generate("A", LONG).evidence
    seen = evidence.observed()
    assert pickle.loads(pickle.dumps(evidence)).observed() == seen  # noqa: S301
    assert copy.deepcopy(evidence).observed() == seen


def test_in_half_precision_it_is_refined(make_language_model: Any) -> None:
    language_model: LanguageModel = make_language_model()
    model = copy.deepcopy(language_model._model).bfloat16()
    half = LanguageModel.from_transformers(model, language_model.tokenizer)
    generation = half.generate("A", LONG, objective=OBSERVING)
    seen = generation.evidence.observed()
    exact = oracle(model, generation.prompt.ids, generation.response_ids)
    assert seen is not None
    assert seen.log_probs == pytest.approx(exact[0], rel=0.05, abs=0.05)


def test_without_weights_it_collects(language_model: LanguageModel) -> None:
    score = FusedStates()(language_model.generate("A", LONG).evidence)
    assert score.uncertainty is None
    assert "not fitted" in str(score.reason)
    assert score.features is not None
    assert sum(name.startswith("own_state/") for name in score.features) == 32


def test_weights_read_the_states_of_the_answers_own_tokens(language_model: LanguageModel) -> None:
    evidence = language_model.generate("A", LONG).evidence
    features = FusedStates()(evidence).features
    assert features is not None
    column = {"lows": (-9.0,), "highs": (9.0,), "centres": (0.0,), "scales": (1.0,), "weights": (1.0,)}
    facts = {"intercept": 0.0, "n": 50, "n_wrong": 20}
    weights = FusedWeights(columns=("own_state/3",), **column, **facts)
    fitted = FusedStates(weights=weights)
    predicting = oracle(language_model._model, evidence.prompt.ids, evidence.response_ids)[2][3]
    assert fitted(evidence).uncertainty == features["own_state/3"] != pytest.approx(float(predicting), rel=1e-4)
    assert fitted.settings() == {"weights": weights.id}


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_beyond_the_budget_each_step_is_surveyed(language_model: LanguageModel, kept: int) -> None:
    """The head is read once, while generating: no output of it is kept, and the numbers are the same."""
    step = len(PROMPTS) * language_model._scorer.vocabulary * 4
    language_model.memory = Memory(logits=kept * step)
    generations = language_model.generate_batch(PROMPTS, LONG, objective=OBSERVING)
    captured = generations[0].scoring._captured
    assert captured is not None
    assert (len(captured.logits), len(captured.surveys)) == (
        0,
        max(len(generation.response_ids) for generation in generations),
    )
    passes = list[int]()
    head = language_model._scorer.current_replayer().head
    hook = head.register_forward_pre_hook(lambda *_: passes.append(1))
    for generation in generations:
        expected = oracle(language_model._model, generation.prompt.ids, generation.response_ids)
        require_equal(generation.evidence.observed(), expected)
    hook.remove()
    assert passes == []

"""The model is scored, and answers, as it is at the call: what its owner changed is noticed, or told by `refresh`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.engine.scores import scorer as scorer_module
from semgrad_guard.engine.scores.exactness import checked
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import Scorer, scorer_of
from semgrad_guard.errors import UnsupportedModelError

from .cases import CASES, Case
from .snapshots import unchanged
from .switches import INERT, NOTICED, REFUSED, TOLD, plain_scores
from .tiny_models import build

BRIEF = GenerationOptions(max_tokens=6)
SAMPLED = GenerationOptions(max_tokens=6, temperature=20.0, seed=0)  # tokens that differ
LONGER = GenerationOptions(max_tokens=30, temperature=2.0, seed=5)
PROMPT = "What is tea?"
CASE = CASES[0]


def score(model: Any) -> GradientScores:
    return gradient_scores(model, CASE.prompt, CASE.response, semantic_token=CASE.semantic_token)


def check(found: GradientScores, model: Any, case: Case = CASE) -> None:
    expected = plain_scores(model, case)
    assert (found.semgrad, found.paragrad) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("name", [*NOTICED, *TOLD])
def test_a_switch_is_seen_at_the_next_score(name: str) -> None:
    """In training mode, with dropout: the user's own modules would answer at random."""
    model = build("llama", attention_dropout=0.5).train()
    before, epoch = score(model), scorer_of(model).epoch
    {**NOTICED, **TOLD}[name](model)
    if name in TOLD:
        assert (score(model), scorer_of(model).epoch) == (before, epoch), "and what earlier passes left stays of use"
        scorer_of(model).refresh()
    with unchanged(model):
        after = score(model)
        assert score(model) == after
    check(after, model)
    assert after.semgrad != pytest.approx(before.semgrad, rel=1e-6)


@pytest.mark.parametrize("met", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_function_in_the_place_of_a_method_is_refused_and_its_end_is_scored(name: str, met: bool) -> None:
    model, expected = build("llama").train(), score(build("llama"))
    if met:
        score(model)
    REFUSED[name](model)
    with unchanged(model), pytest.raises(UnsupportedModelError, match="replaced on one object"):
        score(model)
    for module in (model, *(layer.mlp for layer in model.model.layers)):
        vars(module).pop("forward", None)
    assert score(model) == expected


@pytest.mark.parametrize("name", INERT)
def test_what_changes_no_number_costs_no_look(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, checks = build("llama", attention_dropout=0.5), list[int]()
    monkeypatch.setattr(scorer_module, "checked", lambda *given: (checks.append(1), checked(*given))[1])
    before, scorer = score(model), scorer_of(model)
    epoch, twin = scorer.epoch, scorer.twin
    INERT[name](model)
    assert score(model) == before
    assert scorer.epoch is epoch
    assert scorer.twin is twin
    assert len(checks) == 1


@pytest.mark.parametrize("name", ["weights in place", "a hook", "another head", "forward of an mlp"])
def test_a_switch_is_seen_by_the_next_answer_and_by_an_earlier_answers_score(
    name: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = build("llama", vocab_size=258, eos_token_id=None)
    language_model = LanguageModel.from_transformers(model, tokenizer)
    early, late = (language_model.generate(PROMPT, BRIEF) for _ in range(2))
    assert late.evidence.gradients() is not None
    NOTICED[name](model)
    generation = early
    for generation in (early, late, language_model.generate(PROMPT, BRIEF)):
        timed = generation.evidence.gradients()
        assert timed is not None
        case = Case(list(generation.prompt.ids), list(generation.response_ids), generation.prompt.semantic_token.offset)
        check(timed.scores, model, case)
    ids = torch.tensor([generation.prompt.ids])
    own = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=257, pad_token_id=257)
    assert generation.response_ids == tuple(t for t in own[0, ids.shape[1] :].tolist() if t != 257)


class TestWhatLookingCosts:
    """A new twin, and a new self-check, only after a change."""

    def test_what_a_hook_notes_in_our_own_passes_is_no_change(self) -> None:
        model, seen = build("llama"), []
        model.model.layers[2].register_forward_hook(lambda _, __, output: seen.append(output.detach().mean()))
        assert len({score(model) for _ in range(3)}) == 1
        assert seen

    def test_the_model_is_looked_at_once_in_a_score_and_not_in_each_step(
        self, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        guard, looks = Guard(language_model, Policy(threshold=1.0), options=BRIEF), list[int]()
        guard(PROMPT)
        original = Scorer._look
        monkeypatch.setattr(Scorer, "_look", lambda self: (looks.append(1), original(self))[1])
        language_model.score(PROMPT, "Tea.")
        assert len(looks) <= 2
        guard(PROMPT)
        guard.batch([PROMPT, PROMPT])
        assert len(looks) <= 17, "where they join and leave, and not at each step"
        looks.clear()
        language_model.generate(PROMPT, BRIEF)
        assert len(looks) <= 6


def test_end_tokens_are_those_of_the_next_call(tokenizer: PreTrainedTokenizerFast) -> None:
    """Set, added to, and put back in the model's generation config."""
    model = LanguageModel.from_transformers(build("llama", vocab_size=258), tokenizer)
    own, found = model._model.generation_config.eos_token_id, []
    whole = model.generate(PROMPT, SAMPLED).response_ids
    cut = next(place for place in range(1, len(whole)) if whole[place] not in whole[:place])
    for end in (whole[cut], [whole[0], whole[cut]], own):
        model._model.generation_config.eos_token_id = end
        found.append(model.generate(PROMPT, SAMPLED))
    assert [generation.response_ids for generation in found] == [whole[:cut], (), whole]
    assert [generation.finish_reason for generation in found] == ["stop", "stop", "length"]


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "with an adapter"])
def test_generation_defaults_of_a_checkpoint_play_no_part(adapted: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    """Qwen2.5 brings a repetition penalty; answers would be others than those of the server's own loop."""
    bare: Any = build("llama", vocab_size=258)
    model: Any = get_peft_model(bare, LoraConfig(target_modules=["q_proj"])) if adapted else bare
    found: list[tuple[int, ...]] = []
    defaults: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 50.0},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(200))},
        {"guidance_scale": 9.0},
    ]
    for settings in defaults:
        model.generation_config, bare.generation_config = GenerationConfig(**settings), GenerationConfig(**settings)
        found.append(LanguageModel.from_transformers(model, tokenizer).generate(PROMPT, LONGER).response_ids)
    assert set(found) == {found[0]}
    assert len(found[0]) > 20


@pytest.mark.parametrize("name", [None, "forward of the whole", "forward of an mlp", "a hook"])
def test_a_scored_model_can_be_collected_patched_or_not(name: str | None) -> None:
    model = build("llama")
    score(model)
    if name is not None:
        NOTICED[name](model)
        score(model)
    gone = weakref.ref(model)
    del model
    scorer_of(build("llama", num_hidden_layers=3))
    gc.collect()
    assert gone() is None


def test_a_patched_model_keeps_its_scorer_while_it_is_in_use() -> None:
    model = build("llama")
    NOTICED["forward of the whole"](model)
    score(model)
    assert scorer_of(model) is scorer_of(model)


def test_a_compiled_layer_is_refused() -> None:
    model = build("llama")
    model.model.layers[3] = torch.compile(model.model.layers[3], backend="eager")
    for compiled in (model, torch.compile(build("llama"), backend="eager")):
        with pytest.raises(UnsupportedModelError, match=r"as it was before torch\.compile"):
            score(compiled)


def test_a_switch_that_rules_scores_out_is_refused_and_its_return_is_scored() -> None:
    model = build("llama")
    before, head = score(model), model.lm_head
    model.lm_head = nn.Sequential(head)
    with unchanged(model), pytest.raises(UnsupportedModelError, match="head"):
        score(model)
    model.lm_head = head
    assert score(model) == before

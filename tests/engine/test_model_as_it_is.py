"""The model is scored, and answers, as it is at the call: whatever its owner has switched since the last one."""

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
from semgrad_guard.engine.replay.memory import Memory
from semgrad_guard.engine.scoring import scorer as scorer_module
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.engine.scores.scorer import Scorer, scorer_of
from semgrad_guard.engine.scores.exactness import self_check
from semgrad_guard.errors import UnsupportedModelError

from .cases import CASES, Case
from .snapshots import unchanged
from .switches import PREPARED, REFUSED, SWITCHES, Switch, plain_scores
from .tiny_models import build

BRIEF = GenerationOptions(max_tokens=6)
SAMPLED = GenerationOptions(max_tokens=6, temperature=20.0, seed=0)  # tokens that differ
LONGER = GenerationOptions(max_tokens=30, temperature=2.0, seed=5)
PROMPT = "What is tea?"
CASE = CASES[0]


def score(model: Any) -> GradientScores:
    return gradient_scores(model, CASE.prompt, CASE.response, semantic_token=CASE.semantic_token)


def prepared(name: str, model: Any) -> Switch:
    return SWITCHES[name] if name in SWITCHES else PREPARED[name](model)


def check(found: GradientScores, model: Any, case: Case = CASE) -> None:
    expected = plain_scores(model, case)
    assert (found.semgrad, found.paragrad) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.heavy if number % 3 == 0 else ())
        for number, name in enumerate((*SWITCHES, *PREPARED))
    ],
)
def test_a_switch_is_seen_at_the_next_score(name: str) -> None:
    """In training mode, with dropout: the user's own modules would answer at random.

    Every third switch in `make check-heavy`: the test of answers below takes it.
    """
    model = build("llama", attention_dropout=0.5).train()
    switch = prepared(name, model)
    before = score(model)
    switch(model)
    with unchanged(model):
        after = score(model)
    check(after, model)
    assert after.semgrad != pytest.approx(before.semgrad, rel=1e-6) or "attention" in name
    with unchanged(model):
        assert score(model) == after


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_runs_the_users_modules_is_refused_and_its_end_is_scored(name: str) -> None:
    model = build("llama", attention_dropout=0.5).train()
    before, mlps, switch = score(model), [layer.mlp for layer in model.model.layers], REFUSED[name]
    switch[0](model)
    with unchanged(model), pytest.raises(UnsupportedModelError, match=switch[1]):
        score(model)
    for module in (model, model.model.layers[3], *mlps):
        vars(module).pop("forward", None)
        module._forward_hooks.clear()
    assert score(model) == before


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *(
            pytest.param(name, Memory(prompts=1 << 24), marks=() if number % 3 == 0 else pytest.mark.heavy)
            for number, name in enumerate((*SWITCHES, *PREPARED))
        ),
        *((name, Memory()) for name in ("activation", "weights in place", "a hook", "a hook's closure")),
    ],
)
def test_a_switch_is_seen_by_the_next_answer_and_by_an_earlier_answers_score(
    name: str, memory: Memory, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Every third switch, and in `make check-heavy` the others, which the test above takes."""
    model = build("llama", vocab_size=258, eos_token_id=None)
    switch = prepared(name, model)
    language_model = LanguageModel.from_transformers(model, tokenizer)
    language_model.memory = memory
    early, late = (language_model.generate(PROMPT, BRIEF) for _ in range(2))
    first = late.evidence.gradients()
    switch(model)
    for generation in (early, late, language_model.generate(PROMPT, BRIEF)):
        timed = generation.evidence.gradients()
        assert timed is not None
        case = Case(list(generation.prompt.ids), list(generation.response_ids), generation.prompt.semantic_token.offset)
        check(timed.scores, model, case)
    assert first is not None
    assert generation.reused_tokens == 0
    ids = torch.tensor([generation.prompt.ids])
    with torch.compiler.set_stance("force_eager"):
        own = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=257, pad_token_id=257)
    assert generation.response_ids == tuple(t for t in own[0, ids.shape[1] :].tolist() if t != 257)


class TestWhatLookingCosts:
    """A new copy, and a new self-check, only for a state of the model that is not known."""

    @pytest.fixture
    def checks(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        made: list[int] = []
        monkeypatch.setattr(scorer_module, "self_check", lambda *given: (made.append(1), self_check(*given))[1])
        return made

    def test_nothing_for_modes_flags_and_edits(self, checks: list[int]) -> None:
        model = build("llama")
        score(model)
        copy = scorer_of(model).current_replayer()
        for change in (
            lambda: model.train(),
            lambda: model.requires_grad_(False),
            lambda: model.eval(),
            lambda: model(input_ids=torch.tensor([CASE.prompt]), output_hidden_states=True),
            lambda: model.model.norm.weight.data.add_(0.1),
            lambda: setattr(model.model.norm, "variance_epsilon", float(str(model.model.norm.variance_epsilon))),
        ):
            change()
            check(score(model), model)
            assert scorer_of(model).current_replayer() is copy
        assert len(checks) == 1

    def test_one_check_for_each_of_two_states_that_take_turns(self, checks: list[int]) -> None:
        model = build("llama")
        for _ in range(3):
            for factor in (0.5, 1.0):
                model.model.layers[3].self_attn.scaling = factor
                check(score(model), model)
        assert len(checks) == 2

    def test_a_state_is_forgotten_with_the_weights_it_had(self) -> None:
        model = build("llama")
        score(model)
        gone = weakref.ref(model.model.layers[3].mlp.up_proj.weight)
        model.model.layers[3].mlp.up_proj = nn.Linear(32, 48, bias=False).double()
        check(score(model), model)
        gc.collect()
        assert gone() is None

    def test_what_a_hook_notes_in_our_own_passes_is_no_change(self, checks: list[int]) -> None:
        model, seen = build("llama"), []
        model.model.layers[2].register_forward_hook(lambda _, __, output: seen.append(output.detach().mean()))
        assert len({score(model) for _ in range(3)}) == 1
        assert seen
        assert len(checks) == 1

    def test_the_model_is_looked_at_once_in_a_score(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, looks = build("llama"), []
        score(model)
        original = Scorer._look
        monkeypatch.setattr(Scorer, "_look", lambda self: (looks.append(1), original(self))[1])
        score(model)
        assert len(looks) == 1

    def test_the_model_is_not_looked_at_in_each_step_of_an_answer(
        self, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        guard, looks = Guard(language_model, Policy(threshold=1.0), options=BRIEF), []
        guard(PROMPT)
        original = Scorer._look
        monkeypatch.setattr(Scorer, "_look", lambda self: (looks.append(1), original(self))[1])
        guard(PROMPT)
        guard.batch([PROMPT, PROMPT])
        assert len(looks) <= 10, "where they join and leave, and not at each step"

    def test_the_model_is_not_looked_at_in_each_step_of_a_stream(
        self, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        language_model.generate(PROMPT, BRIEF)
        looks: list[int] = []
        original = Scorer._look
        monkeypatch.setattr(Scorer, "_look", lambda self: (looks.append(1), original(self))[1])
        assert "".join(stream := language_model.stream(PROMPT, BRIEF)) == stream.generation.text
        assert len(looks) <= 5


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_end_tokens_are_those_of_the_next_call(tokenizer: PreTrainedTokenizerFast, streamed: bool) -> None:
    """Set, added to, and put back in the model's generation config."""
    model = LanguageModel.from_transformers(build("llama", vocab_size=258), tokenizer)
    own, found = model._model.generation_config.eos_token_id, []
    whole = model.generate(PROMPT, SAMPLED).response_ids
    cut = next(place for place in range(1, len(whole)) if whole[place] not in whole[:place])
    for end in (whole[cut], [whole[0], whole[cut]], own):
        model._model.generation_config.eos_token_id = end
        found.append(model.stream(PROMPT, SAMPLED).generation if streamed else model.generate(PROMPT, SAMPLED))
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


@pytest.mark.parametrize("name", ["forward of the whole", "forward of an mlp", "a compiled forward", "a hook"])
def test_a_patched_model_can_be_collected(name: str) -> None:
    model = build("llama")
    score(model)
    SWITCHES[name](model)
    score(model)
    gone = weakref.ref(model)
    del model
    scorer_of(build("llama", num_hidden_layers=3))
    gc.collect()
    assert gone() is None


def test_a_patched_model_keeps_its_scorer_while_it_is_in_use() -> None:
    model = build("llama")
    SWITCHES["forward of the whole"](model)
    score(model)
    assert scorer_of(model) is scorer_of(model)


def test_hooks_on_a_compiled_layer_are_those_of_the_layer() -> None:
    """Hidden states are what layers receive; the model's own record of them leaves the wrapper's hooks out."""
    found = []
    for wrap in (lambda layer: layer, lambda layer: torch.compile(layer, backend="eager")):
        model = build("llama")
        model.model.layers[3] = wrap(model.model.layers[3])
        model.model.layers[3].register_forward_pre_hook(lambda _, args: (args[0] * 0.9, *args[1:]))
        model.model.layers[3].register_forward_hook(lambda _, __, output: output * 1.2)
        found.append(score(model))
    assert found[0].semgrad == found[1].semgrad
    assert found[0].paragrad == found[1].paragrad


def test_a_switch_that_rules_scores_out_is_refused_and_its_return_is_scored() -> None:
    model = build("llama")
    before, head = score(model), model.lm_head
    model.lm_head = nn.Sequential(head)
    with unchanged(model), pytest.raises(UnsupportedModelError, match="head"):
        score(model)
    model.lm_head = head
    assert score(model) == before

"""The user's model is scored as it is, and stays as it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.engine.interruption import Stop, stopping
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores import scorer as scorer_module
from semgrad_guard.engine.scores.exactness import checked, scores_by
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.gradients import GradientScores, replayed
from semgrad_guard.engine.scores.scorer import Scorer, clean_slate, scorer_of
from semgrad_guard.engine.scores.tape import Memory, growing_cache, read
from semgrad_guard.errors import DeadlineExceededError, EmptyLayerSpanError, InputError, UnsupportedModelError
from tests.leaks import smallest_growth, tensors_alive
from tests.pairwise import in_turn

from .cases import CASES, Case, taped
from .oracle import worst_relative_error
from .snapshots import unchanged
from .switches import INERT, NOTICED, REFUSED, TOLD, plain_scores, scaled
from .tiny_models import LONG_ROPE, build, token_ids

CASE = CASES[0]


def score(model: Any) -> GradientScores:
    return gradient_scores(model, CASE.prompt, CASE.response, semantic_token=CASE.semantic_token)


def in_training(model: Any) -> None:
    """A model in the middle of a user's training: gradients wanted and present, dropout on, hooks everywhere."""
    model.train().requires_grad_(True)
    model(input_ids=torch.tensor([CASE.prompt]), labels=torch.tensor([CASE.prompt])).loss.backward()
    for layer in model.get_submodule(scorer_of(model).architecture.layers):
        layer.register_forward_hook(lambda *_: None)
        layer.register_full_backward_hook(lambda *_: None)


def from_a_folder(model: Any, folder: Path, **options: Any) -> Any:
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


HABITS: dict[str, Callable[[Any, Path], Any]] = {
    "as built": lambda model, _: model,
    "in training": lambda model, _: in_training(model) or model,
    "frozen": lambda model, _: model.requires_grad_(False),
    "from a folder": from_a_folder,
    "from a folder, spread by accelerate": lambda model, folder: from_a_folder(model, folder, device_map="cpu"),
    "from a folder, in bfloat16 and eager": lambda model, folder: from_a_folder(
        model, folder, dtype=torch.bfloat16, attn_implementation="eager"
    ),
    "patched": lambda model, _: scaled(1.2)(model.get_submodule(scorer_of(model).architecture.layers)[1]) or model,
    "with layers compiled": lambda model, _: model.compile(backend="eager") or model,
    "with settings of its own": lambda model, _: (
        model.generation_config.update(temperature=0.3, do_sample=True) or model
    ),
    "with hidden states asked for": lambda model, _: (
        model(torch.tensor([CASE.prompt]), output_hidden_states=True) and model
    ),
}


@pytest.mark.parametrize(
    ("name", "habit"),
    [
        *(("llama", habit) for habit in HABITS),
        ("gpt2", "in training"),
        ("qwen2-tied", "from a folder"),
        ("qwen3-moe", "frozen"),
        ("gemma2", "in training"),
        ("falcon-h1", "in training"),
        ("mamba", "as built"),
    ],
)
def test_answers_scores_and_failures_leave_the_model_as_it_was(
    name: str, habit: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = HABITS[habit](build(name, dtype=torch.float32, vocab_size=258), tmp_path)
    with unchanged(model):
        language_model = LanguageModel.from_transformers(model, tokenizer)
        for generation in language_model.generate_batch(["What is tea?", "Why?"], GenerationOptions(max_tokens=3)):
            generation.evidence.gradients()
            generation.evidence.gradients(Objective(norm="l2"))
        list(Guard(language_model, Policy(threshold=1e9), options=GenerationOptions(max_tokens=3)).stream("Why?"))
        language_model.score("Why?", "Because.")
        score(model)
    with unchanged(model), pytest.raises(InputError):
        gradient_scores(model, CASE.prompt, [10_000], semantic_token=-1)
    with unchanged(model), pytest.raises(EmptyLayerSpanError):
        gradient_scores(model, CASE.prompt, CASE.response, semantic_token=-1, layers=[])
    with unchanged(model), stopping(Stop(1e-9)), pytest.raises(DeadlineExceededError):
        score(model)
    with no_room(model), unchanged(model):
        assert score(model).semgrad is None


@contextmanager
def no_room(model: Any) -> Iterator[None]:
    """The head asks the allocator for more than there is, where a gradient is recorded."""

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].requires_grad:
            torch.empty(1 << 52)

    last = [module for path, module in model.named_modules() if "norm" in path or "ln_f" in path][-1]
    handle = last.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_the_copy_shares_every_weight_and_wants_no_gradient() -> None:
    """Else each backward pass would also run through the weights that the user is training."""
    model = build("qwen2-tied").requires_grad_(True)
    ours = scorer_of(model).twin.model
    pairs = zip(ours.parameters(), model.parameters(), strict=True)
    assert all(one.data_ptr() == other.data_ptr() and not one.requires_grad for one, other in pairs)
    assert not any(module.training for module in ours.modules())


@pytest.mark.parametrize("rows", [1, 3])
def test_the_head_never_sees_the_strides_of_a_slice(rows: int) -> None:
    """On a CPU, `linear` over a sliced 3-D input would copy the whole head at each generation's first token."""
    model, seen = build("llama"), []
    twin = scorer_of(model).twin
    handle = twin.head.register_forward_hook(lambda _, args, __: seen.append(args[0].stride()))
    prompt = torch.tensor([CASE.prompt] * rows)
    with torch.no_grad():
        twin.step(prompt, torch.ones_like(prompt), growing_cache())
    handle.remove()
    assert seen == [(32, 32, 1)]


def test_frequencies_that_a_model_rewrites_in_place_are_not_shared() -> None:
    """Long rope writes into a buffer on each forward pass: another thread's generation must not see ours."""
    model = build("phi3", **LONG_ROPE)
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids(24, 1)]))  # the user's buffers now hold the long factors
    with unchanged(model):
        score(model)


class BrokenLayerError(Exception):
    """Raised by a decoder layer in the middle of a replay."""


@contextmanager
def breaking(model: Any, layer: int) -> Iterator[None]:
    """The class of the layers raises in layer `layer`: no hook, no instance attribute."""
    layers = model.get_submodule(scorer_of(model).architecture.layers)
    kind, original = type(layers[layer]), type(layers[layer]).forward
    attention = layers[layer].self_attn.layer_idx

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.self_attn.layer_idx == attention:
            raise BrokenLayerError
        return original(self, *args, **kwargs)

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = original


@pytest.mark.parametrize("way", ["read", "replay", "continued"])
def test_an_error_inside_any_way_leaves_no_hook_on_the_twin(way: str) -> None:
    model, objective = build("llama"), Objective()
    scorer = scorer_of(model)
    expected, known = score(model), scorer.exactness()
    row, twin, memory = CASE.row(objective), scorer.twin, Memory()
    [recorded] = taped(scorer, [row], 3)
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: read(twin, [row], 3, memory=memory),
        "replay": lambda: replayed(twin, [recorded], objective, transform=known.transform, memory=memory),
        "continued": lambda: scores_by("continued", twin, [row], objective, known=known, memory=memory),
    }
    with unchanged(twin.model), breaking(model, 4), clean_slate(), pytest.raises(BrokenLayerError):
        ways[way]()
    assert score(model) == expected


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.float16),
    "default device": lambda: torch.device("meta"),
    "anomaly": torch.autograd.detect_anomaly,
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@in_turn(name=["llama", "opt", "gemma3", "falcon-h1"], caller=CALLERS)
def test_the_callers_mode_is_kept_and_changes_no_score(name: str, caller: str) -> None:
    model = build(name)
    expected = CASE.reference(model, Objective())
    with CALLERS[caller](), unchanged(model):
        first, second = score(model), score(model)
    assert first == second
    assert worst_relative_error(first, expected) < 1e-7
    assert worst_relative_error(score(model), expected) < 1e-7


def test_no_graph_or_state_outlives_a_score() -> None:
    model, counts = build("llama", dtype=torch.float32), list[int]()
    for _ in range(4):
        score(model)
        counts.append(tensors_alive())
    assert smallest_growth(counts) <= 0, counts


BRIEF = GenerationOptions(max_tokens=6)
SAMPLED = GenerationOptions(max_tokens=6, temperature=20.0, seed=0)  # tokens that differ
LONGER = GenerationOptions(max_tokens=30, temperature=2.0, seed=5)
PROMPT = "What is tea?"
CASE = CASES[0]


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

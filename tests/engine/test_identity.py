"""A calibration is bound to the model as it was: what is switched since then makes it another one."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.calibration import calibrate
from semgrad_guard.engine.replay import own_code
from semgrad_guard.engine.replay.conduct import weight_fingerprint
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard import Answerer
from semgrad_guard.records import OWN_CODE
from tests.warm_python import WarmPython

from .snapshots import unchanged
from .switches import PREPARED, SWITCHES, Switch, runs_own_code, scaled
from .test_adapters import TUNED, adapted, needs_later_peft, peft, varied
from .tiny_models import build

SAME_NUMBERS = {"another kind of attention"}  # whose kernels agree up to rounding
BRIEF = GenerationOptions(max_tokens=4)


def fingerprint(model: Any) -> str:
    with unchanged(model):
        return scorer_of(model).fingerprint


def switched(name: str) -> tuple[str, str, str]:
    """Fingerprints before and after a switch, and the weights' own before it."""
    model = build("llama")
    switch: Switch = SWITCHES[name] if name in SWITCHES else PREPARED[name](model)
    plain, before = weight_fingerprint(model), fingerprint(model)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # one of them makes a layer at random
        switch(model)
    return before, fingerprint(model), plain


@pytest.mark.parametrize("name", [*SWITCHES, *PREPARED])
def test_every_switch_makes_another_model_and_the_same_switch_the_same(name: str) -> None:
    """Where its code can be compared; else no two are the same, and only the part before the mark agrees."""
    before, after, plain = switched(name)
    assert (before == plain) == (name not in PREPARED or "hook" not in name)
    assert (after == before) == (name in SAME_NUMBERS)
    assert (OWN_CODE in after) == runs_own_code(name)
    for one, other in zip((before, after), switched(name)[:2], strict=True):
        assert (one == other) == (OWN_CODE not in one)
        assert one.partition(OWN_CODE)[:2] == other.partition(OWN_CODE)[:2]


def test_what_changes_no_number_changes_no_identity() -> None:
    model = build("llama")
    plain = fingerprint(model)
    for change in (
        lambda: model.train(),
        lambda: model.eval(),
        lambda: model.requires_grad_(False),
        lambda: model.gradient_checkpointing_enable(),
        lambda: model.enable_input_require_grads(),
        lambda: setattr(model, "forward", model.forward),
        lambda: setattr(model.config, "use_cache", False),
        lambda: setattr(model.config, "pad_token_id", 3),
        lambda: model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True),
        lambda: model.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=2, pad_token_id=0),
        lambda: model.compile(backend="eager"),  # the last one: what runs after it is traced first, which takes seconds
    ):
        change()
        assert fingerprint(model) == plain == weight_fingerprint(model)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_are_no_change(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
    factors = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4} if rope_type == "longrope" else {}
    model = build("llama", rope_parameters={**rope, **factors}, max_position_embeddings=8)
    plain = fingerprint(model)
    model(input_ids=torch.arange(20)[None])
    assert fingerprint(model) == plain == weight_fingerprint(model)


def test_few_numbers_of_a_large_matrix() -> None:
    model = build("llama", vocab_size=4099)
    plain = fingerprint(model)
    with torch.no_grad():
        model.lm_head.weight[17, 5] += 0.5
    assert weight_fingerprint(model) == plain != fingerprint(model)


def test_a_patch_and_a_hook_that_are_taken_back() -> None:
    model = build("llama")
    plain = fingerprint(model)
    handle = model.model.layers[1].register_forward_hook(lambda _, __, output: output * 1.1)
    scaled(1.4)(model.model.norm)
    seen = {fingerprint(model) for _ in range(3)}
    assert len(seen) == 3
    assert all(OWN_CODE in found for found in seen)
    handle.remove()
    del model.model.norm.forward
    assert fingerprint(model) == plain


def test_it_is_read_once_in_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from semgrad_guard.engine.scoring import model_states

    model, read = build("llama"), []
    original = model_states.fingerprint_of
    monkeypatch.setattr(
        model_states, "fingerprint_of", lambda given, **how: (read.append(1), original(given, **how))[1]
    )
    for factor in (1.0, 0.5, 1.0, 0.5):
        model.model.layers[3].self_attn.scaling = factor
        assert fingerprint(model) == fingerprint(model)
    assert len(read) == 2


def test_every_switch_of_an_adapter() -> None:
    model = adapted()
    seen = {"on": fingerprint(model)}
    assert seen["on"] == weight_fingerprint(model)
    with model.disable_adapter():
        seen["off"] = fingerprint(model)
    assert fingerprint(model) == seen["on"]
    layers = model.base_model.model.model.layers
    for layer in layers:
        layer.self_attn.q_proj.scaling["default"] *= 2
    seen["scaled"] = fingerprint(model)
    for layer in layers:
        layer.self_attn.q_proj.scaling["default"] /= 2
    assert fingerprint(model) == seen["on"]
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"]))
    varied(model)
    seen["two"] = fingerprint(model)
    model.set_adapter("other")
    seen["other"] = fingerprint(model)
    model.set_adapter("default")
    assert fingerprint(model) == seen["two"]
    model.merge_adapter()
    seen["merged"] = fingerprint(model)
    seen["unloaded"] = fingerprint(model.merge_and_unload())
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("state", ["off", "other", "scaled"])
def test_an_adapter_is_what_it_is_whenever_the_model_is_met(state: str) -> None:
    def changed(model: Any) -> Any:
        if state == "off":
            model.base_model.disable_adapter_layers()
        elif state == "other":
            model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"]))
            varied(model).set_adapter("other")
        else:
            model.base_model.model.model.layers[2].self_attn.q_proj.scaling["default"] = 0.25
        return model

    met_before, met_after = adapted(), changed(adapted())
    fingerprint(met_before)
    assert fingerprint(changed(met_before)) == fingerprint(met_after) != fingerprint(adapted())


@needs_later_peft
@pytest.mark.parametrize("kind", TUNED)
def test_tuned_prompts(kind: str) -> None:
    model = varied(peft.get_peft_model(build("llama"), TUNED[kind](), autocast_adapter_dtype=False))
    tuned = fingerprint(model)
    with model.disable_adapter():
        assert fingerprint(model) != tuned
    assert fingerprint(model) == tuned


ELSEWHERE = """
from tests.engine.switches import SWITCHES
from tests.engine.tiny_models import build
from semgrad_guard.engine.scores.scorer import scorer_of
model = build("llama")
scorer_of(model)
SWITCHES["activation by a function"](model)
print(scorer_of(model).fingerprint)
SWITCHES["forward by an object"](model)
print(scorer_of(model).fingerprint)
"""


def test_it_is_the_same_in_another_process(warm_python: WarmPython) -> None:
    found = warm_python.run(["-c", ELSEWHERE]).stdout
    plain, marked = found.split()
    assert plain == switched("activation by a function")[1] == marked.partition(OWN_CODE)[0]
    assert OWN_CODE in marked


def test_a_calibration_is_refused_with_the_adapter_off(tokenizer: PreTrainedTokenizerFast) -> None:
    model = adapted(vocab_size=258, eos_token_id=None)
    language_model = LanguageModel.from_transformers(model, tokenizer, name="adapted")
    bound = Answerer(language_model, HybridGrad(), BRIEF).binding()
    calibration = calibrate([0.1] * 60, [True] * 60, alpha=0.2, delta=0.2, grid=[1.0], binding=bound)
    guard = Guard(language_model, Policy.from_calibration(calibration), options=BRIEF)
    assert guard("What is tea?").fingerprint == bound.fingerprint
    with model.disable_adapter(), pytest.raises(BindingMismatchError, match=r"fingerprint .* switched, patched"):
        guard("What is tea?")
    assert guard("What is tea?").fingerprint == bound.fingerprint


SETTINGS, FACTOR = {"factor": 1.0}, 1.0


class ByGlobal(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * SETTINGS["factor"]


class ByHelper(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * current_factor()


class ByConstants(LlamaMLP):
    factors: ClassVar[list[float]] = [1.0]

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.factors[0] * FACTOR


def current_factor() -> float:
    return SETTINGS["factor"]


def by_closure() -> type:
    state = {"factor": 1.0}

    class ByClosure(LlamaMLP):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * state["factor"]

    return ByClosure


@pytest.mark.parametrize("kind", [ByGlobal, ByHelper, by_closure()])
def test_a_class_that_reads_a_variable_is_never_the_same(kind: type) -> None:
    model = build("llama")
    model.model.layers[3].mlp.__class__ = kind
    first = fingerprint(model)
    assert OWN_CODE in first
    assert fingerprint(model) != first


@pytest.mark.parametrize("change", ["constant", "attribute", None])
def test_a_class_that_reads_constants_is_compared(change: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    model.model.layers[3].mlp.__class__ = ByConstants
    first, epoch = fingerprint(model), scorer_of(model).epoch
    if change == "constant":
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    elif change == "attribute":
        ByConstants.factors[0] = 2.0
    assert (scorer_of(model).epoch is epoch) == (change is None)
    assert first == weight_fingerprint(model)
    assert (fingerprint(model) == first) == (change is None)
    ByConstants.factors[0] = 1.0


def test_a_library_is_one_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout, or in a folder that `pip install --target` filled, as in site-packages."""
    for module in (transformers.models.llama.modeling_llama, transformers.modeling_rope_utils, torch.nn.functional):
        monkeypatch.setattr(module, "__file__", f"/home/user/checkout/{module.__name__}.py")
    own_code._is_of_program.cache_clear()
    try:
        assert OWN_CODE not in fingerprint(build("llama"))
    finally:
        own_code._is_of_program.cache_clear()


def test_a_calibration_on_a_model_with_a_hook_promises_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    """Whatever its vector holds by then; and it is for no model without a hook, nor the other way round."""
    model, vector = build("llama", vocab_size=258, eos_token_id=None), torch.zeros(32, dtype=torch.float64)
    language_model = LanguageModel.from_transformers(model, tokenizer, name="steered")
    plain = bound_policy(language_model)
    handle = model.model.layers[2].register_forward_hook(lambda _, __, output: output + vector)
    steered = bound_policy(language_model)
    seen = []
    for strength in (0.0, 3.0):
        vector.fill_(strength)
        seen.append(Guard(language_model, steered, options=BRIEF)("What is tea?"))
    assert [verdict.promised for verdict in seen] == [False, False]
    assert all("code that cannot be compared" in verdict.unfamiliar[-1] for verdict in seen)
    assert seen[0].uncertainty != seen[1].uncertainty
    with pytest.raises(BindingMismatchError, match="fingerprint"):
        Guard(language_model, plain, options=BRIEF)("What is tea?")
    handle.remove()
    with pytest.raises(BindingMismatchError, match="fingerprint"):
        Guard(language_model, steered, options=BRIEF)("What is tea?")
    assert "code" not in str(Guard(language_model, plain, options=BRIEF)("What is tea?").unfamiliar)


def bound_policy(model: LanguageModel) -> Policy:
    bound = Answerer(model, HybridGrad(), BRIEF).binding()
    calibration = calibrate([0.1] * 60, [True] * 60, alpha=0.2, delta=0.2, grid=[1.0], binding=bound)
    return Policy.from_calibration(calibration)

"""A calibration is bound to the model as it was: what is switched since then makes it another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.calibration import calibrate
from semgrad_guard.engine.scores.architecture import Identity, weight_fingerprint
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard import Answerer
from semgrad_guard.records import OWN_CODE
from tests.warm_python import WarmPython

from .switches import INERT, NOTICED, TOLD
from .test_adapters import adapted, fingerprint, peft, varied
from .tiny_models import build

BRIEF = GenerationOptions(max_tokens=4)
SILENT = {
    *("activation", "activation by a function", "another class", "layers exchanged", "weights through .data"),
    *("forward of an mlp", "forward of a lower layer", "forward of the embedding", "forward of the head"),
    *("forward of the whole", "scaling", "norm's epsilon", "frequencies in place", "frequencies replaced"),
}
"""Whose part in the fingerprint is none, or that of a sample: code and settings are no weights."""


def switched(name: str) -> tuple[str, str]:
    """Fingerprints before and after a switch."""
    model = build("llama")
    before = fingerprint(model)
    assert before == weight_fingerprint(model)
    {**NOTICED, **TOLD}[name](model)
    scorer_of(model).refresh()
    return before, fingerprint(model)


@pytest.mark.parametrize("name", sorted((NOTICED.keys() | TOLD.keys()) - SILENT))
def test_a_switch_makes_another_model_and_the_same_switch_the_same(name: str) -> None:
    before, after = switched(name)
    assert before != after
    again = switched(name)
    assert again[0] == before
    assert again[1].partition(OWN_CODE)[0] == after.partition(OWN_CODE)[0]
    assert (again[1] == after) == (OWN_CODE not in after), "no two marks of a hook are the same"


@pytest.mark.parametrize("name", INERT)
def test_what_changes_no_number_changes_no_identity(name: str) -> None:
    model = build("llama")
    plain = fingerprint(model)
    INERT[name](model)
    scorer_of(model).refresh()
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


def test_it_is_read_once_in_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = build("llama"), list[int]()
    original = Identity.fingerprint
    monkeypatch.setattr(Identity, "fingerprint", lambda *given: (read.append(1), original(*given))[1])
    norm = model.model.norm
    own, other = norm.weight, torch.nn.Parameter(norm.weight * 0.5)
    for norm.weight in (own, other):
        assert fingerprint(model) == fingerprint(model)
    assert len(read) == 2


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


ELSEWHERE = """
from tests.engine.switches import NOTICED
from tests.engine.tiny_models import build
from semgrad_guard.engine.scores.scorer import scorer_of
model = build("llama")
scorer_of(model)
NOTICED["weights in place"](model)
print(scorer_of(model).fingerprint)
"""


def test_it_is_the_same_in_another_process(warm_python: WarmPython) -> None:
    assert warm_python.run(["-c", ELSEWHERE]).stdout.split() == [switched("weights in place")[1]]


def bound_policy(model: LanguageModel) -> Policy:
    bound = Answerer(model, HybridGrad(), BRIEF).binding()
    return Policy.from_calibration(calibrate([0.1] * 60, [True] * 60, alpha=0.2, delta=0.2, binding=bound))


def test_a_calibration_is_refused_with_the_adapter_off(tokenizer: PreTrainedTokenizerFast) -> None:
    model = adapted(vocab_size=258, eos_token_id=None)
    language_model = LanguageModel.from_transformers(model, tokenizer, name="adapted")
    guard = Guard(language_model, bound_policy(language_model), options=BRIEF)
    bound = guard("What is tea?").details.fingerprint
    with model.disable_adapter(), pytest.raises(BindingMismatchError, match="fingerprint"):
        guard("What is tea?")
    assert guard("What is tea?").details.fingerprint == bound


def test_a_calibration_is_refused_with_a_hook_and_without_it(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build("llama", vocab_size=258, eos_token_id=None)
    language_model = LanguageModel.from_transformers(model, tokenizer, name="steered")
    plain = bound_policy(language_model)
    handle = model.model.layers[2].register_forward_hook(lambda _, __, output: output + 1)
    steered = bound_policy(language_model)
    with pytest.raises(BindingMismatchError, match="fingerprint"):
        Guard(language_model, plain, options=BRIEF)("What is tea?")
    handle.remove()
    with pytest.raises(BindingMismatchError, match="fingerprint"):
        Guard(language_model, steered, options=BRIEF)("What is tea?")

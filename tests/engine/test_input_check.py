"""Models that compute something else for some inputs: the self-check's short tokens show nothing, real scores do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.engine.scores.scorer import scorer_of
from semgrad_guard.engine.scores.tape import FRUGAL
from semgrad_guard.estimators import Estimator, HybridGrad, MeanEntropy
from tests.random_llama import random_llama

from .cases import Case
from .cases import scored as scored_together
from .generated_models import build as generated
from .switches import plain_scores
from .tiny_models import build, token_ids

LONG = Case(token_ids(40, 1), token_ids(5, 2), -3)
SHORT = Case(token_ids(8, 3), token_ids(4, 4), -2)
LONGEST = Case(token_ids(90, 5), token_ids(5, 6), -3)
ROUNDED = 4e-3
SWITCH = 7
"""The token that turns a hook on."""


def scored(model: Any, case: Case, **options: Any) -> Any:
    return gradient_scores(model, case.prompt, case.response, semantic_token=case.semantic_token, **options)


def require_exact(model: Any, case: Case, *, rel: float = 1e-6) -> Any:
    found = scored(model, case)
    assert (found.semgrad, found.paragrad) == pytest.approx(plain_scores(model, case), rel=rel)
    return found


class ByLength(LlamaDecoderLayer):
    """Steers sequences of more than 20 positions, as code of its own and not by a hook."""

    beyond, by = 20, 1.5

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] > self.beyond:
            hidden_states = hidden_states * self.by
        return super().forward(hidden_states, *args, **kwargs)


class Rounding(LlamaDecoderLayer):
    """Computes long sequences in float32 a little off, as a kernel of another shape may: in float64 it is exact."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] > 20 and hidden_states.dtype == torch.float32:
            hidden_states = hidden_states * (1 + ROUNDED * torch.linspace(-1, 1, hidden_states.shape[-1]))
        return super().forward(hidden_states, *args, **kwargs)


class Stopping(LlamaDecoderLayer):
    """Lets no gradient through sequences of more than 20 positions: its numbers are the same."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(hidden_states, *args, **kwargs)
        return output if hidden_states.shape[1] <= 20 else (output + output.detach()) / 2


def with_layer(kind: type[LlamaDecoderLayer], place: int = 3, **attributes: Any) -> Any:
    model = build("llama")
    model.model.layers[place].__class__ = kind
    vars(model.model.layers[place]).update(attributes)
    return model


def steering_by_length(model: Any) -> Callable[..., Any]:
    return lambda _, __, output: output * 1.5 if output.shape[1] > 20 else output


def steering_by_token(model: Any) -> Callable[..., Any]:
    seen: list[bool] = [False]
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, given: seen.__setitem__(0, bool((given[0] == SWITCH).any()))
    )
    return lambda _, __, output: output * 1.5 if seen[0] else output


def stopping_by_length(model: Any) -> Callable[..., Any]:
    return lambda _, __, output: (output + output.detach()) / 2 if output.shape[1] > 20 else output


@pytest.mark.parametrize("hook", [steering_by_length, steering_by_token, stopping_by_length])
def test_a_hook_that_looks_at_its_input_is_exact(hook: Callable[..., Any]) -> None:
    model = build("llama")
    model.model.layers[1].register_forward_hook(hook(model))
    require_exact(model, SHORT)
    require_exact(model, replace(LONG, prompt=[SWITCH, *LONG.prompt[1:]]))


@pytest.mark.parametrize("kind", [ByLength, Stopping])
def test_code_that_branches_on_the_length_is_noticed(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    model = with_layer(kind)
    assert require_exact(model, SHORT).tier == "replay"
    with caplog.at_level(logging.WARNING):
        assert require_exact(model, LONG).tier == "ordinary"
    assert "45 tokens" in caplog.text
    assert require_exact(model, SHORT).tier == "ordinary", "what was inexact once is not used again"


def test_a_longer_input_is_verified_again() -> None:
    model = with_layer(ByLength, beyond=60)
    assert require_exact(model, LONG).tier == "replay"
    assert require_exact(model, LONGEST).tier == "ordinary"


@pytest.mark.parametrize("place", [0, 3], ids=["below", "above"])
def test_the_longest_and_the_shortest_row_of_a_batch_are_verified(place: int) -> None:
    """A short text that is read with a long one is padded to its length, and a branch below the replay sees that."""
    cases = (SHORT, LONG, SHORT)
    for case, scores in zip(cases, scored_together(model := with_layer(ByLength, place), cases), strict=True):
        assert (scores.semgrad, scores.paragrad) == pytest.approx(plain_scores(model, case), rel=1e-6)
    model = with_layer(ByLength, place)
    rows = [case.row(Objective()) for case in cases]
    for row, seen in zip(rows, scorer_of(model).observe(rows), strict=True):
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([row.ids])).logits[0, row.begin - 1 : -1].log_softmax(-1)
        assert seen.log_probs == pytest.approx(log_p[range(row.length), list(row.targets)].tolist(), rel=1e-6)


def test_where_no_backward_pass_fits_the_forward_pass_is_compared() -> None:
    model = with_layer(ByLength)
    scorer_of(model).memory = FRUGAL
    assert require_exact(model, LONG).tier == "ordinary"


def test_half_precision_is_verified_in_float32() -> None:
    model = with_layer(ByLength, beyond=20).to(torch.bfloat16)
    assert scored(model, SHORT).tier == "replay"
    assert scored(model, LONG).tier == "ordinary"


@pytest.mark.parametrize(
    ("kind", "attributes", "tier"), [(Rounding, {}, "replay"), (ByLength, {"by": 1.003}, "ordinary")]
)
def test_rounding_in_float32_is_told_from_code_that_branches(
    kind: type[LlamaDecoderLayer], attributes: dict[str, Any], tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_layer(kind, **attributes).float()
    assert scored(model, SHORT).tier == "replay"
    assert scored(model, LONG).tier == tier
    assert ("steps down" in caplog.text) == (tier == "ordinary")


@pytest.mark.parametrize("estimator", [HybridGrad(), MeanEntropy()])
def test_states_that_a_generation_left_are_verified(estimator: Estimator, tokenizer: PreTrainedTokenizerFast) -> None:
    """While an answer is written, the branch sees one position at a time; in the ordinary call it sees all."""
    model: Any = random_llama(eos_token_id=None)
    model.model.layers[3].__class__ = ByLength
    language = LanguageModel.from_transformers(model, tokenizer, name="branching")
    generation = language.generate("a prompt of more than twenty tokens", GenerationOptions(max_tokens=6))
    found = estimator(generation.evidence).uncertainty
    prompt, ids = generation.prompt, list(generation.evidence.response_ids)
    case = Case(list(prompt.ids), ids, prompt.semantic_token.offset)
    expected = scored(model, case)
    assert (expected.semgrad, expected.paragrad) == pytest.approx(plain_scores(model, case), rel=1e-6)
    assert found == pytest.approx(expected.hybridgrad if estimator.name == "hybridgrad" else expected.mean_entropy)


def test_roberta_counts_positions_without_the_padding() -> None:
    model = generated("roberta")
    pad = model.config.pad_token_id
    require_exact(model, LONG, rel=1e-4)
    for place in (2, len(LONG.prompt) - 2):
        prompt = [*LONG.prompt[:place], pad, *LONG.prompt[place + 1 :]]
        require_exact(model, replace(LONG, prompt=prompt), rel=1e-4)


def test_doges_mask_depends_on_the_content_beyond_its_window() -> None:
    model: Any = generated("doge")
    config = model.config
    config.keep_window_size = 16
    for layer in model.model.layers:
        layer.self_attn.keep_window_size = 16
    require_exact(model, SHORT, rel=1e-4)
    require_exact(model, LONG, rel=1e-4)


@pytest.mark.parametrize("place", [5, -8, 38])
def test_an_activated_lora_is_exact_wherever_it_is_invoked(place: int) -> None:
    """Before t*, in the header from t* on (where a replay sees it), and from the prompt into the answer."""
    peft = pytest.importorskip("peft")
    case = replace(LONG, semantic_token=-9)
    ids = [*case.prompt, *case.response]
    settings = {"r": 4, "target_modules": ["q_proj", "k_proj"], "init_lora_weights": False}
    at = place if place > 0 else len(case.prompt) + place
    config = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=ids[at : at + 3], **settings)
    model = peft.get_peft_model(build("llama"), config, autocast_adapter_dtype=False).double().eval()
    require_exact(model, case)

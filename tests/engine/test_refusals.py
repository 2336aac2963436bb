"""What cannot be scored is refused with a typed error that names the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from semgrad_guard import LanguageModel
from semgrad_guard.engine.scores.gradient_scores import gradient_scores
from semgrad_guard.errors import (
    EmptyLayerSpanError,
    EmptyPromptError,
    EmptyResponseError,
    InputError,
    UnsupportedModelError,
)

from .architectures import expectation
from .cases import Case
from .generated_models import tiny_config
from .snapshots import unchanged
from .tiny_models import VOCABULARY, build, shared, spread_weights, token_ids

PROMPT, RESPONSE = token_ids(6, 1), token_ids(3, 2)


def score(model: Any, prompt: Any = PROMPT, response: Any = RESPONSE, semantic_token: Any = -1, **options: Any) -> Any:
    return gradient_scores(model, prompt, response, semantic_token=semantic_token, **options)


SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 4, "num_heads": 4},
    "bart": {
        "vocab_size": 50,
        "d_model": 16,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    },
}


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_encoder_decoder_models(kind: str) -> None:
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **SEQ2SEQ[kind]))
    with pytest.raises(UnsupportedModelError, match=r"encoder-decoder.*decoder-only"):
        score(model)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "big_bird", "roformer"])
def test_encoders_that_are_not_configured_as_decoders(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = built(kind, is_decoder=False)
    with pytest.raises(UnsupportedModelError, match=r"both directions .*is_decoder to true"):
        score(model)
    with pytest.raises(UnsupportedModelError, match="both directions"):
        LanguageModel.from_transformers(model, tokenizer)
    assert score(built(kind, is_decoder=True)).semgrad is not None


def test_a_model_that_has_yet_to_divide_its_weights() -> None:
    """RWKV does it in its first pass in evaluation mode; in ours it would be done to weights that are the user's."""
    model = built("rwkv", num_hidden_layers=4, rescale_every=2)
    with unchanged(model), pytest.raises(UnsupportedModelError, match="divides its weights in its first pass"):
        score(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPT]))
    case = Case(PROMPT, RESPONSE, -2)
    with unchanged(model):
        found = score(model, semantic_token=-2)
    expected = expectation(model, case)
    assert (found.semgrad, found.paragrad) == pytest.approx((expected.semgrad, expected.paragrad), rel=1e-4)


def built(kind: str, **changes: Any) -> Any:
    config = tiny_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        spread_weights(model)
    return model


def test_something_that_is_no_language_model() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear is not a Hugging Face causal language model"):
        score(nn.Linear(2, 2))


def test_a_model_without_a_head() -> None:
    config = AutoConfig.for_model("llama", vocab_size=50, hidden_size=64, intermediate_size=16, num_hidden_layers=3)
    with pytest.raises(UnsupportedModelError, match=r"no plain linear output head.*causal LM itself"):
        score(AutoModel.from_config(config))


def test_a_head_that_is_not_linear() -> None:
    model = build("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UnsupportedModelError, match=r"found Sequential"):
        score(model)


def test_layers_that_keep_packed_numbers() -> None:
    """As compressed-tensors leaves them."""
    model: Any = build("llama")
    del model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(UnsupportedModelError, match="run_compressed=False"):
        score(model)


def test_layers_dispatched_by_accelerate() -> None:
    model = build("llama")
    model.model.layers[0]._hf_hook = object()  # what accelerate leaves on a module that it moves about
    with pytest.raises(UnsupportedModelError, match=r"accelerate.*device_map"):
        score(model)


def test_weights_created_under_inference_mode() -> None:
    with torch.inference_mode():
        model = build("llama")
    with pytest.raises(UnsupportedModelError, match="inference_mode"):
        score(model)


@pytest.mark.parametrize(
    ("layers", "variant"), [(1, "paper"), (2, "paper"), (1, "official")], ids=lambda value: str(value)
)
def test_spans_that_are_empty(layers: int, variant: Any) -> None:
    model = build("llama", num_hidden_layers=layers)
    with pytest.raises(EmptyLayerSpanError, match=rf"{layers} decoder layer"):
        score(model, variant=variant)
    assert score(model, variant=variant, layers=[0]).semgrad > 0


BAD_INPUT: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "empty prompt": ({"prompt": []}, EmptyPromptError, "prompt"),
    "empty prompt in a batch": ({"prompt": [[5], []], "response": [[5], [5]]}, EmptyPromptError, "prompt"),
    "empty response": ({"response": []}, EmptyResponseError, "response"),
    "empty response in a batch": ({"prompt": [[5], [5]], "response": [[5], []]}, EmptyResponseError, "response"),
    "more prompts than responses": ({"prompt": [[5], [6]], "response": [[5]]}, InputError, "do not match"),
    "more t* than prompts": ({"semantic_token": [-1, -1]}, InputError, "do not match"),
    "a flat response to a batch": ({"prompt": [[5], [6]], "response": [5, 6]}, InputError, "list"),
    "a nested response to one prompt": ({"response": [[5]]}, InputError, "ints"),
    "t* beyond the prompt": ({"semantic_token": -7}, InputError, "-6"),
    "t* counted from the front": ({"semantic_token": 0}, InputError, "-1"),
    "an id beyond the vocabulary": ({"response": [VOCABULARY]}, InputError, str(VOCABULARY - 1)),
    "a negative id": ({"prompt": [-1, 4]}, InputError, "within 0"),
    "text": ({"prompt": "hello"}, InputError, "ints"),
    "ids that are no ints": ({"response": [1.5]}, InputError, "ints"),
    "an unknown variant": ({"variant": "papre"}, InputError, "papre"),
    "a layer beyond the last": ({"layers": [5]}, InputError, r"0 \.\. 4"),
    "a negative layer": ({"layers": [-1]}, InputError, r"0 \.\. 4"),
    "no layer": ({"layers": []}, EmptyLayerSpanError, "5"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case: str) -> None:
    options, error, match = BAD_INPUT[case]
    with pytest.raises(error, match=match):
        score(shared("llama"), **options)


class UnknownLayout(PreTrainedModel):
    """Decoder layers under names of its own, not in a list: found by no rule, and scored whole."""

    _supports_sdpa = True

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.config)
        self.inner = inner
        layers = inner.model.layers
        inner.model.layers = _Chain(layers)

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.model.embed_tokens

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.inner(input_ids=input_ids, **options)


class _Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(f"layer{index}", layer)

    def __getitem__(self, index: Any) -> Any:
        return list(self.children())[index]

    def __iter__(self) -> Any:
        return self.children()


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_unknown_layouts_are_scored_whole(variant: Any) -> None:
    expected = score(build("llama"), variant=variant, semantic_token=-3)
    found = score(UnknownLayout(build("llama")), variant=variant, semantic_token=-3)
    assert found.tier == "ordinary"
    assert expected.tier == "replay"
    assert found.semgrad == pytest.approx(expected.semgrad, rel=1e-7)
    assert found.paragrad == pytest.approx(expected.paragrad, rel=1e-7)

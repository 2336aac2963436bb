"""Where a Hugging Face causal LM keeps its decoder layers and its output head, and the steps after the head."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from semgrad_guard.engine.objective import LogitTransform
from semgrad_guard.errors import UnsupportedModelError

# Attention of which a mask, and no state, decides which keys a query sees.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window")
# Caches of such attention; a dummy replaces a layer that uses the keys of a lower one.
_ATTENTION_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


@dataclass(frozen=True)
class Architecture:
    """The parts of a model that the engine touches, by path so that a copy of the model has them too.

    `layers` is None where no list of decoder layers was recognised; `idle` are the places in that list of layers that
    look at pictures or sound, which text does not pass through, and `n_layers` counts the others. `kinds` are the
    configuration's words for its layers. `attends` says that tokens meet in attention alone and in no recurrent state,
    `takes_positions` that left-padded rows can be told their positions. No layer has a shorter `window`; chunked layers
    see the tokens of their own `chunk` of so many alone. Past `fixed_positions` tokens, rotary frequencies change with
    the length (dynamic and long rope), so that cached keys differ from those of one pass over the whole sequence.
    """

    n_layers: int
    head: str
    layers: str | None
    attends: bool
    takes_positions: bool
    transform: LogitTransform
    fixed_positions: int | None = None
    takes_logits_to_keep: bool = False
    idle: frozenset[int] = frozenset()
    window: int | None = None
    chunk: int | None = None
    kinds: frozenset[str] = frozenset()


def inspect_architecture(model: nn.Module) -> Architecture:
    """Find a causal LM's decoder layers and head.

    Raises:
        UnsupportedModelError: encoder-decoder models, no linear output head, layers dispatched by accelerate, or
            weights created under `torch.inference_mode`.
    """
    _refuse_impossible(model)
    causal_lm = cast(PreTrainedModel, model)
    config: Any = causal_lm.config.get_text_config(decoder=True)
    head = _head(causal_lm)
    if not isinstance(head, nn.Linear) or not has_plain_weight(head):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no plain linear output head (found {type(head).__name__} "
            f"with a weight of type {type(getattr(head, 'weight', None)).__name__}); "
            "ParaGrad is defined by that head. Load the causal LM itself, with an unquantized lm_head."
        )
    # PEFT's wrapper names few arguments and hands on all.
    called: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
    accepted = inspect.signature(called.forward).parameters
    paths = {id(module): path for path, module in model.named_modules()}
    layers = _decoder_layers(causal_lm, int(config.num_hidden_layers), paths)
    members = [] if layers is None else list(cast(nn.ModuleList, model.get_submodule(layers)))
    scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    scale = float(1.0 if scale is None else scale) / float(1.0 if divisor is None else divisor)
    # Layers that cannot be run without the states of an encoder are left out where there are none.
    given = [inspect.signature(layer.forward).parameters.get("cross_attention_states") for layer in members]
    idle = frozenset(i for i, one in enumerate(given) if one is not None and one.default is inspect.Parameter.empty)
    return Architecture(
        n_layers=len(members) - len(idle) or int(config.num_hidden_layers),
        head=paths[id(head)],
        layers=layers,
        attends=_attends(causal_lm, config),
        takes_positions="position_ids" in accepted,
        takes_logits_to_keep="logits_to_keep" in accepted,
        transform=LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None)),
        fixed_positions=_fixed_positions(config),
        idle=idle,
        window=min((size for name in _WINDOWS if isinstance(size := getattr(config, name, None), int)), default=None),
        chunk=getattr(config, "attention_chunk_size", None),
        kinds=frozenset(getattr(config, "layer_types", None) or ()),
    )


def _head(model: PreTrainedModel) -> Any:
    """The module that computes logits; of a head that was trained with an adapter (PEFT), the copy in use.

    Raises:
        UnsupportedModelError: the head has an adapter of its own.
    """
    head: Any = model.get_output_embeddings()
    if hasattr(head, "modules_to_save"):
        adapter = next((name for name in head.active_adapters if name in head.modules_to_save), None)
        head = head.original_module if head.disable_adapters or adapter is None else head.modules_to_save[adapter]
    if hasattr(head, "base_layer") or hasattr(head, "token_adapter"):
        raise UnsupportedModelError(
            f"the output head of this {type(model).__name__} has an adapter of its own, so that no single matrix is "
            "the head that ParaGrad is defined by. Merge it: model = model.merge_and_unload(). Where the head's "
            "weights are those of the embeddings too, untie them first, for a merge changes both "
            "(huggingface/peft#2018)."
        )
    return head


def has_plain_weight(linear: nn.Linear) -> bool:
    """Whether the weight is an ordinary matrix of numbers, no quantized one in an ordinary layer's place."""
    weight = linear.weight.data
    return type(weight) is torch.Tensor and weight.is_floating_point() and weight.ndim == 2


def adapters_of(model: Any) -> Mapping[str, Any]:
    """PEFT's adapters by name, with their configurations."""
    known: Any = getattr(model, "peft_config", None)
    return known if isinstance(known, dict) else {}


def _refuse_impossible(model: nn.Module) -> None:
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise UnsupportedModelError(f"{name} is not a Hugging Face causal language model")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model: its prompt and response do not share hidden states, so there is no "
            "t* to differentiate by. Use a decoder-only causal LM."
        )
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < 1:
        raise UnsupportedModelError(
            f"{name} states {layers} decoder layers: either its config.json is broken, or its layers are no single "
            "stack, whose hidden states the scores are about. Use a model with one stack of decoder layers."
        )
    if reads_both_ways(model):
        raise UnsupportedModelError(
            f"this {name} reads in both directions (is_decoder is false in its configuration): what it says of a token "
            "depends on the tokens after it, so that an answer has no likelihood from left to right. If it was trained "
            "as a decoder, set is_decoder to true in its config.json; else use a decoder-only language model."
        )
    _refuse_places(model, name)
    if any(adapter.is_prompt_learning for adapter in adapters_of(model).values()):
        raise UnsupportedModelError(
            f"this {name} has a tuned prompt of PEFT, whose columns stand before every text and are no tokens of it. "
            "Use an adapter of weights (LoRA), or the base model."
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UnsupportedModelError(f"this {name} was loaded under torch.inference_mode(); load it outside")


def reads_both_ways(model: nn.Module) -> bool:
    """Whether this is an encoder that could be a decoder (BERT and its kin), and is not configured as one."""
    if getattr(cast(Any, model).config, "is_decoder", None) is not False:
        return False
    return any(vars(module).get("is_decoder") is False for module in model.modules())


def _refuse_places(model: nn.Module, name: str) -> None:
    """Refuse weights that do not lie, all of them, on one device that computes gradients."""
    weights = list(model.parameters())
    size = sum(weight.numel() * weight.element_size() for weight in weights) / 2**30
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UnsupportedModelError(
            f"the layers of this {name} are dispatched by accelerate (offloaded or split over devices), which the "
            f"replay cannot follow. Load it on one device, for example device_map={{'': 0}}: its weights need "
            f"{size:.2f} GiB there, and scoring some more. Where that is too much, take a smaller dtype or the CPU."
        )
    places = {weight.device.type for weight in weights}
    if "meta" in places:
        raise UnsupportedModelError(
            f"this {name} lies on the meta device: it has shapes and no weights ({size:.2f} GiB). Load them, for "
            "example device_map='cpu'."
        )
    if any(isinstance(module, nn.Linear) and not hasattr(module, "weight") for module in model.modules()):
        raise UnsupportedModelError(
            f"the linear layers of this {name} keep packed numbers instead of weights (compressed-tensors). Load it "
            "with quantization_config=CompressedTensorsConfig(run_compressed=False), which unpacks them."
        )


def _decoder_layers(model: PreTrainedModel, n_layers: int, paths: Mapping[int, str]) -> str | None:
    """The path of the decoder layers; None without a list of modules that could be they.

    Of the lists of `n_layers` modules it is the one next to the embedding of the input's tokens: a tower for pictures
    or sound may be as deep. Then like modules come first, then those nearest to the root. Where no list is that long,
    a config counts something else than its layers, and the list of transformers' own layers decides.
    """
    embedding = paths[id(model.get_input_embeddings())].split(".")

    def nearest(path: str) -> tuple[int, bool, int, str]:
        pairs = enumerate(zip(path.split("."), embedding, strict=False))
        beside = next((place for place, (ours, its) in pairs if ours != its), 0)
        unlike = len({type(module) for module in lists[path]}) > 1
        return -beside, unlike, path.count("."), path

    known = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists = {path: module for path, module in known.items() if len(module) == n_layers} or {
        path: module
        for path, module in known.items()
        if len(module) and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    }
    return min(lists, key=nearest) if lists else None


def _fixed_positions(config: Any) -> int | None:
    """Up to how many tokens rotary frequencies stay as they are; None if they never change."""
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    limits = [
        int(entry.get("original_max_position_embeddings") or config.max_position_embeddings)
        for entry in (parameters, *parameters.values())
        if isinstance(entry, dict) and ("dynamic" in (kind := str(entry.get("rope_type"))) or kind == "longrope")
    ]
    return min(limits, default=None)


def _attends(model: PreTrainedModel, config: Any) -> bool:
    """Whether all layers are of these kinds of attention, without a state of their own."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= _ATTENTION or (not kinds and getattr(model, "_is_stateful", False)):
        return False
    return all(type(layer).__name__ in _ATTENTION_LAYERS for layer in DynamicCache(config=config).layers)

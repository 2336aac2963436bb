"""A Hugging Face causal LM as the engine finds it: its decoder layers, its head and the steps behind; and its identity.

A guarded model belongs to its guard: its owner calls `refresh()` after a change. Noticed without that are switched,
added and merged adapters, weights edited in place or replaced, replaced modules, hooks, and a `forward` of one object's
own. The fingerprint of its weights follows such changes.
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from semgrad_guard.engine.objective import LogitTransform
from semgrad_guard.errors import UnsupportedModelError
from semgrad_guard.records import OWN_CODE

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
    # Whether all layers are of these kinds of attention, without a state of their own.
    kinds = frozenset(getattr(config, "layer_types", None) or ())
    attends = kinds <= _ATTENTION and (bool(kinds) or not getattr(model, "_is_stateful", False))
    attends = attends and all(type(one).__name__ in _ATTENTION_LAYERS for one in DynamicCache(config=config).layers)
    idle = frozenset(i for i, one in enumerate(given) if one is not None and one.default is inspect.Parameter.empty)
    return Architecture(
        n_layers=len(members) - len(idle) or int(config.num_hidden_layers),
        head=paths[id(head)],
        layers=layers,
        attends=attends,
        takes_positions="position_ids" in accepted,
        takes_logits_to_keep="logits_to_keep" in accepted,
        transform=LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None)),
        fixed_positions=_fixed_positions(config),
        idle=idle,
        window=min((size for name in _WINDOWS if isinstance(size := getattr(config, name, None), int)), default=None),
        chunk=getattr(config, "attention_chunk_size", None),
        kinds=kinds,
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
    # An encoder that could be a decoder (BERT and its kin), and is not configured as one.
    marked = getattr(config, "is_decoder", None) is False
    if marked and any(vars(module).get("is_decoder") is False for module in model.modules()):
        raise UnsupportedModelError(
            f"this {name} reads in both directions (is_decoder is false in its configuration): what it says of a token "
            "depends on the tokens after it, so that an answer has no likelihood from left to right. If it was trained "
            "as a decoder, set is_decoder to true in its config.json; else use a decoder-only language model."
        )
    # Its weights lie, all of them, on one device that computes gradients.
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
    if any(adapter.is_prompt_learning for adapter in adapters_of(model).values()):
        raise UnsupportedModelError(
            f"this {name} has a tuned prompt of PEFT, whose columns stand before every text and are no tokens of it. "
            "Use an adapter of weights (LoRA), or the base model."
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UnsupportedModelError(f"this {name} was loaded under torch.inference_mode(); load it outside")


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


_SAMPLES, _SHARED_BUFFER = 1024, 1 << 16
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""The tables of a module that hold the hooks of its forward pass."""
# transformers leaves hooks of this module on a model at its first `output_hidden_states=True`; they change no number,
# nor does the one of this name, which requires gradients.
_INERT_MODULE, _INERT_NAME = "transformers.utils.output_capturing", "make_inputs_require_grads"


class Identity:
    """What a model was when it was first met, and its fingerprint since."""

    def __init__(self, model: nn.Module) -> None:
        self._versions = {name: _version(weight) for name, weight in model.named_parameters()}
        self._config = _config_of(model)

    def fingerprint(self, model: nn.Module) -> str:
        """Sixteen hex digits: those of the weights, as long as the model is as it was loaded and has no adapter.

        Weights edited in place are read as a whole, for an edit of few numbers may escape a sample. A hook, or a method
        of one object's own, may read what nothing shows: then a mark follows that is never the same twice.
        """
        departures = _hooked(model)
        for path, layer in model.named_modules():
            if is_adapted(layer):
                departures[f"{path}: adapters"] = repr(_adapter_state(layer))
        if adapters_of(model):  # of several, the one in use
            departures["adapter"] = repr(getattr(model, "active_adapter", None))
        if _config_of(model) != self._config:
            departures["config"] = _config_of(model)
        for name, weight in model.named_parameters():
            if _version(weight) != self._versions.get(name, 0) and weight.numel() >= 2 * _SAMPLES:
                values: Any = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                departures[f"weight {name}"] = hashlib.sha256(values).hexdigest()
        found = weight_fingerprint(model)
        if departures:
            listed = "\n".join(f"{place}={departures[place]}" for place in sorted(departures))
            found = hashlib.sha256(f"{found}\n{listed}".encode()).hexdigest()[:16]
        return f"{found}{OWN_CODE}{secrets.token_hex(8)}" if _hooked(model) else found


def state_of(model: nn.Module) -> tuple[Hashable, ...]:
    """All that a twin is made of: modules, hooks, weights and torch's counts of their edits, adapters that are on."""
    found: list[Hashable] = []
    for module in model.modules():
        found += [id(module), type(module), id(vars(module).get("forward"))]
        found += [None if weight is None else _place_of(weight) for weight in module._parameters.values()]
        shared = (buffer for buffer in module._buffers.values() if buffer is not None and not is_own(buffer))
        found += [_version(buffer) for buffer in shared]
        for table in HOOKS:
            found += [id(hook) for hook in getattr(module, table).values() if not is_inert(hook)]
        if is_adapted(module):
            found.append(repr(_adapter_state(module)))
    return tuple(found)


def is_own(buffer: torch.Tensor) -> bool:
    """Whether a twin has a copy of its own of this buffer, a small one: rotary frequencies are rewritten in passes."""
    return buffer.nbytes <= _SHARED_BUFFER


def is_inert(hook: object) -> bool:
    """Whether a forward hook changes no number of a forward pass."""
    return getattr(hook, "__module__", None) == _INERT_MODULE or getattr(hook, "__name__", "") == _INERT_NAME


def is_hooked(model: nn.Module) -> bool:
    """Whether hooks of the user's run in the model's passes."""
    return bool(_hooked(model))


def weight_fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits that change when the weights do: names, shapes and up to 1,024 values of every tensor.

    The values are read in float32, so that the same checkpoint loaded in bfloat16 and float32 agrees.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        sample = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // _SAMPLES)]
        sample = sample.to(torch.float32) if sample.dtype.is_floating_point else sample
        digest.update(sample.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put this in the place of a layer that it adapts."""
    return "_disable_adapters" in vars(module)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _place_of(weight: torch.Tensor) -> Hashable:
    """Where a weight's numbers lie, or which tensor it is where that is a wrapper of others; and how often edited."""
    try:
        return weight.data_ptr(), weight.dtype, tuple(weight.shape), _version(weight)
    except RuntimeError:
        return id(weight), _version(weight)


def _config_of(model: Any) -> str:
    """The configuration that passes read, without the kind of attention, whose kernels agree up to rounding."""
    config: Any = getattr(model, "config", None)
    text: str = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else repr(config)
    return "\n".join(
        line for line in text.splitlines() if "_attn_implementation" not in line and "use_cache" not in line
    )


def _hooked(model: nn.Module) -> dict[str, str]:
    """The hooks of each module, and a `forward` of its own, by name."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        hooks = [hook for table in HOOKS for hook in getattr(module, table).values() if not is_inert(hook)]
        own = vars(module).get("forward")
        code = [*hooks, *([own] if own is not None else [])]
        if code:
            names = [getattr(one, "__qualname__", type(one).__qualname__) for one in code]
            found[f"{path}: code"] = repr(names)
    return found


def _adapter_state(layer: Any) -> tuple[bool, list[str], list[str], dict[str, float]]:
    scales: Mapping[str, Any] = getattr(layer, "scaling", {})
    known = {name: float(scale) for name, scale in scales.items() if isinstance(scale, (int, float))}
    return (
        bool(layer._disable_adapters),
        list(layer.active_adapters),
        list(getattr(layer, "merged_adapters", ())),
        known,
    )

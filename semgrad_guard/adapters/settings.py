"""The common fields of the frameworks' model classes: for loading weights and for decoding an answer.

Field classes differ from framework to framework, so these functions read the fields off any object that has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from semgrad_guard.adapters.weights import Weights, key_of
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import InputError, require_known

_LOADING = ("revision", "dtype", "device_map", "quantization_config", "attn_implementation", "template_options")
_DECODING = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"})


def weights_of(fields: Any, held: Weights | None) -> Weights:
    """The weights for these fields: those already held, if the fields are still the same."""
    loading = _loading(fields)
    return held if held is not None and held.key == key_of(loading) else Weights.shared(**loading)


def loaded_weights(fields: Any, model: LanguageModel) -> Weights:
    """A model that is loaded already, as the weights for these fields."""
    return Weights.of(model, key_of(_loading(fields)))


def require_loaded(given: Iterable[str]) -> None:
    """Refuse the names of fields for loading, where the model is loaded already.

    Raises:
        InputError: there are some.
    """
    loading = sorted({"model", *_LOADING} & set(given))
    if loading:
        raise InputError(f"the model is loaded already: set {', '.join(loading)} on the LanguageModel instead")


def call_options(fields: Any, call: Mapping[str, Any], *, also: frozenset[str] = frozenset()) -> GenerationOptions:
    """How to generate one answer: the fields, replaced by the call's own options; `also` are further names it may have.

    A `max_tokens` of None means `GenerationOptions`' own limit.

    Raises:
        InputError: the call has an unknown option, or a value is out of range.
    """
    require_known(f"a call of {type(fields).__name__}", call, _DECODING | also)
    chosen = {name: call.get(name, getattr(fields, name)) for name in _DECODING}
    longest, stop = chosen.pop("max_tokens"), chosen.pop("stop")
    limits: dict[str, Any] = {} if longest is None else {"max_tokens": longest}
    return GenerationOptions(**limits, **chosen, stop=tuple(stop or ()))


def _loading(fields: Any) -> dict[str, Any]:
    """The arguments of `LanguageModel.from_pretrained`."""
    return {"name_or_path": fields.model, **{name: getattr(fields, name) for name in _LOADING}}

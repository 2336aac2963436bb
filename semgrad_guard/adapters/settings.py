"""The common fields of the frameworks' model classes: for loading weights and for decoding an answer.

Field classes differ from framework to framework, so these functions read the fields off any object that has them.
Weights load at the first answer, once for equal fields.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import InputError, require_known

_LOADING = ("revision", "dtype", "device_map", "quantization_config", "attn_implementation", "template_options")
_DECODING = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"})

_shared: weakref.WeakValueDictionary[str, Weights] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Weights:
    """A `LanguageModel`, loaded or still to be loaded. `key` is made of its loading arguments."""

    def __init__(
        self, key: str, load: Callable[[], LanguageModel], *, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.key, self._settings = key, settings
        self._load, self._lock = load, threading.Lock()
        self._model: LanguageModel | None = None

    def get(self) -> LanguageModel:
        """The model, loaded by the first caller."""
        with self._lock:
            if self._model is None:
                self._model = self._load()
            return self._model

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        """Itself: deep copies of its holder share the weights."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """By name: another process loads the weights anew.

        Raises:
            InputError: they were loaded elsewhere, so that the arguments are unknown.
        """
        if self._settings is None:
            raise InputError(
                "A model that was loaded beforehand cannot be pickled: weights are named, not carried. Name it instead "
                "(model=..., a folder or a hub id), and it is loaded where it is unpickled; or build it anew there "
                "with from_model."
            )
        return partial(Weights.shared, **self._settings), ()

    @classmethod
    def of(cls, model: LanguageModel, key: str) -> Weights:
        """A model that is loaded already; shared by copies of its holder only."""
        return cls(key, lambda: model)

    @classmethod
    def shared(cls, **settings: Any) -> Weights:
        """The weights for these arguments of `LanguageModel.from_pretrained`, kept while they are in use."""
        key = _key_of(settings)
        with _lock:
            found = _shared.get(key)
            if found is None:
                found = _shared[key] = cls(key, lambda: LanguageModel.from_pretrained(**settings), settings=settings)
            return found


def weights_of(fields: Any, held: Weights | None) -> Weights:
    """The weights for these fields: those already held, if the fields are still the same."""
    loading = _loading(fields)
    return held if held is not None and held.key == _key_of(loading) else Weights.shared(**loading)


def loaded_weights(fields: Any, model: LanguageModel) -> Weights:
    """A model that is loaded already, as the weights for these fields."""
    return Weights.of(model, _key_of(_loading(fields)))


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


def _key_of(settings: dict[str, Any]) -> str:
    """One string per set of loading arguments."""
    return repr(sorted(settings.items()))

"""Weights that load at the first answer, once for equal arguments."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import InputError

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
        key = key_of(settings)
        with _lock:
            found = _shared.get(key)
            if found is None:
                found = _shared[key] = cls(key, lambda: LanguageModel.from_pretrained(**settings), settings=settings)
            return found


def key_of(settings: dict[str, Any]) -> str:
    """One string per set of loading arguments."""
    return repr(sorted(settings.items()))

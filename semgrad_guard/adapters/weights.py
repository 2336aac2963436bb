"""Weights that load at the first answer, once for everyone who asks for the same."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import InputError

_shared: weakref.WeakValueDictionary[str, Weights] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Weights:
    """A `LanguageModel`, or the promise of one. `key` says what it was loaded from."""

    def __init__(
        self, key: str, load: Callable[[], LanguageModel], *, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.key, self._settings = key, settings
        self._load, self._lock = load, threading.Lock()
        self._model: LanguageModel | None = None

    def get(self) -> LanguageModel:
        """The model, loaded by whoever comes first."""
        with self._lock:
            if self._model is None:
                self._model = self._load()
            return self._model

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        """Itself: deep copies of whoever holds them share the weights too."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """By name: another process loads the weights anew.

        Raises:
            InputError: they were loaded by somebody else, so that nobody here knows how.
        """
        if self._settings is None:
            raise InputError(
                "A model that was loaded beforehand cannot be pickled: weights are named, not carried. Name it instead "
                "(model=..., a folder or a hub id), and whoever unpickles it loads it there; or build it anew there "
                "with from_model."
            )
        return _reloaded, (dict(self._settings),)

    @classmethod
    def of(cls, model: LanguageModel, key: str) -> Weights:
        """A model that is loaded already; shared by copies of its holder only."""
        return cls(key, lambda: model)

    @classmethod
    def shared(cls, **settings: Any) -> Weights:
        """The weights for these arguments of `LanguageModel.from_pretrained`, kept while anyone holds them."""
        key = key_of(settings)
        with _lock:
            found = _shared.get(key)
            if found is None:
                found = _shared[key] = cls(key, lambda: LanguageModel.from_pretrained(**settings), settings=settings)
            return found


def _reloaded(settings: dict[str, Any]) -> Weights:
    """What is unpickled: the weights that this process shares, or will load."""
    return Weights.shared(**settings)


def key_of(settings: dict[str, Any]) -> str:
    """One string per set of loading arguments."""
    return repr(sorted(settings.items()))

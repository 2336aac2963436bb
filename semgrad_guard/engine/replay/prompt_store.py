"""Keys and values of the sequences that a model read last, for prompts that begin like one of them.

The messages of a chat repeat all earlier ones, and the prompts of one RAG chain begin with the same instructions: keys
and values of those tokens do not depend on later ones, so a prompt is read only from where it differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers.cache_utils import Cache

from semgrad_guard.engine.replay.batch import KeysValues, cache_with, can_be_cut, growing_cache, keys_and_values


@dataclass(frozen=True)
class _Entry:
    """Token ids and, by layer, their keys and values [1, heads, ids, d]; never written to."""

    ids: tuple[int, ...]
    layers: Mapping[int, KeysValues]

    @property
    def bytes(self) -> int:
        return sum(half.numel() * half.itemsize for layer in self.layers.values() for half in layer)


class PromptStore:
    """The sequences that one model read last, as many as fit a budget. Callers hold the engine's lock."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # the one used longest ago comes first

    @property
    def bytes(self) -> int:
        """The bytes held."""
        return sum(entry.bytes for entry in self._entries)

    def begin(self, ids: Sequence[int], most: int) -> Cache:
        """A growing cache of the longest beginning of `ids` that is known, `most` tokens of it at the most."""
        entry = max(reversed(self._entries), key=lambda known: _common(known.ids, ids), default=None)
        length = 0 if entry is None else min(_common(entry.ids, ids), most)
        if entry is None or length == 0:
            return growing_cache()
        self._entries.remove(entry)
        self._entries.append(entry)
        return cache_with({number: [half[..., :length, :] for half in layer] for number, layer in entry.layers.items()})

    def keep(self, ids: Sequence[int], cache: Cache, budget: int) -> None:
        """Remember the tokens read in the place of those that they continue, within `budget` bytes.

        The cache holds one row, and the tokens of `ids` without the last one or more.
        """
        length = min(cache.get_seq_length(), len(ids))
        if budget and length and can_be_cut(cache, length):
            layers = {n: (k[..., :length, :], v[..., :length, :]) for n, (k, v) in keys_and_values(cache).items()}
            new = _Entry(tuple(ids[:length]), layers)
            self._entries = [old for old in self._entries if _common(old.ids, new.ids) < len(old.ids)]
            self._entries.append(new)
        self.trim(budget)

    def trim(self, budget: int) -> None:
        """Forget the sequences used longest ago until the rest fit `budget` bytes."""
        while self._entries and self.bytes > budget:
            del self._entries[0]


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))

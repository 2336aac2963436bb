"""What every method costs, honestly, where methods share work.

A fact (a replay, a set of samples, one pair for the NLI model) is computed once, by whoever asks first, and its time is
kept. A method's cost is the time of its own arithmetic plus the full time of every fact that it asked for, whoever had
it computed: what the method would cost if it ran alone. The costs of all methods therefore add up to more than the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Meter:
    """Times facts and methods for one batch; `seconds` holds every method's cost so far."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock or settled_clock
        self._costs: dict[Hashable, float] = {}
        self._asked: set[Hashable] = set()
        self._inside = 0.0
        self._busy = False

    @property
    def facts(self) -> tuple[Hashable, ...]:
        """Every fact that was asked for, in the order of the first time."""
        return tuple(self._costs)

    @contextmanager
    def method(self, name: str) -> Generator[None]:
        """Charge what happens inside to the method of this name."""
        self._asked, self._inside = set(), 0.0
        began = self._clock()
        yield
        own = self._clock() - began - self._inside
        self.seconds[name] = self.seconds.get(name, 0.0) + own + sum(self._costs[fact] for fact in self._asked)

    def timed(self, facts: Sequence[Hashable], compute: Callable[[], T]) -> T:
        """What `compute` returns; its time is that of the facts that were not known before, in equal parts.

        Facts asked for while another one is computed belong to that one.
        """
        if self._busy:
            return compute()
        self._busy = True
        began = self._clock()
        try:
            found = compute()
        finally:
            self._busy = False
        took = self._clock() - began
        fresh = [fact for fact in dict.fromkeys(facts) if fact not in self._costs]
        self._costs.update(dict.fromkeys(fresh, took / max(1, len(fresh))))
        self._asked.update(facts)
        self._inside += took
        return found


class MeteredEvidence:
    """An answer's evidence whose facts are timed: it stands in for `Evidence` and has all that it has.

    `row` tells the answers of a batch apart. Facts that concern a whole batch are computed when the first row asks,
    which pays for all of them; over a batch the sum is right.
    """

    def __init__(self, evidence: Any, meter: Meter, row: int) -> None:
        self._evidence, self._meter, self._row = evidence, meter, row

    def __getattr__(self, name: str) -> Any:
        found = self._meter.timed([(self._row, name)], lambda: getattr(self._evidence, name))
        if not callable(found):
            return found

        def ask(*arguments: Any, **named: Any) -> Any:
            fact = (self._row, name, *arguments, *sorted(named.items()))
            return self._meter.timed([fact], lambda: found(*arguments, **named))

        return ask


def settled_clock() -> float:
    """Seconds, once everything that an accelerator was asked to do is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()

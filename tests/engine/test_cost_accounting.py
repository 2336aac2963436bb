"""Shared work is paid in full by everyone who needs it, and no request waits for it alone."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.interruption import add_cost, with_cost
from semgrad_guard.engine.objective import Objective


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which a millisecond passes whenever it is read, so that no load of the machine matters."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) / 1000)


def test_a_price_is_time_and_credit() -> None:
    def work() -> str:
        for _ in range(19):
            time.perf_counter()
        add_cost(100.0)
        add_cost(-30.0)
        return "done"

    value, cost = with_cost(work)
    assert value == "done"
    assert cost == pytest.approx(90.0)
    _, outer = with_cost(lambda: with_cost(work))
    assert outer >= 90.0
    assert with_cost(lambda: None)[1] < 50.0  # what was charged before is not charged again


def test_what_is_asked_for_twice_is_paid_once() -> None:
    def twice() -> None:
        add_cost(1000.0, once="samples")
        add_cost(1000.0, once="samples")
        add_cost(1000.0, once="replay")

    assert 2000.0 <= with_cost(twice)[1] < 2500.0
    assert 2000.0 <= with_cost(twice)[1] < 2500.0  # by everyone who asks
    assert 4000.0 <= with_cost(lambda: [with_cost(twice) for _ in range(2)])[1] < 4500.0


def test_a_thread_whose_cost_nobody_asks_for_remembers_nothing() -> None:
    class Thing: ...

    thing = Thing()
    held = weakref.ref(thing)
    add_cost(1.0, once=thing)
    del thing
    gc.collect()
    assert held() is None


def test_threads_do_not_charge_each_other() -> None:
    def work() -> None:
        other = threading.Thread(target=add_cost, args=(1e6,))
        other.start()
        other.join()

    assert with_cost(work)[1] < 1e5


def test_every_row_and_every_method_pays_its_share_of_a_replay(language_model: LanguageModel) -> None:
    generations = language_model.generate_batch(["a", "bb", "ccc"], GenerationOptions(max_tokens=3))
    rows = [generation.evidence for generation in generations]
    first = [with_cost(lambda row=row: row.gradients(Objective())) for row in rows]
    again = [with_cost(lambda row=row: row.gradients(Objective())) for row in rows]
    for (found, cost), (_, later) in zip(first, again, strict=True):
        assert found is not None
        share = found.milliseconds
        assert share > 0
        # no answer waits for the whole batch, and none gets it for nothing
        assert cost == pytest.approx(share, abs=3)
        assert later == pytest.approx(share, abs=3)
    assert max(cost for _, cost in first) * 2 < sum(cost for _, cost in first)

"""Shared work is paid in full by everyone who needs it, and waited for by nobody alone."""

from __future__ import annotations

import threading
import time

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.engine.cost_accounting import charge, priced
from semgrad_guard.engine.objective import Objective


def test_a_price_is_time_and_credit() -> None:
    def work() -> str:
        time.sleep(0.02)
        charge(100.0)
        charge(-30.0)
        return "done"

    value, price = priced(work)
    assert value == "done"
    assert 90.0 <= price < 90.0 + 1000
    _, outer = priced(lambda: priced(work))
    assert outer >= 90.0
    assert priced(lambda: None)[1] < 50.0  # what was charged before is not charged again


def test_what_is_asked_for_twice_is_paid_once() -> None:
    def twice() -> None:
        charge(1000.0, once="samples")
        charge(1000.0, once="samples")
        charge(1000.0, once="replay")

    assert 2000.0 <= priced(twice)[1] < 2500.0
    assert 2000.0 <= priced(twice)[1] < 2500.0  # by everyone who asks
    assert 4000.0 <= priced(lambda: [priced(twice) for _ in range(2)])[1] < 4500.0


def test_threads_do_not_charge_each_other() -> None:
    def work() -> None:
        other = threading.Thread(target=charge, args=(1e6,))
        other.start()
        other.join()

    assert priced(work)[1] < 1e5


def test_every_row_and_every_method_pays_its_share_of_a_replay(language_model: LanguageModel) -> None:
    generations = language_model.generate_batch(["a", "bb", "ccc"], GenerationOptions(max_tokens=3))
    rows = [generation.evidence for generation in generations]
    first = [priced(lambda row=row: row.gradients(Objective())) for row in rows]
    again = [priced(lambda row=row: row.gradients(Objective())) for row in rows]
    for (found, price), (_, later) in zip(first, again, strict=True):
        assert found is not None
        share = found.milliseconds
        assert share > 0
        # nobody waits for the whole batch, and nobody gets it for nothing
        assert price == pytest.approx(share, abs=share / 2 + 2)
        assert later == pytest.approx(share, abs=share / 2 + 2)

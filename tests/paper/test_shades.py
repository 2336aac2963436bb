"""Shades of segments: ordered like their uncertainties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.paper.drawing import shades


def test_shades_are_even_in_the_logarithm() -> None:
    assert shades([1e-6, 1e-4, 1e-2]) == pytest.approx([0.0, 0.5, 1.0])
    assert shades([0.3]) == [0.0]
    assert shades([2.0, 2.0, None]) == [0.0, 0.0, None]
    assert shades([None, float("nan")]) == [None, None]
    assert shades([]) == []
    assert shades([0.0, 1.0]) == [0.0, 1.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_more_uncertain_is_never_lighter(values: list[float]) -> None:
    found = shades(values)
    assert all(0 <= shade <= 1 for shade in found if shade is not None)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [found[i] for i in order] == sorted(found[i] or 0.0 for i in order)

"""Matrices of tests by pairs: `make check` runs a covering array, `make check-heavy` the rest of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]


def pairwise(
    *, indirect: Sequence[str] = (), where: Callable[..., bool] | None = None, **factors: Iterable[Any]
) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of the factors' values, most of them marked `heavy`.

    The others are a covering array: every pair of values of two factors that occurs at all occurs in one of them.

        @pairwise(mode=MODES, path=PATHS, asynchronous=[False, True])
        def test_nothing_leaks(mode, path, asynchronous): ...

    Args:
        indirect: factors that are fixtures, as in `pytest.mark.parametrize`.
        where: which combinations make sense, called with a combination's values by name.
        **factors: the values of each argument of the test.
    """
    values = [list(given) for given in factors.values()]
    matrix = [
        row
        for row in product(*(range(len(given)) for given in values))
        if where is None or where(**dict(zip(factors, _chosen(values, row), strict=True)))
    ]
    return _parametrized(factors, values, matrix, covering_array(matrix), indirect)


def in_turn(*, indirect: Sequence[str] = (), **factors: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of two factors, every second one of them marked `heavy`.

    The values of one factor take turns with the values of the other: for what two factors hardly do to each other.

        @in_turn(name=ARCHITECTURES, variant=["paper", "official"])
        def test_the_score_is_exact(name, variant): ...
    """
    values = [list(given) for given in factors.values()]
    matrix = list(product(*(range(len(given)) for given in values)))
    return _parametrized(factors, values, matrix, {row for row in matrix if sum(row) % 2 == 0}, indirect)


def every(nth: int, values: Iterable[Any]) -> list[Any]:
    """The values of a test's one argument, of which every nth one is not marked `heavy`.

    For rows that differ little: what a single one of them finds, most of the others find too.

        @pytest.mark.parametrize("name", every(2, ARCHITECTURES))
        def test_the_states_are_the_models(name): ...
    """
    return [pytest.param(value, marks=pytest.mark.heavy if number % nth else ()) for number, value in enumerate(values)]


def _parametrized(
    names: Iterable[str], values: list[list[Any]], matrix: Sequence[Row], light: set[Row], indirect: Sequence[str]
) -> pytest.MarkDecorator:
    cells = [
        pytest.param(
            *_chosen(values, row),
            id="-".join(_name(*factor) for factor in zip(names, row, _chosen(values, row), strict=True)),
            marks=() if row in light else pytest.mark.heavy,
        )
        for row in matrix
    ]
    return pytest.mark.parametrize(tuple(names), cells, indirect=list(indirect))


def covering_array(matrix: Sequence[Row]) -> set[Row]:
    """Rows that hold every pair of two columns' values that the matrix holds: greedily few, and always the same."""
    missing = {row: set(combinations(enumerate(row), 2)) for row in matrix}
    uncovered = set[Any]().union(*missing.values())
    if not uncovered:  # a single factor has no pairs
        return set(matrix)
    chosen: set[Row] = set()
    while uncovered:
        best = max(matrix, key=lambda row: len(missing[row] & uncovered))
        chosen.add(best)
        uncovered -= missing[best]
    return chosen


def _chosen(values: Sequence[Sequence[Any]], row: Row) -> list[Any]:
    return [given[index] for given, index in zip(values, row, strict=True)]


def _name(factor: str, index: int, value: Any) -> str:
    if isinstance(value, (str, int, float)) or value is None:
        return str(value)
    return getattr(value, "__name__", f"{factor}{index}")

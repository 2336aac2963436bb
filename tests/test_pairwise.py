"""The selection of `make check` from a matrix of tests: every pair of values, in few rows, always the same."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from .pairwise import covering_array, pairwise


@pytest.mark.parametrize(("sizes", "most"), [((3, 9), 27), ((2, 9, 4), 36), ((2, 2, 2, 2), 6), ((4, 9, 2, 2, 3), 45)])
def test_every_pair_occurs_in_few_rows(sizes: tuple[int, ...], most: int) -> None:
    matrix = list(product(*map(range, sizes)))
    chosen = covering_array(matrix)
    pairs = {pair for row in chosen for pair in combinations(enumerate(row), 2)}
    assert pairs == {pair for row in matrix for pair in combinations(enumerate(row), 2)}
    assert len(chosen) <= most
    assert chosen == covering_array(matrix)


def test_the_rest_of_the_matrix_is_heavy() -> None:
    mark = pairwise(mode="abcd", path=range(5), sync=[True, False], where=lambda mode, path, sync: mode != "a" or sync)
    names, cells = mark.args
    assert names == ("mode", "path", "sync")
    assert len(cells) == len({cell.id for cell in cells}) == 3 * 5 * 2 + 5
    light = [cell.values for cell in cells if not cell.marks]
    assert 20 <= len(light) <= 24
    assert {(mode, path) for mode, path, _ in light} == set(product("abcd", range(5)))
    assert ("a", False) not in {(mode, sync) for mode, _, sync in light}

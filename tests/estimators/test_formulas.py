"""The formulas of the rivals that sample or ask: each by hand, and against an independent form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard.estimators.reading import mutual_information, p_false, relevant_energy, sentence_sar
from semgrad_guard.estimators.samples import cluster_entropy, degree_uncertainty, density, eigen_score

LOG_PROBS = st.floats(-30, 0)


def similarities(size: int) -> st.SearchStrategy[np.ndarray]:
    def symmetric(values: list[float]) -> np.ndarray:
        matrix = np.eye(size)
        matrix[np.tril_indices(size, -1)] = values
        return np.maximum(matrix, matrix.T)

    count = size * (size - 1) // 2
    return st.lists(st.floats(0, 1), min_size=count, max_size=count).map(symmetric)


@given(similarities(4), st.permutations(range(4)))
def test_degree_uncertainty(similarity: np.ndarray, order: list[int]) -> None:
    found = degree_uncertainty(similarity)
    assert found == pytest.approx(1 - similarity.mean())  # the mean dissimilarity, written another way
    assert degree_uncertainty(similarity[np.ix_(order, order)]) == pytest.approx(found)
    assert found + 1e-12 >= 0
    assert found <= 1 - 1 / 4 + 1e-12


@given(st.lists(st.lists(st.floats(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4))
def test_eigen_score_is_the_log_determinant(rows: list[list[float]]) -> None:
    embeddings = np.array(rows)
    centred = np.eye(6) - np.ones((6, 6)) / 6  # J_d of the paper's appendix
    covariance = embeddings @ centred @ embeddings.T / 5 + 1e-3 * np.eye(len(rows))
    found = eigen_score(embeddings, alpha=1e-3)
    assert found == pytest.approx(np.linalg.slogdet(covariance)[1] / len(rows), abs=1e-6)
    assert eigen_score(embeddings[::-1], alpha=1e-3) == pytest.approx(found)
    assert found >= math.log(1e-3) - 1e-9
    # Samples that are all the same span one direction only.
    same = eigen_score(np.array([rows[0]] * 3), alpha=1e-3)
    assert same == pytest.approx((math.log(3 * np.var(rows[0], ddof=1) + 1e-3) + 2 * math.log(1e-3)) / 3, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 3), LOG_PROBS), min_size=1, max_size=10), st.randoms())
def test_cluster_entropy(members: list[tuple[int, float]], random) -> None:
    numbers, weights = [n for n, _ in members], [w for _, w in members]
    found = cluster_entropy(numbers, weights)
    mass = {n: math.fsum(math.exp(w) for m, w in members if m == n) for n in numbers}
    shares = [value / math.fsum(mass.values()) for value in mass.values()]
    assert found == pytest.approx(sum(-p * math.log(p) for p in shares if p > 0), abs=1e-9)
    assert -1e-12 <= found <= math.log(len(mass)) + 1e-9
    random.shuffle(members)
    assert cluster_entropy([n for n, _ in members], [w for _, w in members]) == pytest.approx(found, abs=1e-9)


def test_cluster_entropy_at_its_ends() -> None:
    assert cluster_entropy([0, 0, 0], [-700.0, -900.0, -1000.0]) == 0.0
    assert cluster_entropy([0, 1, 2], [-800.0] * 3) == pytest.approx(math.log(3))


@given(st.lists(st.tuples(st.floats(0, 1.5), LOG_PROBS), min_size=1, max_size=8))
def test_density(references: list[tuple[float, float]]) -> None:
    found = density([d for d, _ in references], [w for _, w in references])
    inside = sum(math.exp(w) * (1 - d if d <= 1 else 0) for d, w in references)
    assert found == pytest.approx(inside / sum(math.exp(w) for _, w in references))
    assert 0 <= found <= 1 + 1e-12
    assert density([0.0 for _ in references], [w for _, w in references]) == pytest.approx(1.0)


def test_sar_by_hand() -> None:
    assert relevant_energy([-1.0, -2.0, -4.0], [0.1, 0.0, 0.3]) == pytest.approx(0.25 * 1 + 0.75 * 4)
    assert relevant_energy([-1.0, -3.0], [0.0, 0.0]) == pytest.approx(2.0)
    # p' = .5 and .25; -log(.5 + .8 x .25 / .1) and -log(.25 + .8 x .5 / .1)
    found = sentence_sar([-math.log(0.5), -math.log(0.25)], [[1, 0.8], [0.8, 1]], t=0.1)
    assert found == pytest.approx((-math.log(0.5 + 2.0) - math.log(0.25 + 4.0)) / 2)
    assert sentence_sar([3.0, 5.0], np.eye(2), t=0.1) == pytest.approx(4.0)  # nothing shared: the mean energy
    assert math.isfinite(sentence_sar([900.0, 1500.0], np.ones((2, 2)), t=0.001))


@given(st.lists(st.floats(0, 20), min_size=3, max_size=3), similarities(3), st.permutations(range(3)))
def test_sar(energies: list[float], similarity: np.ndarray, order: list[int]) -> None:
    found = sentence_sar(energies, similarity, t=0.01)
    p = [math.exp(-energy) for energy in energies]
    naive = [p[j] + sum(similarity[j, k] * p[k] for k in range(3) if k != j) / 0.01 for j in range(3)]
    assert found == pytest.approx(-sum(map(math.log, naive)) / 3, abs=1e-9)
    shuffled = sentence_sar([energies[i] for i in order], similarity[np.ix_(order, order)], t=0.01)
    assert shuffled == pytest.approx(found, abs=1e-9)


def test_p_false_by_hand() -> None:
    true, false = [math.log(0.3), math.log(0.1)], [math.log(0.05), math.log(0.05)]
    assert p_false(true, false) == pytest.approx(0.2)
    assert p_false([-2000.0], [-2001.0]) == pytest.approx(1 / (1 + math.e))


def information(cluster_of: Sequence[int], first: Sequence[float], second: Sequence[Sequence[float]]) -> float:
    """Algorithm 3, line by line, over dictionaries."""
    S = sorted(set(cluster_of))
    D = {i: [j for j, number in enumerate(cluster_of) if number == i] for i in S}
    mu1 = {i: sum(math.exp(first[j]) for j in D[i]) for i in S}
    mu2 = {(t, i): sum(math.exp(second[i][j]) for j in D[t]) for t in S for i in S}
    Z = sum(mu1.values())
    Zi = {i: sum(mu2[j, i] for j in S) for i in S}
    p1 = {i: mu1[i] / Z for i in S}
    p2 = {(t, i): mu2[t, i] / Zi[i] for t in S for i in S}
    total = 0.0
    for i in S:
        for t in S:
            joint = p1[i] * p2[t, i]
            product = p1[i] * sum(p1[j] * p2[t, j] for j in S)
            total += joint * math.log(joint / product) if joint else 0.0
    return total


@given(st.data())
def test_mutual_information(data: st.DataObject) -> None:
    clusters = [0, 1, *data.draw(st.lists(st.integers(0, 2).map(lambda n: min(n, 1)), max_size=3)), 2]
    row = st.lists(LOG_PROBS, min_size=len(clusters), max_size=len(clusters))
    first, second = data.draw(row), data.draw(st.lists(row, min_size=3, max_size=3))
    found = mutual_information(clusters, np.array(first), np.array(second))
    assert found == pytest.approx(information(clusters, first, second), abs=1e-9)
    assert -1e-9 <= found <= math.log(3) + 1e-9


def test_mutual_information_at_its_ends() -> None:
    even = np.log([0.5, 0.5])
    # The second answer is the same whatever the first: nothing is learnt.
    assert mutual_information([0, 1], even, np.log([[0.3, 0.7], [0.3, 0.7]])) == pytest.approx(0.0, abs=1e-12)
    # The second answer repeats the first: all of its entropy.
    repeats = np.array([[0.0, -800.0], [-800.0, 0.0]])
    assert mutual_information([0, 1], even, repeats) == pytest.approx(math.log(2))
    # By hand: joint (.45, .05; .25, .25), second marginal (.7, .3)
    expected = 0.45 * math.log(0.45 / 0.35) + 0.05 * math.log(0.05 / 0.15) + 0.25 * math.log(0.25 / 0.35)
    expected += 0.25 * math.log(0.25 / 0.15)
    found = mutual_information([0, 1], even, np.log([[0.9, 0.1], [0.5, 0.5]]))
    assert found == pytest.approx(expected)

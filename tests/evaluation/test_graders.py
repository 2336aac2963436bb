"""Graders: normalisation as in SQuAD, several references, and names that a calibration can be bound to."""

from __future__ import annotations

import pytest

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.graders import GRADERS, ExactMatch, TokenF1, normalise, token_f1


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("  The  Beatles! ", "beatles"),
        ("a rose by any other name", "rose by any other name"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("It's\nan\tapple", "its apple"),
        ("A", "a"),
        ("  +  ", "+"),
        ("", ""),
    ],
)
def test_normalisation(text: str, plain: str) -> None:
    assert normalise(text) == plain


def test_exact_match_with_several_references() -> None:
    grade = ExactMatch()
    assert grade("The U.K.", ["Great Britain", "UK"])
    assert not grade("UK and Ireland", ["Great Britain", "UK"])
    assert not grade("", ["UK"])
    assert not grade(" ", [" "])
    assert not grade("UK", [])


@pytest.mark.parametrize(
    ("text", "answer", "f1"),
    [
        ("Jane Austen", "jane austen", 1.0),
        ("Austen", "Jane Austen", 2 / 3),
        ("the novelist Jane Austen wrote it", "Jane Austen", 4 / 7),
        ("paris paris", "paris", 2 / 3),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_token_f1(text: str, answer: str, f1: float) -> None:
    assert token_f1(text, answer) == pytest.approx(f1, abs=1e-15)


def test_token_f1_lets_through_at_its_threshold() -> None:
    assert TokenF1(2 / 3)("Austen", ["Charlotte", "Jane Austen"])
    assert not TokenF1(0.7)("Austen", ["Charlotte", "Jane Austen"])


def test_names_tell_the_settings() -> None:
    assert (ExactMatch().name, TokenF1().name, TokenF1(0.8).name) == ("exact-match", "token-f1>=0.5", "token-f1>=0.8")
    assert set(GRADERS) == {"exact-match", "token-f1"}


@pytest.mark.parametrize("threshold", [0.0, 1.1, -1.0, float("nan")])
def test_a_threshold_that_is_none_is_refused(threshold: float) -> None:
    with pytest.raises(InputError, match="lies in"):
        TokenF1(threshold)

"""Where a model thinks, vLLM's answers are scored given their thoughts, which end where our engine would end them."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import THINKING, made, run

pytestmark = pytest.mark.heavy

LONG = 2000


@pytest.fixture(scope="module")
def thoughts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("thoughts")
    path = made("llama", folder / "model", template=THINKING, positions=4096)
    return run("thoughts.py", path, LONG, folder / "found.json")


def test_a_thought_ends_after_its_budget_as_in_our_engine(thoughts: dict[str, Any]) -> None:
    *lengths, none = thoughts["thoughts"]
    assert none == 0
    closing = lengths[0] - 1
    assert lengths == [1 + closing, 9 + closing, LONG + closing]
    for one, other in (thoughts["written"], thoughts["ours"], (thoughts["plain"], thoughts["own_plain"])):
        assert one == other
    assert thoughts["limits"] == 0


def test_scores_given_the_thought_are_our_engines(thoughts: dict[str, Any]) -> None:
    """Read off vLLM's own passes, whatever the length of the thought."""
    mine, its = thoughts["scores"]
    for one, other in zip(mine, its, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert thoughts["tiers"] == ["replay"]
    assert thoughts["passes"] == 0


def test_a_thought_is_withheld_with_its_draft(thoughts: dict[str, Any]) -> None:
    assert thoughts["withheld"] == {"through": ["answer", True, False], "held": ["abstain", None, "I don't know."]}


def test_a_cut_thought_is_unscored(thoughts: dict[str, Any]) -> None:
    found = thoughts["cut"]
    assert (found["status"], found["action"], found["promised"]) == ("unscored", "abstain", False)
    assert "cut off within its reasoning" in found["reason"]

"""vLLM writes, our engine scores on its weights: the tokens, scores, ends and refusals of our engine alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from semgrad_guard.vllm.shared_weights import SUPPORTED

pytestmark = pytest.mark.heavy

Find = Callable[[str, str], dict[str, Any]]
Scores = Sequence[Sequence[float]]


@pytest.fixture(params=[*SUPPORTED, "smollm2"])
def exact(request: pytest.FixtureRequest, found: Find) -> dict[str, Any]:
    """What was found in float32."""
    return found(request.param, "float32")


def close(one: Scores, other: Scores, within: float) -> bool:
    """Whether all scores of some answers are those of others, but for so much of themselves."""
    return all(a == pytest.approx(b, rel=within) for a, b in zip(one, other, strict=True))


def test_all_weights_are_shared(exact: dict[str, Any]) -> None:
    shared, every = exact["shared"]
    assert shared == every >= 27


def test_answers_are_our_engines_and_scoring_changes_none(exact: dict[str, Any]) -> None:
    theirs, again, after, ours = exact["ids"]
    assert theirs == again == after == ours
    assert exact["ends"] == exact["own_ends"]


def test_scores_are_our_engines(exact: dict[str, Any]) -> None:
    assert close(exact["scores"], exact["own_answers_scores"], 1e-5)
    assert close(exact["scored_again"], exact["own_scores"], 1e-5)
    assert all(each > 0 for row in exact["scores"] for each in row)


def test_in_half_precision_scores_are_close(found: Find) -> None:
    half = found("smollm2", "bfloat16")
    assert half["shared"][0] == half["shared"][1]
    assert close(half["scored_again"], half["own_scores"], 0.02)


def test_streams_stops_and_seeds(exact: dict[str, Any]) -> None:
    whole, streamed = exact["stream"]
    assert streamed == whole
    expected, text, reason = exact["stopped"]
    assert (text, reason) == (expected, "stop")
    first, second, other = exact["sampled"]
    assert first == second != other


def test_what_is_left_stops_the_engine(exact: dict[str, Any]) -> None:
    assert exact["cancelled"] == {"idle": True, "error": "AnswerCancelledError", "left": False}
    assert exact["rng_untouched"]


def test_a_guard_decides_and_a_calibration_knows_its_engine(exact: dict[str, Any]) -> None:
    assert exact["guarded"] == {"actions": ["answer", "abstain"], "refused": [True, True]}

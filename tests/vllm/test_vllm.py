"""vLLM writes, our engine scores on its weights: the tokens, scores, ends and refusals of our engine alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from semgrad_guard.vllm.shared_weights import SUPPORTED

from .conftest import made, run

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
    assert exact["end_tokens"][0] == exact["end_tokens"][1]


def test_scores_are_our_engines(exact: dict[str, Any]) -> None:
    assert close(exact["scored_again"], exact["own_scores"], 1e-5)
    assert close(*exact["same_answers"], 1e-5)
    assert all(score > 0 for row in exact["scores"] for score in row)


def test_sentences_have_our_engines_scores(exact: dict[str, Any], request: pytest.FixtureRequest) -> None:
    for mine, its in exact["sentences"]:
        assert mine == pytest.approx(its, rel=1e-5)
        assert len(mine) > 1 or "smollm2" not in request.node.name


def test_sentences_leave_as_they_end(exact: dict[str, Any]) -> None:
    found = exact["sentence_stream"]
    for whole, streamed in found["texts"]:
        assert streamed == whole
    assert "".join(piece for piece, _ in found["pieces"]) == found["texts"][0][0]
    assert [known for _, known in found["pieces"]] == list(range(1, len(found["scores"][0]) + 1))
    assert found["scores"][1] == pytest.approx(found["scores"][0], rel=1e-5)
    stopped, left = found["actions"]
    assert left == stopped[: len(left)]
    assert left[-1] == "stop"
    assert not found["unfinished"]


def test_answers_are_replayed_from_what_vllm_has_left(exact: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """No prompt is read again, but where vLLM's attention is less exact than float32 (Gemma 2's soft cap)."""
    capped = "gemma2" in request.node.name
    assert exact["tiers"] == ["replay"]
    assert (exact["passes_of_scores"] > 0) == capped


@pytest.mark.parametrize("kind", [*SUPPORTED, "smollm2"])
def test_in_half_precision_scores_are_close(found: Find, kind: str) -> None:
    """On weights alone to 2 %. From vLLM's states to what bfloat16 leaves open (ours: 2 % off float32)."""
    half = found(kind, "bfloat16")
    assert half["shared"][1] - half["shared"][0] in (0, half["biases"]), "with AMX vLLM keeps biases in float32"
    assert half["tiers"] == ["replay"]
    assert close(half["scored_again"], half["own_scores"], 0.02)
    apart = sorted(half["half_apart"])
    assert median(apart) < (0.03 if kind == "smollm2" else 0.02)
    assert apart[-1] < 0.1


def test_observing_reads_vllms_own_passes(exact: dict[str, Any]) -> None:
    seen = exact["observed"]
    assert seen["passes"] == 0
    for found in (seen["told"], seen["without"]):
        for observed, own in zip(found, seen["own"], strict=True):
            for mine, its in zip(observed, own, strict=True):
                assert mine == pytest.approx(its, rel=1e-4, abs=1e-4 * max(map(abs, its)))


def test_what_vllm_does_not_take_leaves_nothing_behind(exact: dict[str, Any]) -> None:
    found = exact["refused"]
    assert "vLLM does not take this request" in found["error"]
    assert not found["left"]
    assert found["next"] > 0


def test_an_engine_in_another_process_is_refused(tmp_path: Path) -> None:
    result = run(
        "apart.py", made("llama", tmp_path / "model"), tmp_path / "told.json", VLLM_ENABLE_V1_MULTIPROCESSING="1"
    )
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in result["error"]


def test_ten_thousand_requests_with_too_little_room(tmp_path: Path) -> None:
    """Read in pieces, preempted, taken from the prefix cache, let go: no token changes and no number is another's."""
    found = run("mixed.py", made("llama", tmp_path / "model"), 10_000, tmp_path / "found.json")
    assert found["answers"] + found["let_go"] == 10_000
    assert min(found["let_go"], found["preempted"], found["cached"]) > 0
    counts = {name: len(found[name]) for name in ("unsteady", "near_ties", "changed")}
    print(f"{found['answers']} answers, {found['replayed']} replayed without reading; {counts}")
    assert found["changed"] == []
    assert len(found["near_ties"]) < 20
    assert found["second_passes"] == 0
    assert max(found["observed_apart"]) < 1e-4
    assert len(found["scores_apart"]) > 9_000
    assert max(found["scores_apart"]) < 1e-4
    assert found["replayed"] > 9_000


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

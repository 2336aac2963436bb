"""Bindings: what differs is named, what is unknown is not compared."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from semgrad_guard.calibration import Binding, Calibration, calibrate
from semgrad_guard.errors import BindingMismatchError

FULL = Binding(
    model="pocket",
    revision="v1",
    fingerprint="f1",
    estimator="hybridgrad",
    settings={"tau": 1.0, "variant": "paper", "layers": [3, 4]},
    prompt_template="chatml",
    grader="exact-match",
    upstream="c1",
)
OTHER: dict[str, Any] = {
    "model": "llama",
    "revision": "v2",
    "fingerprint": "f2",
    "estimator": "semgrad",
    "settings": {"tau": 2.0, "variant": "paper", "layers": [3, 4]},
    "prompt_template": "zephyr",
    "grader": "f1",
    "upstream": "c2",
}


def test_every_field_is_compared_or_named_as_an_exception() -> None:
    assert set(OTHER) | {"max_tokens", "stop", "on_cut", "options"} == set(Binding.model_fields)


@pytest.mark.parametrize(("cut", "elsewhere"), [(None, False), (256, False), ("\n", False), (1, True), ("k", True)])
def test_where_answers_are_cut_off_counts_only_for_those_that_are(cut: int | str | None, *, elsewhere: bool) -> None:
    bound = FULL.model_copy(update={"max_tokens": 256, "stop": ("\n",)})
    assert (bound.cut_elsewhere(cut) is not None) == elsewhere
    assert FULL.cut_elsewhere(cut) is None, "a calibration that does not state it is not compared"
    assert bound.differences(FULL.model_copy(update={"max_tokens": 1, "stop": ("k",)})) == {}


def test_weights_in_a_folder_of_another_name_are_told_from_other_weights() -> None:
    moved = FULL.model_copy(update={"model": "copied"})
    with pytest.raises(BindingMismatchError, match="give it its name again"):
        FULL.require(moved)
    with pytest.raises(BindingMismatchError) as caught:
        FULL.require(moved.model_copy(update={"fingerprint": "f2"}))
    assert "its name again" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "text", "elsewhere"), [(256, "one line", False), (257, "one line", True), (9, "two\nlines", True)]
)
def test_an_answer_that_ended_by_itself_keeps_within_the_limits_of_the_calibration(
    tokens: int, text: str, *, elsewhere: bool
) -> None:
    bound = FULL.model_copy(update={"max_tokens": 256, "stop": ("\n",)})
    assert (bound.cut_elsewhere(None, tokens=tokens, text=text) is not None) == elsewhere
    unlimited = FULL.model_copy(update={"max_tokens": 0})
    assert unlimited.cut_elsewhere(None, tokens=tokens, text=text) is None


@pytest.mark.parametrize("field", OTHER)
def test_each_field_is_compared_and_named(field: str) -> None:
    other = FULL.model_copy(update={field: OTHER[field]})
    assert FULL.differences(other) == {field: (getattr(FULL, field), OTHER[field])}
    with pytest.raises(BindingMismatchError, match=f"{field} is .* and was .* at calibration") as caught:
        FULL.require(other)
    assert not [name for name in OTHER if name != field and f"{name} is" in str(caught.value)]


def test_a_setting_that_only_one_side_has_is_a_difference() -> None:
    fewer = FULL.model_copy(update={"settings": {"tau": 1.0, "variant": "paper"}})
    for one, other in ((FULL, fewer), (fewer, FULL)):
        with pytest.raises(BindingMismatchError, match="layers"):
            one.require(other)
    assert "settings" in FULL.differences(FULL.model_copy(update={"settings": {}}))
    sampled = FULL.model_copy(update={"settings": {**(FULL.settings or {}), "temperature": 0.5}})
    with pytest.raises(BindingMismatchError, match=re.escape("settings is {'temperature': 0.5} and was not set at")):
        FULL.require(sampled)
    with_none = FULL.model_copy(update={"settings": {**(FULL.settings or {}), "extra": None}})
    with pytest.raises(BindingMismatchError, match="extra"):
        FULL.require(with_none)


def test_what_either_side_does_not_state_is_not_compared() -> None:
    answer = Binding(model="pocket", estimator="hybridgrad")
    assert FULL.differences(answer) == {}
    assert answer.differences(FULL) == {}


@pytest.mark.parametrize(
    "bad",
    [
        {"model": None},
        {"estimator": 3},
        {"settings": {"x": float("nan")}},
        {"settings": {"x": {"y": {"z": 1}}}},
        {"temper": 1},
    ],
)
def test_what_is_no_binding_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Binding(**{"model": "m", "estimator": "e", **bad})


def test_settings_keep_their_types_through_json() -> None:
    settings = {"a": True, "b": 1, "c": 1.0, "d": "1", "e": None, "f": [1, 2.5, "x", False]}
    binding = Binding(model="m", estimator="e", settings=settings)
    again = Binding.model_validate_json(binding.model_dump_json())
    assert again == binding
    assert repr(again.settings) == repr(settings)


def test_a_calibration_of_answers_that_all_ended_by_themselves_says_so(tmp_path: Path) -> None:
    bound = Binding(model="m", estimator="e", max_tokens=0, stop=("k",))
    assert bound.cut_elsewhere(5) == "the answer was cut off after 5 tokens, and those of the calibration not"
    assert bound.cut_elsewhere("k") is bound.cut_elsewhere(None) is None
    made = calibrate(range(100), [True] * 100, alpha=0.2, delta=0.2, binding=bound.model_copy(update={"stop": ()}))
    kept = Calibration.load(made.save(tmp_path / "made.json")).binding
    assert kept is not None
    assert kept.max_tokens == 0


def test_what_a_moved_folder_takes_is_said_beside_its_name() -> None:
    moved = FULL.model_copy(update={"model": "copy", "prompt_template": "zephyr"})
    with pytest.raises(BindingMismatchError, match=r"model is 'copy'.* give it its name again\); prompt_template is"):
        FULL.require(moved)

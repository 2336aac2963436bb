"""Bindings: what differs is named, what is unknown is not compared; and the options of calls to other servers."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from semgrad_guard.calibration import Binding, Calibration, calibrate
from semgrad_guard.calibration.binding import call_options, cutting_options, unlike_calls
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
    with pytest.raises(BindingMismatchError, match=r"model is 'copied'.* give it its name again\); prompt_template is"):
        FULL.require(moved.model_copy(update={"prompt_template": "zephyr"}))


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


# Which options of a call to another server leave its answers as they were.


OWN = Binding(model="m", estimator="e", max_tokens=24, stop=("END",))


def made_with(*layers: dict[str, Any]) -> Binding:
    return Binding(model="m", estimator="e", options=call_options(*layers))


@pytest.mark.parametrize(
    "given",
    [
        {"user": "me", "n": 3, "stream": True, "seed": 4, "logprobs": True, "messages": [1], "tools": [{}]},
        {"temperature": None, "stop": [], "logit_bias": {}, "bad_words": [], "extra_body": {}},
        {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "best_of": 1},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "add_generation_prompt": True},
    ],
)
def test_what_changes_no_answer_is_no_option(given: dict[str, Any]) -> None:
    assert call_options(given) == {}


@pytest.mark.parametrize(
    "given",
    [
        *({"temperature": 2}, {"top_p": 0.9}, {"top_k": 50}, {"logit_bias": {"5": 100}}, {"repetition_penalty": 1.9}),
        *({"presence_penalty": 2}, {"min_tokens": 50}, {"response_format": {"type": "json_object"}}, {"lora": "x"}),
        *({"chat_template_kwargs": {"enable_thinking": True}}, {"guided_choice": ["a"]}, {"bad_words": ["a"]}),
        *({"continue_final_message": True}, {"reasoning_effort": "high"}, {"documents": [{"text": "a"}]}),
        *({"extra_body": {"top_k": 2}}, {"model_kwargs": {"extra_body": {"never_heard_of": 0}}}, {"anything": False}),
        *({"web_search_options": {}}, {"json_schema": {}}, {"lora": []}, {"temperature": []}),
        *({"temperature": 2, "extra_body": {"temperature": 0}}, {"top_k": 9, "options": {"top_k": 0}}),
        *({"stop": "a"}, {"stop": ["END", "a"]}, {"max_tokens": 2}, {"max_completion_tokens": 3}, {"stop": 7}),
    ],
)
def test_any_other_option_is_unlike_the_calls_of_a_calibration(given: dict[str, Any]) -> None:
    options = call_options(given)
    for binding in (None, OWN, made_with({"temperature": 0}), made_with({})):
        assert unlike_calls(options, binding, tokens=3), binding
    same = made_with(given)
    assert unlike_calls(options, same, tokens=2) == ()
    assert unlike_calls({}, same, tokens=9, text="a b END")


@pytest.mark.parametrize(
    ("calibrated", "now", "fits"),
    [
        (None, {}, True),
        (None, {"temperature": 0}, True),
        ({}, {}, True),
        ({}, {"temperature": 0}, False),
        ({"temperature": 0}, {}, False),
        ({"temperature": 0}, {"temperature": None}, False),
        ({"temperature": 0.0}, {"temperature": 0}, True),
        ({"temperature": 0.7}, {"temperature": 0.7}, True),
    ],
)
def test_a_temperature_that_is_left_out_is_the_servers_own(
    calibrated: dict[str, Any] | None, now: dict[str, Any], fits: bool
) -> None:
    binding = OWN if calibrated is None else made_with(calibrated)
    assert (unlike_calls(call_options(now), binding, tokens=3) == ()) is fits


@pytest.mark.parametrize(
    ("limit", "tokens", "fits"), [(24, 24, True), (24, 3, True), (50, 3, True), (3, 2, True), (3, 3, False)]
)
def test_an_answer_that_ended_by_itself_is_the_same_whatever_the_limit(limit: int, tokens: int, fits: bool) -> None:
    assert (unlike_calls(call_options({"max_tokens": limit}), OWN, tokens=tokens) == ()) is fits


def test_later_layers_replace_earlier_ones_and_nothing_secret_is_kept() -> None:
    assert call_options({"temperature": 0.7, "stop": ["a"]}, {"temperature": None, "stop": ["b"]}) == {"stop": ["b"]}
    found = call_options({"extra_headers": {"authorization": "Bearer secret"}, "x" * 99: "y" * 99})
    assert "secret" not in str(found)
    assert all(len(name) <= 64 and len(str(value)) <= 64 for name, value in found.items())


def test_an_answer_of_the_scored_model_itself_has_no_call() -> None:
    assert unlike_calls(None, OWN, tokens=30, text="END") == ()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"stop_regex": "a", "temperature": 2, "min_tokens": 3}, ["stop_regex"]),
        ({"extra_body": {"stop": ["a"]}, "options": {"num_predict": 2}}, ["num_predict", "stop"]),
        ({"stop": "a", "extra_body": {"stop": "b"}}, ["extra_body.stop", "stop"]),
        ({"custom_stopping_strings": ["a"], "max_length": 2}, ["custom_stopping_strings", "max_length"]),
        ({"stop": [], "stop_token_ids": [], "max_tokens": None, "include_stop_str_in_output": True}, []),
        ({"messages": [{"stop": "a"}], "metadata": {"stop": "a"}, "max_retries": 2, "ignore_eos": True}, []),
    ],
)
def test_what_can_end_an_answer_early_is_known_by_its_name(given: dict[str, Any], found: list[str]) -> None:
    assert cutting_options(given) == found

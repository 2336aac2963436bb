"""Which options of a call to another server leave its answers as they were."""

from __future__ import annotations

from typing import Any

import pytest

from semgrad_guard.calibration import Binding
from semgrad_guard.calibration.call_options import call_options, cutting_options, unlike_calls

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

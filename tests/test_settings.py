"""An option is declared once: every front has its default, bounds, choices and description from there."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from typer.main import get_command

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from llama_index_semgrad_guard import SemGradLLM
from semgrad_guard import settings
from semgrad_guard.cli import app
from semgrad_guard.declared import declared_options
from semgrad_guard.engine.answers.options import GenerationOptions, Sampling
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import HybridGrad
from semgrad_guard.guard import Guard, Policy, Terms
from semgrad_guard.loading import EstimatorChoice, ModelSource
from semgrad_guard.ray import score
from semgrad_guard.server.app import Limits
from semgrad_guard.server.server_settings import LogOptions, OtherServers, ServeOptions, ServerSettings

COMMANDS: Any = get_command(app).commands  # type: ignore[attr-defined]
GROUPS = [
    *(kind for kind in vars(settings).values() if isinstance(kind, type) and is_dataclass(kind)),
    *(ServeOptions, OtherServers, LogOptions, EstimatorChoice),
]
DECLARED = {name: option for group in GROUPS for name, option in declared_options(group).items()}
"""The declaration of every option."""
CLASSES = (
    *(GenerationOptions, Policy, Terms, ServerSettings, Limits),
    *(ChatSemGrad, SemGradLLM, GuardedChatModel, HybridGrad, Objective, Sampling),
)
FUNCTIONS = (Guard, UncertaintyRouterCallback, Policy.from_calibration, score)
APART: Mapping[tuple[str, str], str] = {
    ("Sampling", "seed"): "a sample is repeated",
    ("Sampling", "temperature"): "samples differ",
    ("HybridGrad", "variant"): "None leaves it to the estimator, and this is the estimator's",
    ("HybridGrad", "tau"): "as above",
    ("HybridGrad", "beta"): "as above",
    ("Objective", "variant"): "as above",
    ("UncertaintyRouterCallback", "on_unscored"): "None leaves it to the policy",
    ("ServerSettings", "model"): "one or several, with an upstream by its own names",
    ("Guard", "model"): "a loaded model",
    ("GuardedChatModel", "model"): "a chat model",
    ("ChatSemGrad", "estimator"): "an object",
    ("SemGradLLM", "estimator"): "as above",
    ("serve", "engine"): "a word and not None",
    ("calibrate", "engine"): "as above",
    ("gate", "engine"): "as above",
    ("calibrate", "on_cut"): "None is a policy's, which leaves it to its calibration",
    ("evaluate", "seed"): "of the methods that sample",
}
"""Where a front has another default, or an option of the same name, and why."""


def defaults() -> Iterator[tuple[str, str, Any]]:
    """Front, option and default, of every front in Python."""
    for kind in CLASSES:
        found = (
            {f.name: f.default for f in fields(kind)}
            if not issubclass(kind, BaseModel)
            else {name: field.default for name, field in kind.model_fields.items()}
        )
        yield from ((kind.__name__, name, default) for name, default in found.items() if name in DECLARED)
    for function in FUNCTIONS:
        for name, parameter in inspect.signature(function).parameters.items():
            if name in DECLARED:
                yield function.__qualname__, name, parameter.default


def test_every_front_has_the_declared_defaults() -> None:
    apart = {(front, name) for front, name, default in defaults() if default != DECLARED[name].default}
    assert apart == {place for place in APART if place[0] not in COMMANDS}


def test_an_option_is_declared_once() -> None:
    own = [(name, group) for group in GROUPS for name in vars(group).get("__annotations__", ())]
    twice = {name for name, _ in own if sum(name == other for other, _ in own) > 1}
    assert not twice


def test_a_command_has_the_declared_defaults() -> None:
    options = [(name, option) for name, found in COMMANDS.items() for option in found.params]
    known = [(name, option) for name, option in options if option.name in DECLARED and not option.multiple]
    apart = {(name, option.name) for name, option in known if option.default != DECLARED[option.name].default}
    assert apart == {place for place in APART if place[0] in COMMANDS}
    assert len(known) > 40


NUMBERS = sorted(name for name, option in DECLARED.items() if option.kind in (int, float))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_its_range_is_refused_by_every_front(name: str) -> None:
    option = DECLARED[name]
    outside = option.kind(option.bounds.low - 1) if math.isfinite(option.bounds.low) else math.nan
    kinds: tuple[Any, ...] = (
        *(GenerationOptions, Policy, partial(Terms, policy=Policy(threshold=1.0)), HybridGrad, Objective),
        *(ServerSettings, ChatSemGrad, SemGradLLM),
    )
    for kind in kinds:
        if name in inspect.signature(kind).parameters:
            with pytest.raises((InputError, ValidationError), match=name):
                kind(**{name: outside})


@pytest.mark.parametrize(
    "given",
    [
        {"keep_log": 0},  # deleted every decision
        {"max_body": 1},
        {"timeout": 1e9},
        {"threshold": float("inf")},
        {"queue": 10**9},
        {"estimator": "guess"},  # a KeyError when the model was loaded
        {"estimator": "states"},  # was never fitted
        {"dtype": "int8"},
        {"quantization_config": {}},
        {"abstain_message": ""},
        {"allow_host": [""]},
    ],
)
def test_a_file_of_settings_is_read_as_strictly_as_the_command_line(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        ServerSettings(**given)


def test_a_source_of_a_model_is_checked_wherever_it_comes_from() -> None:
    with pytest.raises(InputError, match="dtype must be one of"):
        ModelSource(model="pocket", dtype="int8")  # type: ignore[arg-type]

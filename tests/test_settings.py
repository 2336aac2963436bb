"""An option is declared once: every front has its default, bounds, choices and description from there."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from pydantic import BaseModel, ValidationError
from typer.main import get_command

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from llama_index_semgrad_guard import SemGradLLM
from semgrad_guard import Calibration, settings
from semgrad_guard.cli import app
from semgrad_guard.cli.command import derive
from semgrad_guard.cli.options import Decoding, LearnedEstimatorSpec
from semgrad_guard.declared import Bounds, Option, declared_option, declared_options
from semgrad_guard.engine.answers.options import GenerationOptions, Sampling
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import HybridGrad
from semgrad_guard.guard import Guard, Policy, RouterOptions, Terms
from semgrad_guard.loading import EstimatorChoice, ModelSource
from semgrad_guard.ray import score
from semgrad_guard.server.app import Limits
from semgrad_guard.server.protocol import Overrides
from semgrad_guard.server.settings import LogOptions, OtherServers, ServeOptions, ServerSettings

COMMANDS: Any = get_command(app).commands  # type: ignore[attr-defined]
GROUPS = [
    *(kind for kind in vars(settings).values() if isinstance(kind, type) and is_dataclass(kind)),
    *(ServeOptions, OtherServers, LogOptions, EstimatorChoice),
]
DECLARED = {name: option for group in GROUPS for name, option in declared_options(group).items()}
"""The declaration of every option."""
CLASSES = (
    *(GenerationOptions, Policy, Terms, ServerSettings, Overrides, Limits, Decoding),
    *(ChatSemGrad, SemGradLLM, GuardedChatModel, HybridGrad, Objective, Sampling),
)
FUNCTIONS = (Guard, UncertaintyRouterCallback, Policy.from_calibration, score)
APART: Mapping[tuple[str, str], str] = {
    ("Decoding", "seed"): "a command repeats its answers",
    ("Sampling", "seed"): "a sample is repeated",
    ("Sampling", "temperature"): "samples differ",
    ("HybridGrad", "variant"): "None leaves it to the estimator, and this is the estimator's",
    ("HybridGrad", "tau"): "as above",
    ("HybridGrad", "beta"): "as above",
    ("Objective", "variant"): "as above",
    ("ask", "seed"): "a command repeats its answers",
    ("calibrate", "seed"): "as above",
    ("gate", "seed"): "as above",
    ("Overrides", "mode"): "None leaves it to the server",
    ("UncertaintyRouterCallback", "on_unscored"): "None leaves it to the policy",
    ("ServerSettings", "model"): "one or several, with an upstream by its own names",
    ("serve", "model"): "as above",
    ("demo", "model"): "one of those with a name",
    ("calibrate", "upstream"): "a calibration's id",
    ("Guard", "model"): "a loaded model",
    ("GuardedChatModel", "model"): "a chat model",
    ("ChatSemGrad", "estimator"): "an object",
    ("SemGradLLM", "estimator"): "as above",
    ("calibrate", "estimator"): "those that learn from labels, too",
    ("probe", "max_tokens"): "short answers are graded as well",
    ("score", "by"): "every sentence or clause of a text is scored, and none is decided about",
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


def annotated() -> Iterator[tuple[str, str, Option | None]]:
    """Front, option and its declaration, of every front in Python; records and dictionaries of options included."""
    for front in (*CLASSES, Calibration, RouterOptions):
        hints = _fields(front) if issubclass(front, BaseModel) else get_type_hints(front, include_extras=True)
        yield from ((front.__name__, name, _option_of(name, kind)) for name, kind in hints.items())
    for function in FUNCTIONS:
        made: Any = function.__init__ if isinstance(function, type) else function
        for name, parameter in inspect.signature(made, eval_str=True).parameters.items():
            yield function.__qualname__, name, _option_of(name, parameter.annotation)


def _fields(kind: type[BaseModel]) -> dict[str, Any]:
    """The annotations of a model's fields; some frameworks' own cannot be evaluated."""
    return {name: Annotated[field.annotation, *field.metadata, None] for name, field in kind.model_fields.items()}


def _option_of(name: str, kind: Any) -> Option | None:
    declared = declared_option(name, kind)
    return None if declared is None else declared.option


SAME_TYPE = {*declared_options(settings.AnswerOptions), *declared_options(settings.DeliveryOptions)} | {
    *("keep_draft", "timeout", "on_unscored", "on_unfamiliar", "alpha", "delta")
}
"""Options that have one type in every front. Others of the same names are objects, or as transformers takes them."""


def test_every_front_is_annotated_by_the_declaration() -> None:
    known = {**DECLARED, **declared_options(Policy), **declared_options(Terms), **declared_options(Calibration)}
    seen = [(front, name, option) for front, name, option in annotated() if name in SAME_TYPE and front != "Sampling"]
    assert [(front, name) for front, name, option in seen if option != known[name].option] == []
    assert {name for _, name, _ in seen} == SAME_TYPE


def test_an_option_is_declared_once() -> None:
    own = [(name, group) for group in GROUPS for name in vars(group).get("__annotations__", ())]
    twice = {name for name, _ in own if sum(name == other for other, _ in own) > 1}
    assert not twice


def test_the_command_line_has_the_declared_options() -> None:
    seen = 0
    for command, option in ((name, option) for name, found in COMMANDS.items() for option in found.params):
        declared = DECLARED.get(option.name)
        if declared is None or declared.option.panel is None or (command, option.name) in APART:
            continue
        seen += 1
        assert option.help == declared.option.description, (command, option.name)
        assert option.multiple == declared.option.several, (command, option.name)
        assert option.multiple or option.default == declared.default, (command, option.name)
    assert seen > 60


def test_an_option_of_a_server_is_one_of_its_command() -> None:
    command = {option.name for option in COMMANDS["serve"].params}
    assert set(declared_options(ServerSettings)) <= command


def read(name: str, value: str) -> Any:
    """An option's value as the command line reads it."""

    def command(*, options: Any) -> None: ...

    command.__annotations__["options"] = next(group for group in GROUPS if name in declared_options(group))
    (parameter,) = [parameter for parameter in derive(command).parameters if parameter.name == name]
    return parameter.annotation.__metadata__[0].parser(value)


NUMBERS = sorted(name for name, option in DECLARED.items() if option.kind in (int, float))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_its_range_is_refused_by_every_front(name: str) -> None:
    option = DECLARED[name]
    outside = option.kind(option.option.bounds.low - 1) if math.isfinite(option.option.bounds.low) else math.nan
    kinds: tuple[Any, ...] = (
        *(GenerationOptions, Policy, partial(Terms, policy=Policy(threshold=1.0)), HybridGrad, Objective),
        *(ServerSettings, Overrides, ChatSemGrad, SemGradLLM),
    )
    for kind in kinds:
        if name in inspect.signature(kind).parameters:
            with pytest.raises((InputError, ValidationError), match=name):
                kind(**{name: outside})
    if option.option.panel is not None:
        with pytest.raises(typer.BadParameter, match=r"out of range|finite"):
            read(name, str(outside))


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


def test_learned_estimators_are_named_for_calibrations_only() -> None:
    assert "states" not in declared_options(EstimatorChoice)["estimator"].choices
    assert "states" in declared_options(LearnedEstimatorSpec)["estimator"].choices


@dataclass(frozen=True, kw_only=True)
class WithPatience(settings.AnswerLimit):
    """A class of options with one more: all that a new option takes."""

    patience: Annotated[int, Option("Tries.", settings.ANSWERS, "N", Bounds(1, 9))] = 2


def test_a_new_option_is_declared_in_one_place() -> None:
    def command(*, options: WithPatience) -> None: ...

    class Served(BaseModel, WithPatience, frozen=True): ...

    derived = derive(command)
    parameter = {parameter.name: parameter for parameter in derived.parameters}["patience"]
    info = parameter.annotation.__metadata__[0]
    assert (parameter.default, info.help, info.metavar) == (2, "Tries.", "N")
    given = {"max_tokens": 3, "max_thinking_tokens": None, "patience": 4}
    assert derived.collected(dict(given))["options"] == WithPatience(max_tokens=3, patience=4)
    assert Served().patience == 2
    with pytest.raises(ValueError, match="patience"):
        Served(patience=10)
    with pytest.raises(InputError, match="patience: 0 is out of range: it is at least 1 and at most 9"):
        declared_options(WithPatience)["patience"].require(0)

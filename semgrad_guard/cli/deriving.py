"""Options of the command line, derived from their declarations in `semgrad_guard.settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import typer
from pydantic import BaseModel, ValidationError

from semgrad_guard.cli import values
from semgrad_guard.declared import Declared, declared_option, declared_options
from semgrad_guard.errors import InputError

Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class Derived:
    """The parameters of a command, with those of a class of options spread out, and the way back."""

    parameters: list[inspect.Parameter]
    groups: Mapping[str, type[Any]]

    def collected(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the function: options of a class are put into one object.

        Raises:
            BadParameter: two options contradict each other.
        """
        for name, group in self.groups.items():
            options = {parameter.name: given.pop(parameter.name) for parameter in parameters_of(group)}
            given[name] = _made(group, {key: value for key, value in options.items() if value is not None})
        return given


def derive(function: Callable[..., Any]) -> Derived:
    """The parameters of a command, as typer reads them."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        kind: Any = parameter.annotation
        if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel)):
            groups[parameter.name] = kind
            parameters += parameters_of(kind)
        else:
            option = declared_option(parameter.name, kind, parameter.default)
            parameters.append(parameter if option is None else parameter.replace(annotation=_annotation(option)))
    return Derived(parameters, groups)


def parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    """The options of a class that the command line has, as parameters of a function."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if declared.option.several else declared.default,
            annotation=_annotation(declared),
        )
        for name, declared in declared_options(group).items()
        if declared.option.panel is not None
    ]


def _annotation(declared: Declared) -> Any:
    option, name = declared.option, declared.name.replace("_", "-")
    usual = f"--{name}/--no-{name}" if declared.default is True else f"--{name}"
    spelled = (option.spelled,) if isinstance(option.spelled, str) else option.spelled or (usual,)
    if declared.kind is bool:
        return Annotated[bool, typer.Option(*spelled, help=option.description, rich_help_panel=option.panel)]
    is_literal = get_origin(declared.kind) is Literal
    completed = option.names or option.completions
    info: Any = typer.Option(
        *spelled,
        metavar=option.metavar,
        parser=None if is_literal else _reader(declared),
        autocompletion=values.completing(completed) if completed else None,
        help=option.description,
        show_default=option.shown or True,
        envvar=option.variable,
        rich_help_panel=option.panel,
    )
    kind: Any = declared.kind if is_literal else str
    if option.several or get_origin(declared.kind) is list:
        kind = list[kind]
    return Annotated[kind | None if declared.default is None or option.several else kind, info]


def _reader(declared: Declared) -> Reader:
    """A parser: what an option's type tells of it, and then the option's own check."""
    option, kind = declared.option, declared.element
    if option.reads is not None:
        read: Reader = getattr(values, option.reads)
    elif kind in (int, float):
        read = values.number(kind, option.bounds)
    elif kind is Path:
        read = values.path
    else:
        read = values.one_of(declared.choices) if declared.choices else values.text

    def checked(value: Any) -> Any:
        try:
            return option.checked(read(value))
        except (InputError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error

    return checked


def _made(group: type[Any], given: dict[str, Any]) -> Any:
    """An object of the class; repeated values are in the container that it declares: a tuple, or a mapping."""
    kinds = {name: get_origin(option.kind) for name, option in declared_options(group).items()}
    given = {name: kinds[name](value) if kinds[name] in (dict, tuple) else value for name, value in given.items()}
    try:
        return group(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise typer.BadParameter(first["msg"].removeprefix("Value error, ")) from error
